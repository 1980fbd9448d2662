"""Host, CXL and disk below one server, against the theory of LRU caches."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.stack import LRUCurve
from tests.e2e.e2e_support import POOL_TOKENS, Case, sequential, settle

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16)
PROMPT_PAGES = 8
NUM_PROMPTS, NUM_REQUESTS = 160, 480
TOLERANCE = 0.02


@pytest.fixture
def server(servers, model, tmp_path):
    tiers = Tiers(4 * MB, tmp_path / "disk", 16 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-cxl=emulate:memory",
        f"--tiered-cxl-size={8 * MB}",
    )
    spec = tiered_spec(CASE.device(model), tiers, "chain", flags=flags)
    # A tiered server by its command line: most servers of these tests are forked.
    server = servers.get(replace(spec, fork=False))
    server.flush_cache()
    return server


def test_each_tier_hits_as_the_theory_says(server):
    """Token hits of device, host, CXL and disk are within 2 points of LRU's.

    Every tier holds what those above it do, so tier by tier the hits are what LRU of
    its size adds. Prompts come again at random: all distances occur alike.
    """
    rng = np.random.default_rng(3)
    num_tokens = PROMPT_PAGES * CASE.page_size + 5
    prompts = [random_tokens(rng, num_tokens, VOCAB_TOKENS) for _ in range(NUM_PROMPTS)]
    chosen = rng.integers(NUM_PROMPTS, size=NUM_REQUESTS).tolist()
    requests = [PlannedRequest(f"c{i}", prompts[c], 1) for i, c in enumerate(chosen)]

    answers = sequential(server, requests)
    occupancy = settle(server)["occupancy"]

    assert all(record.error is None for record in answers)
    pages = np.arange(NUM_PROMPTS * PROMPT_PAGES).reshape(NUM_PROMPTS, PROMPT_PAGES)
    trace = PageTrace(
        [pages[c] for c in chosen],
        [PROMPT_PAGES * CASE.page_size] * NUM_REQUESTS,
        CASE.page_size,
    )
    curve = LRUCurve(trace)
    # The next request needs pages of its own, which the device has to give up before.
    sizes = [POOL_TOKENS // CASE.page_size - 1]
    sizes += [occupancy[tier]["capacity"] for tier in ("host", "cxl", "disk")]
    assert sizes == sorted(sizes)
    hits = [0, *(curve.hit_tokens(size) for size in sizes)]
    wanted = [(b - a) / trace.total_tokens for a, b in pairwise(hits)]
    seen = [
        sum(record.cached_by_tier.get(tier, 0) for record in answers)
        / trace.total_tokens
        for tier in ("device", "host", "cxl", "disk")
    ]
    assert all(share > TOLERANCE for share in wanted), "a tier that is never hit"
    assert np.abs(np.subtract(seen, wanted)).max() <= TOLERANCE, (seen, wanted)
