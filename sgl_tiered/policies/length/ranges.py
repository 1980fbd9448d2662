"""Lengths cut into ranges, and how likely each range is.

Ranges are one token wide up to 31 tokens and then a sixteenth of an octave, so that an
answer's length is known to 6 % at worst, in 240 ranges up to 262,144 tokens. What is
longer counts as the last one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_LENGTH", "NUM_RANGES", "STARTS", "Float64s", "log_normal", "range_of"]

Float64s = npt.NDArray[np.float64]

_BITS = 4
_EXACT = 2 << _BITS
_TOP_BITS = 18
MAX_LENGTH = 1 << _TOP_BITS
NUM_RANGES = _EXACT + ((_TOP_BITS - _BITS - 1) << _BITS)

_FLOOR = 1e-3
"""Share of a fitted shape that is spread over all ranges: nothing is impossible."""


def range_of(num_tokens: int) -> int:
    """Return the range that holds a length; O(1), on ints only."""
    num_tokens = min(max(num_tokens, 0), MAX_LENGTH - 1)
    if num_tokens < _EXACT:
        return num_tokens
    shift = num_tokens.bit_length() - _BITS - 1
    return (shift << _BITS) + (num_tokens >> shift)


def _starts() -> npt.NDArray[np.int64]:
    exact = np.arange(_EXACT)
    octaves = [
        np.arange(1 << _BITS, _EXACT) << shift for shift in range(1, _TOP_BITS - _BITS)
    ]
    return np.concatenate([exact, *octaves, [MAX_LENGTH]]).astype(np.int64)


STARTS: tuple[int, ...] = tuple(_starts().tolist())
"""First length of each range, and the end of the last: ``NUM_RANGES + 1`` numbers."""


def log_normal(median_tokens: float, sigma: float) -> Float64s:
    """Return the share of each range under a log-normal law; float64 [NUM_RANGES].

    Args:
        median_tokens: half of all answers are shorter.
        sigma: standard deviation of the logarithm.
    """
    scale = sigma * math.sqrt(2.0)
    below = [0.0] + [
        0.5 + 0.5 * math.erf(math.log((start - 0.5) / median_tokens) / scale)
        for start in STARTS[1:]
    ]
    below[-1] = 1.0
    shares = np.diff(np.array(below))
    shares[0] = 0.0
    flat = np.full(NUM_RANGES, 1.0 / (NUM_RANGES - 1))
    flat[0] = 0.0
    mixed: Float64s = (1.0 - _FLOOR) * shares / shares.sum() + _FLOOR * flat
    return mixed
