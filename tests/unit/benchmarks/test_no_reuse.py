"""Figures of prompts without reuse follow from the windows, and the turns are fair."""

from __future__ import annotations

from itertools import chain

import pytest
from no_reuse.figures import (
    AGAIN,
    PLAIN,
    SYSTEMS,
    by_start,
    figures,
    missed,
    throughputs,
)
from no_reuse.windows import PARTS, Window, block_order, prompts

NAMES = (PLAIN, AGAIN, *SYSTEMS)


def windows(
    seconds: dict[str, float],
    cpu_s: dict[str, float],
    blocks: int = 20,
    start: int = 0,
) -> list[Window]:
    """Return two windows a block and server; the machine slows down all the time."""
    found = []
    for block in range(start * blocks, (start + 1) * blocks):
        for place, name in enumerate(block_order(NAMES, block)):
            drift = 1 + 0.05 * (len(NAMES) * 2 * block + place)
            # Some noise, and not the same for all.
            noise = 1 + 0.002 * ((7 * block + 3 * place) % 5 - 2)
            each = {part.name: seconds[name] * drift * noise for part in PARTS}
            cpu = cpu_s[name] * drift * noise
            found.append(Window(name, start, block, each, cpu, 20))
    return found


SAME = dict.fromkeys(NAMES, 1.0)


def test_drift_of_the_machine_is_no_difference() -> None:
    """Equal servers are equal on a machine that becomes ever slower."""
    found = figures(windows(SAME, SAME))
    for key in ("no_reuse_throughput_vs_plain", "plain_vs_plain", "plain_vs_plain_cpu"):
        assert found[key] == pytest.approx(1.0, abs=0.003)
    low, high = found["plain_vs_plain_interval"]
    assert low <= 1.0 <= high
    assert missed(found | {"outputs_identical": True}) == []


def test_what_a_tier_costs_is_found() -> None:
    """What is more time is less throughput; CPU seconds are apart."""
    slow = SAME | {"tiered": 1.025, "tiered-disk": 1.05}
    found = figures(windows(slow, SAME | {"tiered": 1.02}))
    assert found["no_reuse_throughput_vs_plain"] == pytest.approx(1 / 1.025, abs=0.003)
    assert found["no_reuse_throughput_vs_plain_disk"] == pytest.approx(
        1 / 1.05, abs=0.003
    )
    assert found["cpu_per_prompt_vs_plain"] == pytest.approx(1.02, abs=0.003)
    assert found["cpu_per_prompt_vs_plain_disk"] == pytest.approx(1.0, abs=0.003)
    assert missed(found | {"outputs_identical": True}) == [
        "no_reuse_throughput_vs_plain",
        "no_reuse_throughput_vs_plain_disk",
        "cpu_per_prompt_vs_plain",
    ]


def test_unequal_plain_servers_fail_the_run() -> None:
    """Where two plain servers differ, no other difference means anything."""
    found = figures(windows(SAME | {AGAIN: 1.02}, SAME))
    assert "plain_vs_plain_interval" in missed(found | {"outputs_identical": True})


def test_processes_that_differ_are_told_from_sides_that_do() -> None:
    """A plain server that was lucky three times, and one that was once."""
    drawn = [1.03, 0.98, 1.0]
    every = [
        windows(SAME | {AGAIN: factor}, SAME, 8, start)
        for start, factor in enumerate(drawn)
    ]
    found = figures([*chain(*every)])
    low, high = found["plain_vs_plain_interval"]
    assert low < 1.0 < high
    each = [figures(one)["plain_vs_plain"] for one in by_start([*chain(*every)])]
    assert each == pytest.approx([1 / factor for factor in drawn], abs=0.003)
    alike = [windows(SAME | {AGAIN: 1.03}, SAME, 8, start) for start in range(3)]
    missing = missed(figures([*chain(*alike)]) | {"outputs_identical": True})
    assert "plain_vs_plain_interval" in missing


def test_one_block_has_no_interval() -> None:
    """And so misses what asks for one."""
    found = figures(windows(SAME, SAME, blocks=1)) | {"outputs_identical": True}
    assert found["cpu_per_prompt_vs_plain_interval"] is None
    assert missed(found) == [
        "no_reuse_throughput_vs_plain_interval",
        "cpu_per_prompt_vs_plain_half_width",
    ]


def test_the_first_minutes_have_names_of_their_own() -> None:
    """So that they can stand beside the steady state's."""
    first = throughputs(windows(SAME, SAME), "_first_minutes")
    assert "no_reuse_throughput_vs_plain_disk_first_minutes" in first
    assert not set(first) & set(figures(windows(SAME, SAME)))


@pytest.mark.parametrize("block", range(4))
def test_a_block_is_there_and_back(block: int) -> None:
    """So that everyone stands on average in the middle of it."""
    order = block_order(NAMES, block)
    assert order == order[::-1]
    assert order[0] == NAMES[block]
    assert sorted(order) == sorted(NAMES * 2)


def test_no_prompt_comes_again() -> None:
    """Neither in its window nor in another one; but a window is the same for all."""
    every = [*chain(*prompts(1, 0)), *chain(*prompts(1, 1)), *chain(*prompts(2, 0))]
    firsts = {request.prompt[:16] for request in every}
    assert len(firsts) == len(every) == 3 * sum(part.num_prompts for part in PARTS)
    assert prompts(1, 0) == prompts(1, 0)
