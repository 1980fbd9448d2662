"""One session against a pair, turn by turn: what either side has, sends and returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from tests.e2e.disagg_support import PAGE, Pair
from tests.e2e.e2e_support import wait_until

__all__ = ["AnsweredTurn", "as_their_mode_says", "record_turns"]

NUM_TURNS = 4
FIRST, ANSWER, USER = 200, 20, 30
_SEED = 21

AnsweredTurn = tuple[list[int], list[int]]
"""A prompt with all before it, and its answer."""


def record_turns(server: SglangServer) -> list[AnsweredTurn]:
    """Return one session's turns and the answers of a plain server."""
    rng = np.random.default_rng(_SEED)

    def drawn(count: int) -> list[int]:
        return [int(token) for token in random_tokens(rng, count, VOCAB_TOKENS)]

    history, found = drawn(FIRST), []
    for _ in range(NUM_TURNS):
        answer = server.generate(history, ANSWER)["output_ids"]
        found.append((list(history), answer))
        history += answer + drawn(USER)
    return found


def as_their_mode_says(pair: Pair, caching: int, turns: Sequence[AnsweredTurn]) -> None:
    """Have a session answered that neither side has seen, and look at the counters.

    Answers are plain's, and either side has and sends just what its mode says.
    """
    first = [pair.transfers(server) for server in (pair.prefill, pair.decode)]
    for number, (prompt, expected) in enumerate(turns):
        before = pair.transfers(pair.decode)
        by_prefill, by_decode = pair.ask(prompt, ANSWER)
        assert by_decode["output_ids"] == expected
        former = turns[number - 1][0] if number else []
        # Of an answer's last token there is no KV.
        with_answer = _whole_pages(len(former) + ANSWER - 1) if number else 0
        kept = {0: 0, 1: _whole_pages(len(former)), 2: _whole_pages(len(former))}
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
                lambda b=before["returns"]: pair.transfers(pair.decode)["returns"] > b,
                "the answer is back at the prefill server",
            )
    last = [pair.transfers(server) for server in (pair.prefill, pair.decode)]
    by_prefill, by_decode = (
        {name: told[name] - former[name] for name in _COUNTERS}
        for told, former in zip(last, first, strict=True)
    )
    assert by_prefill["pages"] == by_decode["pages"]
    assert by_prefill["pushes_failed"] == 0
    returned = by_decode["pages_returned"]
    most = (len(turns[-1][0]) + NUM_TURNS * ANSWER) // PAGE
    assert (0 < returned <= most) if caching == 3 else returned == 0


_COUNTERS = ("pages", "pushes_failed", "pages_returned")


def _whole_pages(num_tokens: int) -> int:
    return num_tokens // PAGE * PAGE
