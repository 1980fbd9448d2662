"""Layer-wise KV on a real server: a pool of about four prompts, and more than it holds.

The same answers as plain SGLang's, bit by bit where one request runs at a time, and by
the gate's rule where many do; aborts, a shared prefix, chunks, tiers below. First of
all a broken staging, which has to turn the gate red.
"""

import contextlib
import threading
import time

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality, negative_control
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens, replay
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    REFERENCE_POOL_TOKENS,
    Case,
    drop,
    edge,
    hang_the_first_store,
    open_loop,
    pinned,
    record_reference,
    sequential,
    settle,
    stats,
    wait_until,
)
from tests.faults.fault_support import faults

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, chunk_tokens=256, overlap=False)
POOL_TOKENS = 2_560
"""About four prompts of 500 tokens, beside the staging memory."""
LAYERKV = (
    "--tiered-layerkv",
    "on",
    "--tiered-layerkv-host-size",
    "24MB",
    # A half holds one layer of 640 tokens: 40 pages of 16 x 64 x 2 x 2 bytes.
    "--tiered-layerkv-staging-size",
    "327680",
)
STREAM = (
    "--tiered-layerkv-retain=0",
    "--tiered-layerkv-decode=stream",
    "--tiered-load-policy=always",
)
PAUSE = (
    "--tiered-layerkv-decode=pause",
    "--tiered-load-policy=never",
    # A prompt of 500 tokens takes 25 ms of the link, many times a step.
    "--tiered-emulate=host:bandwidth=20MB",
)
KEPT = ("--tiered-layerkv-retain=4", "--tiered-load-policy=never")
NUM_MIXED = 16
ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def plain(servers, model):
    """Plain SGLang's answers: the chats one by one, and the mixed prompts."""
    device = CASE.device(model, REFERENCE_POOL_TOKENS)
    server = servers.get(plain_spec(device, f"plain-{CASE.name}"))
    reference = record_reference(server)
    server.flush_cache()
    answers = sequential(server, mixed())
    servers.stop()
    return reference, answers


def mixed():
    """Prompts of many lengths; every fourth shares its first 200 tokens."""
    generator = np.random.default_rng(31)
    shared = random_tokens(generator, 200, VOCAB_TOKENS)
    requests = []
    for number in range(NUM_MIXED):
        length = int(generator.integers(40, 560))
        tokens = random_tokens(generator, length, VOCAB_TOKENS)
        if number % 4 == 0:
            tokens = (shared + tokens)[:560]
        requests.append(PlannedRequest(f"m{number}", tokens, ANSWER_TOKENS))
    return requests


def layered(model, name, *flags, env=None):
    """Return a server with layer-wise KV."""
    device = CASE.device(model, POOL_TOKENS)
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **(env or {})}
    return tiered_spec(device, Tiers(32 * MB), name, (*LAYERKV, *flags), env)


def compared(plain, server):
    """Replay the chats one by one; return what the gate says."""
    reference, _ = plain
    answers = sequential(server, replay(reference.chat))
    return check_equality(
        reference.chat, answers, page_size=CASE.page_size, spread=reference.spread
    )


def many_at_once(plain, server):
    """Send all the mixed prompts at once, thrice, with aborts among them."""
    reference, alone = plain
    for _ in range(3):
        server.flush_cache()
        aborted = abort_some(server)
        answers = open_loop(server, mixed())
        aborted.join()
        assert [record.error for record in answers] == [None] * NUM_MIXED
        result = check_equality(
            alone,
            answers,
            page_size=CASE.page_size,
            spread=reference.spread,
            forced=False,
            slack=2.0,
        )
        assert result.passed, result.summary()
    layers = stats(server)["layerkv"]
    assert layers["layerkv_bytes_offloaded"] > 0
    assert layers["layerkv_bytes_streamed"] > 0
    return layers


@pytest.mark.full
def test_broken_staging_is_caught(servers, model, plain):
    """The gate is red where one page in four is left out of what is streamed."""
    server = servers.get(
        layered(
            model,
            "layerkv-broken",
            *STREAM,
            "--tiered-fault-corrupt=staging",
            env={"SGL_TIERED_ALLOW_FAULTS": "1"},
        )
    )
    negative_control({"staging": compared(plain, server)})


def test_nothing_retained_one_at_a_time_gives_equal_bits(servers, model, plain):
    """Chats whose prefixes were pushed to memory by each other, streamed."""
    server = servers.get(layered(model, "layerkv-stream", *STREAM))
    result = compared(plain, server)
    assert result.passed, result.summary()
    layers = settle(server)["layerkv"]
    assert layers["layerkv_bytes_offloaded"] > 0
    assert layers["layerkv_bytes_streamed"] > 0


def test_nothing_retained_many_at_once(servers, model, plain):
    """Everybody decodes, streamed at every step."""
    server = servers.get(layered(model, "layerkv-stream", *STREAM))
    assert many_at_once(plain, server)["layerkv_steps_paused"] == 0


def test_what_was_placed_singly_comes_back_from_below(servers, model, plain):
    """Offloaded from device and memory alike, loaded again, the same answers."""
    reference, _ = plain
    server = servers.get(layered(model, "layerkv-stream", *STREAM))
    server.flush_cache()
    chosen = reference.chat[-6:]
    sequential(server, replay(chosen))
    drop(server, "device")
    again = sequential(server, replay(chosen))
    assert any(record.cached_by_tier.get("host", 0) for record in again)
    result = check_equality(
        chosen,
        again,
        page_size=CASE.page_size,
        spread=reference.spread,
        min_exact_fraction=0.0,
    )
    assert result.passed, result.summary()


def test_pausing_one_at_a_time_gives_equal_bits(servers, model, plain):
    """As many layers retained as must be and fit."""
    server = servers.get(layered(model, "layerkv-pause", *PAUSE))
    result = compared(plain, server)
    assert result.passed, result.summary()


def test_pausing_many_at_once(servers, model, plain):
    """Over a slow link some wait; all end, and say what became of their layers."""
    server = servers.get(layered(model, "layerkv-pause", *PAUSE))
    assert many_at_once(plain, server)["layerkv_steps_paused"] > 0
    wait_until(lambda: stats(server)["layerkv"]["paused"] == 0, "nobody is paused")
    (told,) = server.generate(mixed()[0].prompt, 4)["meta_info"]["tiered"]
    assert told["layerkv"]["num_layers"] == 4


def test_a_store_that_does_not_end_holds_nobody_for_ever(servers, model, plain):
    """It is given up: what it read leaves the device, and nobody ends with an error."""
    reference, alone = plain
    env = {"SGL_TIERED_ALLOW_FAULTS": "1"}
    server = servers.get(layered(model, "layerkv-kept", *KEPT, env=env))
    with faults(server, "host:fault=hang/store/times=1"):
        hang_the_first_store(server)
        answers = open_loop(server, mixed())
    assert [record.error for record in answers] == [None] * NUM_MIXED
    result = check_equality(
        alone,
        answers,
        page_size=CASE.page_size,
        spread=reference.spread,
        forced=False,
        slack=2.0,
    )
    assert result.passed, result.summary()
    state = settle(server)
    assert state["counters"]["offloads_given_up"] > 0
    assert state["layerkv"]["layerkv_requests_lost"] == 0
    assert pinned(state) == 0
    # What was given up is stored by whoever sends it next.
    before = edge(state, "device->host")
    wait_until(lambda: stored_again(server, before), "the tier is stored to again")


def stored_again(server, before):
    """Compute prompts anew; return whether they were stored."""
    drop(server, "device")
    sequential(server, mixed()[:2])
    return edge(settle(server), "device->host") > before


def abort_some(server):
    """Send requests in a thread and abort them while they run."""
    generator = np.random.default_rng(77)
    prompts = [random_tokens(generator, 400, VOCAB_TOKENS) for _ in range(4)]

    def ask(number):
        # SGLang answers some aborts with an HTTP error.
        with contextlib.suppress(RuntimeError):
            server.generate(prompts[number], 400, rid=f"gone{number}")

    def run():
        threads = [
            threading.Thread(target=ask, args=(n,), daemon=True)
            for n in range(len(prompts))
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        for number in range(len(prompts)):
            server.post("/abort_request", {"rid": f"gone{number}"})
        for thread in threads:
            thread.join()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
