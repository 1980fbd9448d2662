"""Token ids repeat exactly where block ids do, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_workloads.traces.base import TraceRequest
from sgl_tiered_workloads.traces.tokens import prompt_tokens

BLOCK, VOCAB = 64, 5000
PINNED = [64, 2444, 1442, 1599]
"""Ids of block 12 under seed 1, worked out with plain integers of 64 bits."""


def request(tokens: int, ids: list[int], serial: int = 0) -> TraceRequest:
    return TraceRequest(0.0, tokens, 1, np.array(ids, dtype=np.int64), serial=serial)


def tokens_of(asked: TraceRequest, seed: int = 1, block: int = BLOCK) -> list[int]:
    return prompt_tokens(asked, block, VOCAB, seed).tolist()


def test_equal_ids_give_equal_tokens_in_any_request_and_place() -> None:
    """Two prompts agree on their shared blocks and part at the first other one."""
    one = tokens_of(request(192, [3, 7, 8], serial=1))
    two = tokens_of(request(192, [3, 7, 9], serial=2))
    assert one[:128] == two[:128]
    assert one[128] != two[128] or one[129] != two[129]
    assert tokens_of(request(64, [7]))[:64] == one[64:128]


def test_a_partial_last_block_is_the_front_of_the_whole_one() -> None:
    """An id whose block is cut gives the first of its tokens."""
    whole = tokens_of(request(128, [3, 7]))
    assert tokens_of(request(100, [3, 7])) == whole[:100]


def test_a_tail_without_id_is_the_requests_own() -> None:
    """Tokens behind the full blocks differ between requests, and repeat for one."""
    one = tokens_of(request(100, [3], serial=1))
    two = tokens_of(request(100, [3], serial=2))
    assert one[:64] == two[:64]
    assert one[64:] != two[64:]
    assert one == tokens_of(request(100, [3], serial=1))


def test_a_request_without_ids_is_random_throughout() -> None:
    """A trace of lengths shares nothing between requests."""
    one = tokens_of(request(300, [], serial=1), block=0)
    two = tokens_of(request(300, [], serial=2), block=0)
    assert len(one) == len(two) == 300
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 10


def test_another_seed_gives_other_tokens() -> None:
    """Seeds change tokens, and negative and large seeds are seeds too."""
    drawn = [tokens_of(request(64, [3]), seed) for seed in (0, 1, -1, 2**40)]
    assert len({tuple(tokens) for tokens in drawn}) == 4


def test_tokens_are_plain_in_the_vocabulary_and_spread_evenly() -> None:
    """No special token, none out of range, and every plain id about as often."""
    drawn = prompt_tokens(request(64 * 2000, list(range(2000))), BLOCK, 107, 5)
    assert drawn.min() == 7
    assert drawn.max() == 106
    counts = np.bincount(drawn, minlength=107)[7:]
    assert counts.min() > 0.85 * 1280
    assert counts.max() < 1.15 * 1280


def test_tokens_are_the_same_on_every_machine_and_version() -> None:
    """The first ids of a block are pinned: recorded runs must stay comparable."""
    assert tokens_of(request(4, [12]), seed=1) == PINNED


def test_a_vocabulary_without_plain_tokens_is_refused() -> None:
    """Seven ids are special; nothing is left of a vocabulary of seven."""
    with pytest.raises(ValueError, match="no plain tokens"):
        prompt_tokens(request(4, [1]), BLOCK, 7, 1)
