"""Predicted answer lengths in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.summary import summarize

Make = Callable[..., ServerConfig]
PAGE = 4


@pytest.fixture
def workload() -> SimWorkload:
    """A hundred requests whose answers have 20 to 39 tokens."""
    builder = WorkloadBuilder(PAGE)
    rng = np.random.default_rng(1)
    for number, length in enumerate(rng.integers(20, 40, 100).tolist()):
        builder.add(number * 0.02, 30, length)
    return builder.build("hundred")


def test_nothing_is_predicted_by_default(
    make_config: Make, workload: SimWorkload
) -> None:
    """No report, and the same events as with a predictor that only watches."""
    config = make_config()
    result = simulate(config, workload)
    assert result.lengths is None
    watched = simulate(replace(config, length_predictor="online"), workload)
    assert watched.log.digest() == result.log.digest()


def test_online_learns_as_the_server_runs(
    make_config: Make, workload: SimWorkload
) -> None:
    """Every answer counts, and the bound is useful although nothing was known."""
    config = replace(make_config(), length_predictor="online")
    report = summarize(simulate(config, workload)).lengths
    assert report is not None
    assert report.score.num_answers == 100
    assert report.score.coverage > 0.8
    assert report.score.mean_lower_tokens > 5.0
    assert report.asking is None


def test_the_oracle_is_right(make_config: Make, workload: SimWorkload) -> None:
    """It is told the truth, so the median is never off."""
    config = replace(make_config(), length_predictor="oracle")
    report = simulate(config, workload).lengths
    assert report is not None
    assert (report.score.coverage, report.score.mean_error_tokens) == (1.0, 0.0)


def test_answers_of_the_length_asked_for_are_known(
    make_config: Make, workload: SimWorkload
) -> None:
    """With ``ignore_eos`` each answer uses its allowance: soon there is no error."""
    scheduler = SchedulerConfig(ignore_eos=True, chunk_tokens=64)
    config = replace(make_config(), length_predictor="online", scheduler=scheduler)
    report = simulate(config, workload).lengths
    assert report is not None
    assert report.score.mean_error_tokens < 1.0
    assert report.score.coverage == 1.0


def test_asking_the_model_costs_time(make_config: Make, workload: SimWorkload) -> None:
    """Each request is asked about once, and waits for the reply before it is queued."""
    config = make_config()
    plain = summarize(simulate(config, workload))
    result = simulate(replace(config, length_predictor="llm"), workload)
    report = result.lengths
    assert report is not None
    assert report.asking is not None
    assert report.asking.num_asked == report.score.num_answers == 100
    assert report.asking.num_failed == report.asking.num_unclear == 0
    assert report.asking.prompt_tokens > 100 * 30
    later_s = report.asking.seconds / 100
    assert later_s > 0
    assert summarize(result).ttft.mean > plain.ttft.mean + 0.5 * later_s


def test_an_unknown_predictor_is_refused(
    make_config: Make, workload: SimWorkload
) -> None:
    """In one sentence."""
    with pytest.raises(ConfigError, match="length_predictor"):
        simulate(replace(make_config(), length_predictor="crystal"), workload)
