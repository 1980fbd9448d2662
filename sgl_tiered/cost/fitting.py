"""From measured points to coefficients: least squares, none of them negative.

A time that shrinks with more work is noise, so coefficients are not negative. Residuals
are relative, so that a point of 2 ms counts as much as one of 2 s. A coefficient that
the points cannot tell from another is left at 0. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.cost.calibration import DecodeFit, FitQuality, TokensFit

__all__ = [
    "DecodeSample",
    "LinkLine",
    "LinkSample",
    "PrefillLine",
    "PrefillSample",
    "TokensSample",
    "fit_decode",
    "fit_link",
    "fit_nonnegative",
    "fit_prefill",
    "fit_tokens",
    "quality_of",
]

_WORTH_A_TERM = 1e-9
"""A further term must lower the squared relative error per point by more than this."""
_ROUNDS = 5
"""Of weighing the points anew; the third changes nothing worth a digit as a rule."""


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """Time to first token of equal requests that were alone together, in seconds.

    Attributes:
        context_tokens: served from the device, of each request.
        new_tokens: computed, of each request.
        num_passes: forward passes that all of them took.
        seconds: from sending to the last request's first token.
        num_requests: sent as one message.
    """

    context_tokens: int
    new_tokens: int
    num_passes: int
    seconds: float
    num_requests: int = 1


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Time of one step of a batch; ``context_tokens`` is the sum over the batch."""

    num_requests: int
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Mean bytes and mean seconds of the transfers of one point."""

    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TokensSample:
    """Time of one rebuild, or one load, of so many tokens of a layer."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """``request_s + overhead_s * passes + token_s * n + pair_s * pairs + ...``.

    The last term is ``context_token_s`` times the tokens of all contexts.
    """

    request_s: float
    overhead_s: float
    token_s: float
    pair_s: float
    context_token_s: float
    quality: FitQuality


@dataclass(frozen=True, slots=True)
class LinkLine:
    """``latency_s + bytes / bytes_per_s``."""

    latency_s: float
    bytes_per_s: float
    quality: FitQuality


def fit_nonnegative(
    features: Sequence[Sequence[float]],
    seconds: Sequence[float],
    needed: frozenset[int] = frozenset(),
    known: Sequence[float] | None = None,
) -> tuple[list[float], FitQuality]:
    """Fit ``seconds = known + features @ coefficients`` with coefficients >= 0.

    Tries every set of columns (there are at most six), so the result is the best one
    and not where an iteration stopped; of equally good ones it has the fewest terms.

    Args:
        features: [points, columns], not negative.
        seconds: [points], positive.
        needed: columns that must have a coefficient above zero.
        known: [points], the part of each time that something else explains; None for
            nothing.
    """
    matrix = np.asarray(features, dtype=np.float64)
    target = np.asarray(seconds, dtype=np.float64)
    assert matrix.ndim == 2, matrix.shape
    assert len(matrix) == len(target) > 0, (matrix.shape, target.shape)
    assert (target > 0).all(), target
    base = np.zeros(len(target)) if known is None else np.asarray(known, np.float64)
    yardstick = np.full(len(target), target.mean())
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        coefficients = _best_subset(matrix, target - base, yardstick, needed)
        # The larger of both, so that a time that is far too short (two answers read
        # at once) is off by its whole, and not by a hundred times itself.
        yardstick = np.maximum(base + matrix @ coefficients, target)
    return coefficients.tolist(), quality_of(base + matrix @ coefficients, target)


def _best_subset(
    matrix: npt.NDArray[np.float64],
    target: npt.NDArray[np.float64],
    yardstick: npt.NDArray[np.float64],
    needed: frozenset[int],
) -> npt.NDArray[np.float64]:
    """Return the coefficients of least squared residual over ``yardstick``."""
    rows, wanted = matrix / yardstick[:, None], target / yardstick
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    rows = rows / scale
    num_columns = matrix.shape[1]
    best = np.zeros(num_columns)
    best_error = np.inf if needed else float(np.mean(wanted**2))
    for size in range(1, num_columns + 1):
        for chosen in itertools.combinations(range(num_columns), size):
            if not needed <= set(chosen):
                continue
            part = rows[:, chosen]
            found, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=1e-10)
            if rank < size or (found <= 0).any():
                continue
            error = float(np.mean((part @ found - wanted) ** 2))
            if error < best_error - _WORTH_A_TERM:
                best = np.zeros(num_columns)
                best[list(chosen)] = found
                best_error = error
    result: npt.NDArray[np.float64] = best / scale
    return result


def fit_prefill(
    samples: Sequence[PrefillSample], pass_s: float | None = None
) -> PrefillLine | None:
    """Fit the time to first token; None without two different numbers of new tokens.

    Args:
        samples: as measured; repeats should be medians.
        pass_s: overhead of a pass where it is known, as from decode steps of a single
            request. Otherwise prompts of several passes tell it, less surely: their
            share of it is small. Without these it is left in the request's overhead.
    """
    if len({sample.new_tokens for sample in samples}) < 2:
        return None
    rows = [
        [
            1.0,
            float(sample.num_passes),
            float(sample.num_requests * sample.new_tokens),
            sample.num_requests
            * sample.new_tokens
            * (sample.context_tokens + (sample.new_tokens + 1) / 2),
            sample.num_requests
            * (
                sample.num_passes * sample.context_tokens
                # A later pass has the earlier ones as its context.
                + sample.new_tokens * (sample.num_passes - 1) / 2
            ),
        ]
        for sample in samples
    ]
    times = [sample.seconds for sample in samples]
    if pass_s is None and len({sample.num_passes for sample in samples}) > 1:
        found, quality = fit_nonnegative(rows, times, frozenset({2}))
        request_s, overhead_s, token_s, pair_s, context_s = found
        return PrefillLine(request_s, overhead_s, token_s, pair_s, context_s, quality)
    first_pass = [
        max(s.seconds - (pass_s or 0.0) * (s.num_passes - 1), s.seconds / 2)
        for s in samples
    ]
    found, quality = fit_nonnegative([[row[0], *row[2:]] for row in rows], first_pass)
    first_s, token_s, pair_s, context_s = found
    overhead_s = min(pass_s or 0.0, first_s)
    return PrefillLine(
        first_s - overhead_s, overhead_s, token_s, pair_s, context_s, quality
    )


def fit_decode(samples: Sequence[DecodeSample]) -> DecodeFit | None:
    """Fit the time of a step; None without samples."""
    if not samples:
        return None
    rows = [[1.0, float(s.num_requests), float(s.context_tokens)] for s in samples]
    found, quality = fit_nonnegative(rows, [s.seconds for s in samples])
    return DecodeFit(found[0], found[1], found[2], quality)


def fit_link(samples: Sequence[LinkSample]) -> LinkLine | None:
    """Fit latency and bandwidth; None without samples.

    With transfers of one size only, all of the time is put on the bytes.
    """
    if not samples:
        return None
    rows = [[1.0, float(sample.num_bytes)] for sample in samples]
    times = [sample.seconds for sample in samples]
    one_size = len({sample.num_bytes for sample in samples}) == 1
    if one_size:
        (slope,), quality = fit_nonnegative([row[1:] for row in rows], times)
        return LinkLine(0.0, 1.0 / slope, quality)
    (latency, slope), quality = fit_nonnegative(rows, times, frozenset({1}))
    return LinkLine(latency, 1.0 / slope, quality)


def fit_tokens(samples: Sequence[TokensSample]) -> TokensFit | None:
    """Fit T_kv_gen or T_load_kv; None without two different numbers of tokens."""
    if len({sample.num_tokens for sample in samples}) < 2:
        return None
    rows = [[1.0, float(sample.num_tokens)] for sample in samples]
    times = [sample.seconds for sample in samples]
    (overhead_s, token_s), quality = fit_nonnegative(rows, times, frozenset({1}))
    return TokensFit(overhead_s, token_s, quality)


def quality_of(
    fitted: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]
) -> FitQuality:
    """Return how well predicted times meet measured ones, both [points]."""
    residuals = fitted - measured
    relative = np.abs(residuals) / measured
    squares = float((residuals**2).sum())
    total = float(((measured - measured.mean()) ** 2).sum())
    # Equal times have no variance to explain; a fit that meets them is perfect.
    tiny = 1e-12 * float((measured**2).sum())
    r2 = 1.0 - squares / total if total > tiny else float(squares <= tiny)
    return FitQuality(
        num_points=len(measured),
        r2=r2,
        median_relative_residual=float(np.median(relative)),
        max_relative_residual=float(relative.max()),
    )
