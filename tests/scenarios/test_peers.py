"""Prompts of whole pages that another server of the pool has computed.

More on pulled pages is in ``tests/e2e/test_peer.py`` and ``tests/cluster``.
"""

import pytest
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, plain_spec

from tests.e2e.e2e_support import drop, edge, pinned, settle, stats, wait_until
from tests.e2e.test_peer import Pair, members
from tests.scenarios.scenario_support import (
    PAGE,
    PLAIN_POOL,
    body,
    cached,
    prompt,
    same,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

EXACT = (1, 2, 7, 20)
"""Prompts of so many whole pages."""
PROMPTS = [prompt(1300 + num_pages, num_pages * PAGE) for num_pages in EXACT]
ASKED = [*PROMPTS, *((*tokens, 77) for tokens in PROMPTS)]
FOUND = [(k - 1) * PAGE for k in EXACT] + [k * PAGE for k in EXACT]


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers to prompts that it has computed before."""
    device = Device(model, PLAIN_POOL, PAGE, CPU_FLAGS)
    server = servers.get(plain_spec(device, "plain-peers"))
    for tokens in PROMPTS:
        server.post("/generate", body(tokens))
    answers = [server.post("/generate", body(tokens)) for tokens in ASKED]
    servers.stop()
    return answers


@pytest.fixture(scope="module")
def pair(plain, model, tmp_path_factory):
    """Two servers of one pool; the one called ``a`` has computed the prompts."""
    pair = Pair(tmp_path_factory.mktemp("pool"), model)
    try:
        wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
        for tokens in PROMPTS:
            pair.a.post("/generate", body(tokens))
        settle(pair.a)
        yield pair
    finally:
        pair.stop()


@pytest.mark.parametrize("held", ["memory", "disk"])
def test_prompts_of_whole_pages(pair, plain, held):
    """A prompt of k pages gets k - 1 of them, with a token behind it all k."""
    if held == "disk":
        drop(pair.a, "device", "host")
    before = edge(settle(pair.b), "peer->host")
    answers = []
    for tokens in ASKED:
        drop(pair.b, "device", "host")
        if held == "disk":
            drop(pair.a, "host")
        answers.append(pair.b.post("/generate", body(tokens)))
    same(ASKED, plain, answers)
    assert [cached(one) for one in answers] == [
        {"peer": count} if count else {} for count in FOUND
    ]
    after = settle(pair.b)
    assert edge(after, "peer->host") - before == sum(FOUND) // PAGE
    assert pinned(after) == 0
    wait_until(lambda: pinned(stats(pair.a)) == 0, "the holder has nothing lent")
