"""A real server with SGLang's overlap schedule, whose loads to the device break.

Two requests run at a time and others queue behind them, so that pages are brought to
the device ahead of their turn as well. The played device of ``tests/contract`` has what
a CPU has not: forwards and copies that are in flight (``overlap_program.py``).
The last tests start a processor whose loads fail as a device's do: behind a batch that
was launched, and whose next one was (``late_server.py``).
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import Case, drop, pinned, settle, stats
from tests.e2e.late_server import LATE_ENV, LATE_SERVER
from tests.e2e.test_prefetch import queue_behind
from tests.faults.fault_support import Prompts, assert_same, dropped_to, faults, struck

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=True, spins=True)
MAX_ROUNDS = 5


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture
def server(servers, model, plain):
    flags = (
        "--tiered-load-policy=always",
        "--tiered-prefetch=car",
        "--tiered-prefetch-to=device",
        "--max-running-requests=2",
    )
    env = {
        "SGL_TIERED_ALLOW_FAULTS": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    tiers = Tiers(16 * MB)
    spec = tiered_spec(CASE.device(model), tiers, "overlap", flags=flags, env=env)
    return servers.get(spec)


def repaired(state):
    """Return how many tokens were computed in the place of loads that failed late."""
    return state["counters"].get("tokens_repaired", 0)


def test_a_crowd_is_answered_right_while_loads_break(server, plain):
    """What did not come is computed; no slot and no source is left behind."""
    prompts = Prompts()
    before = repaired(stats(server))
    # A load that fails before its batch has begun is computed as if it had not been: it
    # takes rounds until one fails behind a batch, and each has to be right.
    for seed in range(3, 3 + MAX_ROUNDS):
        requests = prompts.take(6)
        cold = dropped_to(server, "host", requests)
        with faults(server, f"host:fault=error@0.4/load,seed={seed}"):
            assert_same(plain, cold, queue_behind(server, requests))
            assert struck(server, "host") > 0
        state = settle(server)
        if repaired(state) > before:
            break
    assert repaired(state) > before
    assert pinned(state) == 0
    # Once it is over, with whatever is where it is now.
    assert_same(plain, cold, queue_behind(server, requests, seed=2))
    assert pinned(settle(server)) == 0


@pytest.fixture
def late(servers, model, plain):
    """A server of whose loads half fail when the next batch has been launched."""
    flags = (
        "--tiered-load-policy=always",
        "--max-running-requests=4",
        "--chunked-prefill-size=256",
    )
    env = {
        LATE_ENV: "0.5",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        # SGLang compiles a penalty, which takes minutes on a busy machine.
        "TORCHDYNAMO_DISABLE": "1",
    }
    spec = tiered_spec(CASE.device(model), Tiers(16 * MB), "late", flags=flags, env=env)
    return servers.get(replace(spec, program=LATE_SERVER))


def requeued(state):
    """Return how many requests were queued again."""
    return state["counters"].get("loads_requeued", 0)


def test_a_crowd_is_answered_right_while_loads_fail_late(late, plain):
    """Streamed tokens are those of the prompt alone; nobody is turned away."""
    prompts = Prompts()
    before = requeued(stats(late))
    for seed in range(3):
        requests = prompts.take(6)
        cold = dropped_to(late, "host", requests)
        assert_same(plain, cold, queue_behind(late, requests, seed=seed))
        assert pinned(settle(late)) == 0
    assert requeued(stats(late)) > before


LOGPROB_TOLERANCE = 0.05
"""As between runs of plain SGLang whose batches differ (``e2e_support.FLOOR``)."""
LETTERS = "[a-f]{4,9}"
KINDS = {
    "prompt": {"logprob_start_len": 470},
    "whole": {"logprob_start_len": 0},
    "repeats": {"sampling_params": {"frequency_penalty": 1.5}},
    "letters": {"sampling_params": {"regex": LETTERS}},
    "twice": {"sampling_params": {"n": 2}},
    "long": {"sampling_params": {"max_new_tokens": 24}},
}
"""What requests ask for, besides an answer. One that wants the logprobs of its whole
prompt loads nothing, and stands beside those that do."""


def test_what_requests_ask_for_survives_a_late_failure(late):
    """Logprobs of prompts, penalties, grammars, several answers: as without tiers."""
    prompts, bodies = Prompts(), {}
    for name, more in KINDS.items():
        (request,) = prompts.take(1)
        sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        sampling |= more.get("sampling_params", {})
        bodies[name] = {
            "input_ids": list(request.prompt),
            "return_logprob": True,
            **more,
            "sampling_params": sampling,
        }

    def ask(body):
        told = late.post("/generate", body)
        return told if isinstance(told, list) else [told]

    computed = {name: ask(body) for name, body in bodies.items()}
    before = requeued(stats(late))
    for _ in range(MAX_ROUNDS):
        drop(late, "device")
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = dict(zip(bodies, pool.map(ask, bodies.values()), strict=True))
        for name, told in answers.items():
            for one, expected in zip(told, computed[name], strict=True):
                assert_close(one["meta_info"], expected["meta_info"])
        assert re.fullmatch(LETTERS, answers["letters"][0]["text"])
        if requeued(stats(late)) > before + len(bodies):
            break
    assert requeued(stats(late)) > before
    assert pinned(settle(late)) == 0


def assert_close(told, expected):
    """Demand the logprobs of an answer that was computed, up to a tie of two tokens."""
    for name in ("input_token_logprobs", "output_token_logprobs"):
        pairs = list(zip(told[name], expected[name], strict=True))
        for (logprob, token, _), (wanted, wanted_token, _) in pairs:
            if wanted is None:
                assert logprob is None
                continue
            assert abs(logprob - wanted) <= LOGPROB_TOLERANCE, name
            if token != wanted_token:
                # A tie: what follows is of another text.
                assert name == "output_token_logprobs"
                break
