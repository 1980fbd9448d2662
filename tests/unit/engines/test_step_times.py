"""What is learned from the steps of a scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_tiered.engines.sglang.step_times import StepTimes


def batch(
    number: int,
    launch_s: float,
    *,
    num: int = 2,
    decodes: bool = True,
    after_gap: bool = False,
) -> Any:
    reqs = [
        SimpleNamespace(origin_input_ids=[0] * 10, output_ids=[0] * n)
        for n in range(num)
    ]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: decodes),
        forward_iter=number,
        launch_ts=launch_s,
        after_idle_gap=after_gap,
        reqs=reqs,
    )


def test_a_step_lasts_until_the_next_launch() -> None:
    """Of two decode steps with nothing between: no prefill, no pass unseen."""
    seen: list[Any] = []
    times = StepTimes(lambda *told: seen.append(told))
    times.observe(batch(1, 1.0))
    times.observe(batch(2, 1.5, num=3))
    times.observe(batch(3, 2.25))
    times.observe(batch(4, 4.0, decodes=False))
    times.observe(batch(5, 9.0))
    times.observe(batch(7, 9.5))
    assert seen == [
        (2, 21, pytest.approx(0.5)),
        (3, 33, pytest.approx(0.75)),
    ]


def test_a_wait_between_two_steps_is_part_of_neither() -> None:
    """A turn in which nobody decodes counts no pass, so their numbers do not tell."""
    seen: list[Any] = []
    times = StepTimes(lambda *told: seen.append(told))
    times.observe(batch(1, 1.0))
    times.observe(batch(2, 6.0, after_gap=True))
    times.observe(batch(3, 6.5))
    assert seen == [(2, 21, pytest.approx(0.5))]


def test_totals_are_those_of_the_step_itself() -> None:
    """Its forward had ended when it was observed; a prefill's teach nothing."""
    seen: list[tuple[float, ...]] = []
    total = [5.0]
    times = StepTimes(lambda *told: seen.append(told), lambda: (total[0],))
    for number, (moved, decodes) in enumerate(
        [(7.0, True), (0.5, True), (40.0, False), (1.0, True), (2.0, True)]
    ):
        total[0] += moved
        times.observe(batch(number, float(number), decodes=decodes))
    assert [told[3] for told in seen] == [7.0, 1.0]
