"""Two ranks over gloo: the same answers as plain SGLang's with two, and they agree."""

import os
from dataclasses import replace

import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import ChatShape, replay
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import (
    REFERENCE_POOL_TOKENS,
    Case,
    burst_requests,
    drop,
    edge,
    open_loop,
    pinned,
    record_reference,
    sequential,
    settle,
    stats,
)

CORES = sorted(os.sched_getaffinity(0))
CASE = Case(16, overlap=False)
FLAGS = ("--tp-size=2",)
POOL_TOKENS = 1024
SHAPE = ChatShape(
    num_sessions=4,
    num_turns=2,
    system_tokens=128,
    first_tokens=400,
    user_tokens=40,
    answer_tokens=6,
)
"""Few and short: two ranks on two cores take a second for a prompt."""

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.e2e,
    pytest.mark.skipif(len(CORES) < 2, reason="each rank needs a core"),
]


def on_two_ranks(spec):
    """Return a server of two ranks, each on a core of its own."""
    env = {**spec.env, "SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[1]}"}
    return replace(spec, name=f"{spec.name}-tp2", flags=(*spec.flags, *FLAGS), env=env)


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers with two ranks: sums are added in another order there."""
    device = CASE.device(model, REFERENCE_POOL_TOKENS)
    server = servers.get(on_two_ranks(plain_spec(device)))
    found = record_reference(server, SHAPE)
    servers.stop()
    return found


@pytest.fixture(scope="module")
def server(servers, model, plain, tmp_path_factory):
    """A server with every policy that reads clocks or costs, on two ranks."""
    tiers = Tiers(1 * MB, tmp_path_factory.mktemp("disk"), 32 * MB)
    flags = (
        "--tiered-order=cost",
        "--tiered-prefetch=car",
        "--tiered-admission=slo",
        "--tiered-slo-tpot=0.2",
        "--tiered-device-eviction=cost",
        "--tiered-eviction-policy=cost",
        "--tiered-staging-size=16MB",
        "--max-running-requests=2",
    )
    yield servers.restart(
        on_two_ranks(
            tiered_spec(CASE.device(model, POOL_TOKENS), tiers, "tiered", flags)
        )
    )
    servers.stop()


def test_chats_equal_plain(server, plain):
    """What is offloaded by halves comes back whole."""
    server.flush_cache()
    answers = sequential(server, replay(plain.chat))
    result = check_equality(
        plain.chat,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.1,
    )
    assert result.passed, result.summary()
    state = settle(server)
    assert edge(state, "device->host") > 0
    assert edge(state, "host->disk") > 0
    assert result.exact_tokens_by_tier.get("disk", 0) + edge(state, "host->device") > 0
    assert pinned(state) == 0


def test_many_at_once_equal_plain(server, plain):
    """A queue that is ordered, held and read ahead for, on both ranks alike."""
    for tiers in (("device",), ("device", "host")):
        drop(server, *tiers)
        answers = open_loop(server, burst_requests())
        assert [record.error for record in answers] == [None] * len(plain.burst)
        result = check_equality(
            plain.burst,
            answers,
            page_size=CASE.page_size,
            spread=plain.spread,
            forced=False,
            slack=2.0,
        )
        assert result.passed, result.summary()
    assert pinned(settle(server)) == 0
    assert stats(server)["lengths"]["num_under_way"] == 0
