"""Two ranks over gloo: the same answers as plain SGLang's with two, and they agree."""

import os
from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import (
    ChatShape,
    PlannedRequest,
    random_tokens,
    replay,
)
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    REFERENCE_POOL_TOKENS,
    Case,
    burst_requests,
    drop,
    edge,
    hang_the_first_store,
    open_loop,
    pinned,
    record_reference,
    sequential,
    settle,
    stats,
)
from tests.faults.fault_support import faults

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

NUM_MIXED = 8
LAYERKV = (
    "--tiered-layerkv=on",
    "--tiered-layerkv-host-size=12MB",
    # A half holds one layer of 640 tokens on a rank, which has half of the heads.
    "--tiered-layerkv-staging-size=163840",
)
LAYER_POOL_TOKENS = 1536
"""About two prompts, beside the staging memory."""
STREAM = (
    "--tiered-layerkv-retain=0",
    "--tiered-layerkv-decode=stream",
    "--tiered-load-policy=always",
)
PAUSE = ("--tiered-load-policy=never", "--tiered-emulate=host:bandwidth=10MB")

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
    server.flush_cache()
    alone = sequential(server, mixed())
    servers.stop()
    return found, alone


def mixed():
    """Prompts of many lengths; every fourth shares its first 200 tokens."""
    generator = np.random.default_rng(32)
    shared = random_tokens(generator, 200, VOCAB_TOKENS)
    requests = []
    for number in range(NUM_MIXED):
        length = int(generator.integers(200, 560))
        tokens = random_tokens(generator, length, VOCAB_TOKENS)
        if number % 4 == 0:
            tokens = (shared + tokens)[:560]
        requests.append(PlannedRequest(f"m{number}", tokens, 24))
    return requests


def layered(model, name, *flags):
    """Return a server of two ranks with layer-wise KV, which may be slowed or fail."""
    device = CASE.device(model, LAYER_POOL_TOKENS)
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    flags = (*LAYERKV, *flags)
    return on_two_ranks(tiered_spec(device, Tiers(16 * MB), name, flags, env))


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
    plain, _ = plain
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
    plain, _ = plain
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


def test_layers_placed_singly_equal_plain(servers, model, plain):
    """Streamed on both ranks alike; copies asked whether a collective was on its way.

    A rank that had parted would have stopped the server.
    """
    plain, _ = plain
    server = servers.get(layered(model, "layerkv-stream", *STREAM))
    answers = sequential(server, replay(plain.chat))
    result = check_equality(
        plain.chat,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.1,
    )
    assert result.passed, result.summary()
    layers = settle(server)["layerkv"]
    assert layers["layerkv_bytes_streamed"] > 0
    assert layers["layerkv_guard_asked"] > 0
    assert layers["layerkv_guard_collectives"] > 0


def many_equal_plain(server, alone, spread):
    """Let many come at once to an empty cache; each is answered as when it is alone."""
    server.flush_cache()
    equal_plain_at_once(server, alone, spread)


def equal_plain_at_once(server, alone, spread):
    answers = open_loop(server, mixed())
    assert [record.error for record in answers] == [None] * NUM_MIXED
    result = check_equality(
        alone,
        answers,
        page_size=CASE.page_size,
        spread=spread,
        forced=False,
        slack=2.0,
    )
    assert result.passed, result.summary()


def test_layers_of_many_at_once_equal_plain(servers, model, plain):
    """Who waits for a turn, who is admitted and what leaves is the same on both."""
    plain, alone = plain
    server = servers.get(layered(model, "layerkv-pause", *PAUSE))
    for _ in range(3):
        many_equal_plain(server, alone, plain.spread)
    layers = stats(server)["layerkv"]
    assert layers["layerkv_bytes_offloaded"] > 0
    assert layers["layerkv_steps_paused"] > 0
    assert layers["layerkv_guard_asked"] > 0


def test_layers_wait_for_stores_that_read_them(servers, model, plain):
    """What a store reads cannot leave: nobody decodes without room, and none fails."""
    plain, alone = plain
    server = servers.get(layered(model, "layerkv-pause", *PAUSE))
    before = after = stats(server)["layerkv"]
    for delay_s in (1, 2, 3):
        # How slow stores have to be for it depends on how fast it computes here.
        if after["layerkv_turns_held"] > before["layerkv_turns_held"]:
            break
        with faults(server, f"host:delay={delay_s}"):
            many_equal_plain(server, alone, plain.spread)
        after = stats(server)["layerkv"]
    assert after["layerkv_turns_held"] > before["layerkv_turns_held"]
    assert after["layerkv_requests_lost"] == before["layerkv_requests_lost"]


def test_a_store_that_does_not_end_is_given_up_on_both_ranks(servers, model, plain):
    """Who has no room waits until then, and both ranks let the same pages leave."""
    plain, alone = plain
    flags = ("--tiered-layerkv-retain=4", "--tiered-load-policy=never")
    server = servers.get(layered(model, "layerkv-kept", *flags))
    with faults(server, "host:fault=hang/store/times=1"):
        hang_the_first_store(server)
        equal_plain_at_once(server, alone, plain.spread)
    state = settle(server)
    assert state["counters"]["offloads_given_up"] > 0
    assert state["layerkv"]["layerkv_requests_lost"] == 0
    assert pinned(state) == 0


def test_without_copies_to_the_host_it_serves_what_fits(servers, model, plain):
    """Who finds no room ends with a sentence, on both ranks alike; both serve on."""
    plain, alone = plain
    server = servers.get(layered(model, "layerkv-pause", *PAUSE))
    server.flush_cache()
    before = stats(server)["layerkv"]["layerkv_requests_lost"]
    with faults(server, "host:fault=error/store"):
        answers = open_loop(server, mixed())
    told = [record.error for record in answers if record.error]
    lost = stats(server)["layerkv"]["layerkv_requests_lost"] - before
    assert 0 < lost == len(told) < NUM_MIXED
    assert all("send the request again" in sentence for sentence in told), told
    server.flush_cache()
    answers = sequential(server, mixed())
    result = check_equality(
        alone, answers, page_size=CASE.page_size, spread=plain.spread
    )
    assert result.passed, result.summary()
