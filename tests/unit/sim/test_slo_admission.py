"""The SLO admission in the simulated server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import simulate

Make = Callable[..., ServerConfig]
PAGE = 4
TPOT_S, TTFT_S = 0.004, 0.5
NUM_SHORT = 30


def scheduled(config: ServerConfig, **settings: object) -> ServerConfig:
    return replace(config, scheduler=replace(config.scheduler, **settings))  # type: ignore[arg-type]


def guarded(config: ServerConfig, **settings: object) -> ServerConfig:
    targets = {"ttft_slo_s": TTFT_S, "tpot_slo_s": TPOT_S}
    config = replace(config, length_predictor="oracle")
    return scheduled(config, slo_admission="slo", **{**targets, **settings})


@pytest.fixture
def burst() -> SimWorkload:
    """An answer of 60 tokens, and 30 prompts that come while it is given."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 20, 60)
    for number in range(NUM_SHORT):
        builder.add(0.01 + 0.004 * number, 100, 8)
    return builder.build("burst")


def slow(result: SimResult) -> int:
    return sum(record.tpot_s > TPOT_S for record in result.records)


def test_fewer_decoders_are_late(make_config: Make, burst: SimWorkload) -> None:
    """Prefill first makes the guarded answer late; held prefill does not."""
    config = make_config(device=2_000, device_reuse=False)
    off = simulate(config, burst)
    on = simulate(guarded(config), burst)
    assert off.records[0].tpot_s > TPOT_S >= on.records[0].tpot_s
    assert slow(on) < slow(off)
    waits = [
        (o.queue_s, f.queue_s) for o, f in zip(on.records, off.records, strict=True)
    ]
    assert sum(o for o, _ in waits) > sum(f for _, f in waits)


def test_all_are_served(make_config: Make, burst: SimWorkload) -> None:
    """Held requests have all their tokens, and no event happens twice."""
    config = guarded(make_config(device=2_000, device_reuse=False))
    result = simulate(config, burst)
    for record, request in zip(result.records, burst.requests, strict=True):
        assert record.num_output_tokens == request.num_output_tokens
        assert not record.aborted
    assert result.log.digest() == simulate(config, burst).log.digest()


def test_targets_that_nobody_can_meet_hold_nobody(
    make_config: Make, burst: SimWorkload
) -> None:
    """A step alone takes longer: the run is the one without admission."""
    config = make_config(device=2_000, device_reuse=False)
    on = simulate(guarded(config, tpot_slo_s=1e-6), burst)
    assert on.log.digest() == simulate(config, burst).log.digest()


def test_without_a_tpot_target_nobody_is_held(
    make_config: Make, burst: SimWorkload
) -> None:
    """A TTFT target alone changes nothing."""
    config = make_config(device=2_000, device_reuse=False)
    on = simulate(guarded(config, tpot_slo_s=0.0), burst)
    assert on.log.digest() == simulate(config, burst).log.digest()


def test_a_ttft_target_is_kept_where_it_can_be(
    make_config: Make, burst: SimWorkload
) -> None:
    """The tighter it is, the less the guarded answer is guarded."""
    config = make_config(device=2_000, device_reuse=False)
    longest = []
    for ttft_s in (0.05, 10.0):
        result = simulate(guarded(config, ttft_slo_s=ttft_s), burst)
        longest.append(max(record.ttft_s for record in result.records))
    assert longest[0] < longest[1]


def test_a_long_prompt_is_computed_in_smaller_parts(make_config: Make) -> None:
    """Chunks of 64 tokens are cut to what the decoder can spare; none is lost."""
    builder = WorkloadBuilder(PAGE)
    builder.add(0.0, 20, 60)
    builder.add(0.01, 600, 2)
    workload = builder.build("long")
    config = guarded(make_config(device=2_000, device_reuse=False))
    result = simulate(config, workload)
    parts = [row for row in result.log.rows if "prefill" in row and row[2] == 1]
    lengths = np.array([row[-1] for row in parts])
    assert lengths.sum() == 600
    assert lengths.min() < 64
    assert (lengths[:-1] % PAGE == 0).all()
    assert result.records[0].tpot_s <= TPOT_S


def test_tiers_and_retractions_go_on_under_it(make_config: Make) -> None:
    """A pool too small for all, with a host tier: everybody ends."""
    builder = WorkloadBuilder(PAGE)
    rng = np.random.default_rng(2)
    prefix = builder.prefix(0, 10)
    for number in range(40):
        builder.add(0.01 * number, 60, int(rng.integers(2, 40)), prefix=prefix)
    workload = builder.build("tight")
    config = make_config(device=60, host=200)
    result = simulate(guarded(config, ttft_slo_s=0.2), workload)
    assert [record.num_output_tokens for record in result.records] == [
        request.num_output_tokens for request in workload.requests
    ]


@pytest.mark.parametrize(
    "wrong", [{"slo_admission": "maybe"}, {"ttft_slo_s": -1.0}, {"tpot_slo_s": -0.1}]
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    """In one sentence, when they are made."""
    with pytest.raises(ConfigError):
        SchedulerConfig(**wrong)  # type: ignore[arg-type]


def test_an_admission_needs_a_predictor(make_config: Make) -> None:
    """Without one it would not know what decoders have to come."""
    with pytest.raises(ConfigError, match="length_predictor"):
        scheduled(make_config(), slo_admission="slo")
