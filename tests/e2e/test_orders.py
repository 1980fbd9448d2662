"""Orders of the queue on a real engine: the same answers, in another order."""

import numpy as np
import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens, replay
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.e2e_support import (
    ANSWER_TOKENS,
    BURST_PREFIX_TOKENS,
    Case,
    open_loop,
    pinned,
    sequential,
    settle,
    stats,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=False)
NUM_LONG = 6
NUM_KIN = 6
"""Prompts that share a long beginning: of one kind one computes it, the others wait."""
# So many that what fcfs gives the last of them lies well above what it gives the long
# ones: that is the slack in which the order may choose. And so short that they are of
# another class of costs even when computed whole.
NUM_SHORT = 36
SHORT_TOKENS = 80


@pytest.fixture(scope="module")
def server(servers, model, reference, tmp_path_factory):
    """A server that orders its queue by cost, and runs two requests at a time."""
    # Its own server has to come and go before.
    reference(CASE)
    tiers = Tiers(8 * MB, tmp_path_factory.mktemp("disk"), 64 * MB)
    flags = ("--tiered-order=cost", "--max-running-requests=2")
    yield servers.restart(tiered_spec(CASE.device(model), tiers, "cost", flags))
    servers.stop()


def test_chats_equal_plain(reference, server):
    """One after the other: nothing to reorder, and the answers are plain's."""
    plain = reference(CASE)
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


def test_a_queue_is_reordered_and_everybody_is_answered(reference, server):
    """Long prompts first and short ones behind them, all at once: short ones overtake,
    nobody starves, each gets the answer that it gets alone, and nothing is left."""
    draw = np.random.default_rng(3)
    shared = random_tokens(draw, BURST_PREFIX_TOKENS, VOCAB_TOKENS)
    long = [
        PlannedRequest(f"l{n}", random_tokens(draw, 1_000, VOCAB_TOKENS), ANSWER_TOKENS)
        for n in range(NUM_LONG)
    ]
    kin = [
        PlannedRequest(
            f"k{n}", shared + random_tokens(draw, 16, VOCAB_TOKENS), ANSWER_TOKENS
        )
        for n in range(NUM_KIN)
    ]
    short = [
        PlannedRequest(
            f"s{n}", random_tokens(draw, SHORT_TOKENS, VOCAB_TOKENS), ANSWER_TOKENS
        )
        for n in range(NUM_SHORT)
    ]
    burst = [*long, *kin, *short]
    server.flush_cache()
    alone = sequential(server, burst)
    before = stats(server)["counters"].get("queue_rearranged", 0)
    records = open_loop(server, burst)
    assert [record.error for record in records] == [None] * len(burst)
    assert stats(server)["counters"].get("queue_rearranged", 0) > before
    result = check_equality(
        alone,
        records,
        page_size=CASE.page_size,
        spread=reference(CASE).spread,
        forced=False,
        slack=2.0,
    )
    assert result.passed, result.summary()
    assert pinned(settle(server)) == 0
