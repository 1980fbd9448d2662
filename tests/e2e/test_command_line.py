"""A tiered server by its command line: hits of every tier, and the operator's key.

Host, CXL and disk below one server have the hits that the theory of LRU caches says.
And only who has the key changes the server, or hears of its tenants. Both are seen on
one server, as a start by the command line is the most expensive one.
"""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.stack import LRUCurve
from tests.e2e.e2e_support import PATIENCE_S, POOL_TOKENS, Case, sequential, settle

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16)
PROMPT_PAGES = 8
NUM_PROMPTS, NUM_REQUESTS = 160, 480
TOLERANCE = 0.02
CALLS = ("POST /tiered/drop?tier=host", "GET /tiered/explain?last=1")
ADMIN = "operators-key"
KEY = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def server(servers, model, tmp_path_factory):
    """A server with all kinds of tiers, for which only operators need a key."""
    tiers = Tiers(4 * MB, tmp_path_factory.mktemp("disk"), 16 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-cxl=emulate:memory",
        f"--tiered-cxl-size={8 * MB}",
        "--admin-api-key",
        ADMIN,
        "--enable-metrics",
    )
    spec = tiered_spec(CASE.device(model), tiers, "chain", flags=flags)
    # By its command line: most servers of these tests are forked, and a fork has
    # imported prometheus_client before SGLang chose where several processes count, so
    # that none of the main process's counts would be shown.
    return servers.get(replace(spec, fork=False))


def asked(server, call, **headers):
    """Return the status of a call, and what it answers."""
    method, path = call.split(" ")
    request = urllib.request.Request(server.url + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


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

    assert asked(server, f"POST /flush_cache?timeout={PATIENCE_S}", **KEY)[0] == 200
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


def test_only_the_operator_drops_and_explains(server):
    """As SGLang's own ``/flush_cache``; requests and the stats need no key."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
    assert server.post("/generate", body)["meta_info"]["prompt_tokens"] == 3
    for call in (*CALLS, "POST /flush_cache"):
        assert asked(server, call)[0] == 401, call
        assert asked(server, call, Authorization="Bearer wrong")[0] == 401, call
        assert asked(server, call, **KEY)[0] == 200, call
    assert asked(server, "GET /tiered/stats")[0] == 200


def test_a_browsers_page_drops_nothing(server):
    """Though the browser may have the key; and SGLang's metrics count it."""
    page = {"Origin": "https://elsewhere.example"}
    for call in CALLS:
        status, told = asked(server, call, **KEY, **page)
        assert status == 403, call
        assert "without a browser" in json.dumps(told)
    metrics = asked(server, "GET /metrics")[1]
    assert 'sgl_tiered:http_refusals_total{reason="origin"} 2.0' in metrics
