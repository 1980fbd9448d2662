"""Several servers behind the global scheduler: by hand, and by what must hold."""

from __future__ import annotations

import numpy as np
import pytest
from cluster_model import (
    COLOCATED,
    DECODE,
    PREFILL,
    ClusterConfig,
    ClusterRequest,
    ClusterResult,
    simulate_cluster,
)

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.registry import ROUTINGS, make_routing
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.times import DeviceTimes
from tests.unit.benchmarks.cluster_loads import sessions

PAGE = 4
TIMES = DeviceTimes(
    prefill_overhead_s=0.5,
    prefill_token_s=0.1,
    prefill_pair_s=0.0,
    decode_overhead_s=0.25,
    decode_request_s=0.0,
    decode_context_token_s=0.01,
)
LINK = LinkSpeed(100.0, 2.0, "a test's")


def config(*kinds: str, caching: int = 0, pool_pages: int = 100) -> ClusterConfig:
    return ClusterConfig(kinds, TIMES, pool_pages, PAGE, 50, LINK, caching)


def request(
    num_prompt: int, num_answer: int, at_s: float = 0.0, after: int = -1, first: int = 0
) -> ClusterRequest:
    tokens = np.arange(first, first + num_prompt + num_answer, dtype=np.int32)
    return ClusterRequest(at_s, tokens[:num_prompt], tokens[num_prompt:], "s", after)


def run(made: ClusterConfig, *requests: ClusterRequest) -> ClusterResult:
    return simulate_cluster(made, requests, make_routing("prompt-tree"))


def test_one_request_on_a_colocated_instance_by_hand() -> None:
    """A pass over the prompt, then steps over a context that grows."""
    result = run(config(COLOCATED), request(10, 3))
    ttft = 0.5 + 10 * 0.1
    decode = (0.25 + 11 * 0.01) + (0.25 + 12 * 0.01)
    assert result.ttft_s[0] == pytest.approx(ttft)
    assert result.jct_s[0] == pytest.approx(ttft + decode)
    assert result.tpot_s[0] == pytest.approx(decode / 2)
    assert (result.sent_pages, result.stored_pages) == (0, 0)


def test_one_request_on_a_pair_by_hand() -> None:
    """The prompt's three pages go over the link before the first decode step."""
    result = run(config(PREFILL, DECODE), request(10, 2))
    sent = 2.0 + 3 * 50 / 100.0
    assert result.ttft_s[0] == pytest.approx(1.5)
    assert result.jct_s[0] == pytest.approx(1.5 + sent + 0.25 + 0.11)
    assert result.sent_pages == 3


def test_an_answer_of_one_token_ends_with_the_pass() -> None:
    """Nothing is sent, and there is no time between tokens."""
    result = run(config(PREFILL, DECODE), request(10, 1))
    assert result.jct_s[0] == result.ttft_s[0]
    assert np.isnan(result.tpot_s[0])
    assert result.sent_pages == 0


@pytest.mark.parametrize(
    ("caching", "cached", "sent"),
    [
        # 8 + 9 tokens of the first; the second prompt is these and 3 more: 20.
        (0, 0, 2 + 5),  # pages of both prompts
        (1, 8, 2 + 5),  # prefill keeps the first prompt's two pages
        (2, 8, 2 + 1),  # decode keeps four pages: it lacks one of five
        (3, 16, 2 + 2 + 1),  # two pages of the answer go back, then one more page
    ],
)
def test_what_each_mode_keeps_and_sends(caching: int, cached: int, sent: int) -> None:
    """A second turn after the first, counted in pages by hand."""
    first, second = request(8, 9), request(20, 2, at_s=50.0, after=0)
    result = run(config(PREFILL, DECODE, caching=caching), first, second)
    assert result.cached_tokens.tolist() == [0, cached]
    assert result.sent_pages == sent
    due = 0.5 + (20 - cached) * 0.1
    assert result.ttft_s[1] == pytest.approx(due)


def test_a_full_pool_waits_and_ends() -> None:
    """Room for one request at a time: they follow each other, none is lost."""
    many = [request(8, 4, first=1000 * number) for number in range(5)]
    for kinds in ((COLOCATED,), (PREFILL, DECODE)):
        for caching in (0, 1, 3):
            made = config(*kinds, caching=caching, pool_pages=3)
            assert np.all(np.diff(np.sort(run(made, *many).jct_s)) > 0)


@pytest.mark.parametrize("policy", ROUTINGS)
@pytest.mark.parametrize("caching", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "kinds", [(COLOCATED,) * 3, (PREFILL, DECODE, DECODE), (PREFILL, PREFILL, DECODE)]
)
def test_all_end_and_runs_repeat(
    kinds: tuple[str, ...], caching: int, policy: str
) -> None:
    """Random sessions in a small pool; equal runs give equal times."""
    requests = sessions(caching, 12)
    made = config(*kinds, caching=caching, pool_pages=30)
    results = [simulate_cluster(made, requests, make_routing(policy)) for _ in range(2)]
    assert np.array_equal(results[0].jct_s, results[1].jct_s)
    assert np.all(results[0].ttft_s > 0)
    assert np.all(results[0].jct_s >= results[0].ttft_s)
    assert (caching > 0) == bool(results[0].cached_tokens.any())


@pytest.mark.parametrize(
    ("kinds", "caching"),
    [((COLOCATED, PREFILL), 0), ((PREFILL,), 0), ((COLOCATED,), 4)],
)
def test_instances_that_cannot_serve_are_refused(
    kinds: tuple[str, ...], caching: int
) -> None:
    """Mixed kinds, half a pair, a mode that there is not."""
    with pytest.raises(ConfigError):
        config(*kinds, caching=caching)
