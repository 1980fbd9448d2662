"""Reading ahead over the queue on a real server: right answers, one read per page.

Two requests run at a time and the disk is slow, so that a crowd has to queue and the
prefetcher has something to do. Host memory holds a few prompts only.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    PATIENCE_S,
    Case,
    edge,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
    wait_until,
)
from tests.faults.fault_support import (
    Prompts,
    assert_same,
    dropped_to,
    faults,
    struck,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)
PROMPT_PAGES = 30
BLOCKER_TOKENS = 150


@pytest.fixture(scope="module")
def prompts():
    return Prompts()


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture(scope="module")
def spec(model, tmp_path_factory):
    tiers = Tiers(4 * MB, tmp_path_factory.mktemp("disk"), 64 * MB)
    flags = (
        "--tiered-load-policy=always",
        "--tiered-prefetch=car",
        "--max-running-requests=2",
        "--tiered-emulate=disk:latency=0.1",
    )
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    return tiered_spec(CASE.device(model), tiers, "ahead", flags=flags, env=env)


@pytest.fixture
def server(servers, spec, plain):
    server = servers.get(spec)
    server.flush_cache()
    return server


def blockers(seed):
    """Return two requests that decode for a while, so that others have to queue."""
    generator = np.random.default_rng(seed)
    return [
        PlannedRequest(
            f"blocker{n}", random_tokens(generator, 40, VOCAB_TOKENS), BLOCKER_TOKENS
        )
        for n in range(2)
    ]


def queue_behind(server, requests, seed=1):
    """Send requests while two others occupy the server; return their answers."""
    later = [
        PlannedRequest(r.key, r.prompt, r.max_new_tokens, start_s=0.1) for r in requests
    ]
    records = open_loop(server, [*blockers(seed), *later])
    assert all(record.error is None for record in records)
    return records[2:]


def promoted(state):
    """Return how many pages were brought to the host ahead of need."""
    return int(state["counters"].get("promoted_pages", 0))


def test_a_queue_is_read_ahead(server, plain, prompts):
    """Pages of those who wait come up meanwhile and are hits in the host, once each."""
    requests = prompts.take(6)
    cold = dropped_to(server, "disk", requests)
    before = settle(server)
    answers = queue_behind(server, requests)
    assert_same(plain, cold, answers)
    after = settle(server)
    assert promoted(after) > promoted(before)
    assert sum(record.cached_by_tier.get("host", 0) for record in answers) > 0
    read = edge(after, "disk->host") - edge(before, "disk->host")
    assert read <= PROMPT_PAGES * len(requests)
    assert pinned(after) == 0


def test_a_shared_prefix_is_read_once(server, plain, prompts):
    """Many that wait for the same pages cost one read of them."""
    (base,) = prompts.take(1)
    (cold,) = dropped_to(server, "disk", [base])
    before = settle(server)
    requests = [
        PlannedRequest(f"{base.key}.{n}", base.prompt, base.max_new_tokens)
        for n in range(5)
    ]
    answers = queue_behind(server, requests)
    assert_same(plain, [replace(cold, key=r.key) for r in requests], answers)
    after = settle(server)
    read = edge(after, "disk->host") - edge(before, "disk->host")
    assert read == PROMPT_PAGES
    assert promoted(after) - promoted(before) == PROMPT_PAGES


def test_aborts_and_a_flush_leave_nothing_behind(server, plain, prompts):
    """With reads ahead under way everybody leaves; then everything is forgotten."""
    requests = prompts.take(6)
    cold = dropped_to(server, "disk", requests)
    crowd = threading.Thread(
        target=lambda: open_loop(server, [*blockers(2), *requests]), daemon=True
    )
    # Slow enough for the aborts to fall into reads.
    with faults(server, "disk:delay=1..1.5"):
        crowd.start()
        wait_until(lambda: pinned(stats(server)) > 0, "a read has begun")
        server.post("/abort_request", {"abort_all": True})
        crowd.join(PATIENCE_S)
        assert not crowd.is_alive(), "an aborted request got no answer"
    assert pinned(settle(server)) == 0
    assert_same(plain, cold, sequential(server, requests))
    server.flush_cache()
    state = settle(server)
    assert all(tier["used"] == 0 for tier in state["occupancy"].values())
    assert_same(plain, cold, queue_behind(server, requests))


@pytest.mark.parametrize(
    "text", ["disk:fault=error@0.4/load", "disk:fault=corrupt@0.5/load"]
)
def test_bad_reads_ahead_are_nobodys_answer(server, plain, prompts, text):
    """Pages that cannot be read, or are wrong, are computed; nothing stays pinned."""
    requests = prompts.take(6)
    cold = dropped_to(server, "disk", requests)
    before = struck(server, "disk")
    with faults(server, text):
        assert_same(plain, cold, queue_behind(server, requests, seed=3))
        assert struck(server, "disk") > before
    assert pinned(settle(server)) == 0
    assert_same(plain, cold, queue_behind(server, requests, seed=4))
