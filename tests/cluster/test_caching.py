"""What each caching mode keeps, sends and returns, by the servers' own counters.

One pair per mode, with SGLang's radix cache alone and with tiers on both sides. Answers
under load and under faults are in test_pairs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.systems import MB, Device, Tiers, plain_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.conftest import model, servers
from tests.e2e.disagg_support import PAGE, pair_flags, start_pair
from tests.e2e.e2e_support import wait_until

__all__ = ["model", "servers"]

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

POOL_TOKENS = 8192
NUM_TURNS = 4
FIRST, ANSWER, USER = 200, 20, 30
CASES = [(0, False), (1, False), (2, False), (1, True), (2, True), (3, True)]


def name_of(case):
    caching, has_tiers = case
    return f"caching{caching}-{'tiers' if has_tiers else 'plain'}"


@pytest.fixture(scope="module")
def answers(servers, model):
    """Answers of one plain server to the turns of one session."""
    server = servers.get(plain_spec(Device(model, POOL_TOKENS, PAGE), "plain-caching"))
    rng = np.random.default_rng(21)

    def drawn(count):
        return [int(token) for token in random_tokens(rng, count, VOCAB_TOKENS)]

    history, found = drawn(FIRST), []
    for _ in range(NUM_TURNS):
        answer = server.generate(history, ANSWER)["output_ids"]
        found.append((list(history), answer))
        history += answer + drawn(USER)
    servers.stop()
    return found


@pytest.fixture(scope="module", params=CASES, ids=name_of)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def pair(case, answers, model, tmp_path_factory):
    caching, has_tiers = case
    folder = tmp_path_factory.mktemp(name_of(case))
    tiers = Tiers(64 * MB) if has_tiers else None
    # A decode server that keeps nothing has no use for tiers.
    flags = pair_flags(caching, tiers if caching > 1 else None)
    if caching == 3:
        flags += ("--tiered-pool", f"file:{folder / 'pool'}")
        # The planner may find an answer of a page not worth a load, or a return.
        flags += ("--tiered-load-policy", "always", "--tiered-pd-returns", "always")
    prefill = tiers.flags if tiers is not None and caching == 1 else ()
    pair = start_pair(Device(model, POOL_TOKENS, PAGE), folder, flags, prefill)
    yield pair
    pair.stop()


def whole_pages(num_tokens):
    return num_tokens // PAGE * PAGE


def test_a_session_turn_by_turn(pair, case, answers):
    """Answers are plain's, and either side has and sends just what its mode says."""
    caching, _ = case
    for number, (prompt, expected) in enumerate(answers):
        before = pair.transfers(pair.decode)
        by_prefill, by_decode = pair.ask(prompt, ANSWER)
        assert by_decode["output_ids"] == expected
        former = answers[number - 1][0] if number else []
        # Of an answer's last token there is no KV.
        with_answer = whole_pages(len(former) + ANSWER - 1) if number else 0
        kept = {0: 0, 1: whole_pages(len(former)), 2: whole_pages(len(former))}
        on_prefill = kept.get(caching, with_answer)
        on_decode = with_answer if caching >= 2 else 0
        after = pair.transfers(pair.decode)
        assert by_prefill["meta_info"]["cached_tokens"] == on_prefill
        held = after["tokens_held_by_decode"] - before["tokens_held_by_decode"]
        assert held == on_decode
        sent = after["pages"] - before["pages"]
        assert sent == -(-(len(prompt) - on_decode) // PAGE)
        if caching == 3:
            wait_until(
                lambda n=number: pair.transfers(pair.decode)["returns"] == n + 1,
                "the answer is back at the prefill server",
            )
    told = pair.transfers(pair.prefill)
    assert told["pages"] == pair.transfers(pair.decode)["pages"]
    assert told["pushes_failed"] == 0
    returned = pair.transfers(pair.decode)["pages_returned"]
    last = len(answers[-1][0])
    most = (last + NUM_TURNS * ANSWER) // PAGE
    assert (0 < returned <= most) if caching == 3 else returned == 0
