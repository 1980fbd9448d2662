"""Token ids from block ids: equal ids give equal tokens, on every machine.

A token is a hash of (seed, block id, place in the block), computed for a whole prompt
at once. It needs no state, so a prefix repeats exactly as in the trace whichever
request comes first, and it does not change with numpy's own generators.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered_workloads.sessions import FIRST_PLAIN_TOKEN
from sgl_tiered_workloads.traces.base import Int64s, TraceRequest

__all__ = ["prompt_tokens"]

_UInt64s = npt.NDArray[np.uint64]

# The published constants of the SplitMix64 generator: the odd golden-ratio step and
# the two multipliers of its finisher.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_OF_BLOCKS, _OF_REQUESTS = 0, 1
"""Tokens of blocks and tokens that no block covers come from separate streams."""

_MAX_FRESH_TOKENS = 1 << 32
"""Counters that a request's own tokens have; no prompt is as long."""


def prompt_tokens(
    request: TraceRequest, block_tokens: int, vocab_tokens: int, seed: int
) -> Int64s:
    """Return the prompt of a traced request, int64 [num_prompt_tokens].

    The last block is cut to the prompt's length. Tokens that no id covers (the tail
    of a trace of full blocks, all of a trace of lengths) are the request's own.

    Args:
        request: of the trace.
        block_tokens: of the trace; 0 where it has no ids.
        vocab_tokens: ids are below it and above the special tokens.
        seed: another seed gives other tokens with the same repeats.

    Raises:
        ValueError: the vocabulary has no plain tokens.
    """
    if vocab_tokens <= FIRST_PLAIN_TOKEN:
        raise ValueError(f"a vocabulary of {vocab_tokens} has no plain tokens")
    covered = min(len(request.block_ids) * block_tokens, request.num_prompt_tokens)
    fresh = request.num_prompt_tokens - covered
    places = np.arange(block_tokens, dtype=np.uint64)
    of_blocks = request.block_ids.astype(np.uint64)[:, None] * np.uint64(block_tokens)
    of_request = np.uint64(request.serial) * np.uint64(_MAX_FRESH_TOKENS)
    numbers = np.concatenate(
        [
            _hashed((of_blocks + places).ravel()[:covered], seed, _OF_BLOCKS),
            _hashed(of_request + np.arange(fresh, dtype=np.uint64), seed, _OF_REQUESTS),
        ]
    )
    # The upper half times the range, shifted down: uniform without a division.
    span = np.uint64(vocab_tokens - FIRST_PLAIN_TOKEN)
    drawn = (numbers >> np.uint64(32)) * span >> np.uint64(32)
    return drawn.astype(np.int64) + FIRST_PLAIN_TOKEN


def _hashed(counters: _UInt64s, seed: int, stream: int) -> _UInt64s:
    # Unsigned arithmetic wraps, as meant.
    key = np.array([seed * 2 + stream], dtype=np.int64).astype(np.uint64)
    return _mixed(counters * _STEP + _mixed(key * _STEP))


def _mixed(values: _UInt64s) -> _UInt64s:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: _UInt64s = values ^ (values >> np.uint64(31))
    return mixed
