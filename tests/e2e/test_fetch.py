"""Pages put on the device ahead of admission, on a real server: right answers.

Two requests run at a time, in a pool that holds two more prompts, so that a crowd has
to queue while there is room. SGLang checks its pool whenever the server is idle.
"""

import threading

import pytest
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import (
    PATIENCE_S,
    Case,
    open_loop,
    pinned,
    sequential,
    settle,
)
from tests.e2e.test_prefetch import blockers, queue_behind
from tests.faults.fault_support import Prompts, assert_same, dropped_to, faults, struck

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)


@pytest.fixture(scope="module")
def prompts():
    return Prompts()


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture(scope="module")
def spec(model):
    flags = (
        "--tiered-load-policy=always",
        "--tiered-prefetch=car",
        "--tiered-prefetch-to=device",
        "--max-running-requests=2",
    )
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    tiers = Tiers(16 * MB)
    return tiered_spec(CASE.device(model), tiers, "fetch", flags=flags, env=env)


@pytest.fixture
def server(servers, spec):
    server = servers.get(spec)
    server.flush_cache()
    return server


def fetched(state, name="fetched_pages"):
    """Return a counter of fetches."""
    return int(state["counters"].get(name, 0))


def test_those_who_wait_find_their_pages_on_the_device(server, plain, prompts):
    """Answers are the same, and nothing stays pinned or lent."""
    requests = prompts.take(4)
    cold = dropped_to(server, "host", requests)
    before = settle(server)
    answers = queue_behind(server, requests)
    assert_same(plain, cold, answers)
    after = settle(server)
    assert fetched(after) > fetched(before)
    assert sum(record.cached_by_tier.get("device", 0) for record in answers) > 0
    assert pinned(after) == 0
    # Once more, with whatever is where it is now.
    assert_same(plain, cold, queue_behind(server, requests, seed=2))
    assert_same(plain, cold, sequential(server, requests))


def test_aborts_and_a_flush_take_everything_back(server, plain, prompts):
    """Copies are slow, everybody leaves, and then all is forgotten."""
    requests = prompts.take(4)
    cold = dropped_to(server, "host", requests)
    later = [
        PlannedRequest(r.key, r.prompt, r.max_new_tokens, start_s=0.1) for r in requests
    ]
    before = settle(server)
    # A layer takes so long that copies are under way when everybody leaves.
    with faults(server, "host:delay=0.3..0.4"):
        crowd = threading.Thread(
            target=lambda: open_loop(server, [*blockers(2), *later]), daemon=True
        )
        crowd.start()
        crowd.join(0.6)
        server.post("/abort_request", {"abort_all": True})
        crowd.join(PATIENCE_S)
        assert not crowd.is_alive(), "an aborted request got no answer"
    state = settle(server)
    assert pinned(state) == 0
    assert fetched(state, "fetches_cancelled") > fetched(before, "fetches_cancelled")
    server.flush_cache()
    state = settle(server)
    assert all(tier["used"] == 0 for tier in state["occupancy"].values())
    assert_same(plain, cold, queue_behind(server, requests))


def test_a_copy_that_fails_is_nobodys_answer(server, plain, prompts):
    """The request loads its pages itself, or computes them."""
    requests = prompts.take(4)
    cold = dropped_to(server, "host", requests)
    before = struck(server, "host")
    with faults(server, "host:fault=error@0.3/load"):
        assert_same(plain, cold, queue_behind(server, requests, seed=3))
        assert struck(server, "host") > before
    assert pinned(settle(server)) == 0
    assert_same(plain, cold, queue_behind(server, requests, seed=4))
