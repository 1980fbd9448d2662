"""From measured times to first token to the context-caching cost model.

First what computing costs, from batches that reused nothing or KV on the device; then,
place by place, what KV from there adds to it. The equations are those of
``context_caching.py``. Whether a place's KV comes before the pass or under it is fitted
too: the form with the smaller error is taken, of equal ones the former, which promises
less. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import CachingFit, LocationFit
from sgl_tiered.cost.context_caching import compute_features
from sgl_tiered.cost.fitting import fit_nonnegative, quality_of

__all__ = ["CachingSample", "fit_caching"]

_ROUNDS = 8
"""Of sorting samples into those that show the move and those that hide it."""
_WORTH_HIDING = 1e-9
"""The form under the pass must lower the squared relative error by more than this."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CachingSample:
    """Time of equal requests that were alone together, in seconds.

    Attributes:
        prompt_tokens: of each request.
        cached_tokens: of each, reused: whole pages.
        location: where these were; of no meaning with none.
        seconds: from sending to the last request's first token.
        page_tokens: of the cache's pages.
        num_requests: sent as one message.
        chunk_tokens: most new tokens of a pass; None for no limit.
    """

    prompt_tokens: int
    cached_tokens: int
    location: TierId
    seconds: float
    page_tokens: int
    num_requests: int = 1
    chunk_tokens: int | None = None

    def features(self) -> tuple[float, ...]:
        """Return the factors of the coefficients of computing."""
        new = self.prompt_tokens - self.cached_tokens
        return compute_features(
            [self.cached_tokens] * self.num_requests,
            [new] * self.num_requests,
            self.chunk_tokens,
        )

    def moved(self) -> tuple[float, float, float]:
        """Return requests, tokens and pages that were brought."""
        tokens = self.num_requests * self.cached_tokens
        return float(self.num_requests), float(tokens), tokens / self.page_tokens


def fit_caching(samples: Sequence[CachingSample], num_layers: int) -> CachingFit | None:
    """Fit all places; None without two different numbers of computed tokens.

    Args:
        samples: as measured; repeats should be medians. A place has to occur with two
            different numbers of tokens, or it is left out.
        num_layers: of the model.
    """
    here = [s for s in samples if not s.cached_tokens or s.location is TierId.DEVICE]
    if len({s.prompt_tokens - s.cached_tokens for s in here}) < 2:
        return None
    coefficients, quality = fit_nonnegative(
        [s.features() for s in here], [s.seconds for s in here], frozenset({3})
    )
    places = []
    for tier in TierId:
        there = [s for s in samples if s.cached_tokens and s.location is tier]
        if tier is TierId.DEVICE or len({s.cached_tokens for s in there}) < 2:
            continue
        compute_s = np.array([s.features() for s in there]) @ np.array(coefficients)
        places.append(_fit_place(tier, there, compute_s, num_layers))
    message_s, pass_s, request_s, token_s, pair_s, context_s = coefficients
    return CachingFit(
        message_s,
        pass_s,
        request_s,
        token_s,
        pair_s,
        context_s,
        tuple(places),
        quality,
    )


def _fit_place(
    tier: TierId,
    samples: Sequence[CachingSample],
    compute_s: _Floats,
    num_layers: int,
) -> LocationFit:
    rows = np.array([s.moved() for s in samples])
    times = np.array([s.seconds for s in samples])
    before, _ = fit_nonnegative(rows.tolist(), times.tolist(), known=compute_s.tolist())
    fitted = compute_s + rows @ np.array(before)
    under, hidden = _fit_under(rows, times, compute_s, num_layers)
    overlaps = _error(hidden, times) < _error(fitted, times) - _WORTH_HIDING
    coefficients, fitted = (under, hidden) if overlaps else (before, fitted)
    request_s, token_s, page_s = coefficients
    quality = quality_of(fitted, times)
    return LocationFit(tier.label, request_s, token_s, page_s, overlaps, quality)


def _fit_under(
    rows: _Floats, times: _Floats, compute_s: _Floats, num_layers: int
) -> tuple[list[float], _Floats]:
    """Fit ``max(compute, move + compute / L)``; return coefficients and times.

    Only samples whose move is the longer one tell its coefficients; which these are
    follows from the coefficients, so both are found in turn.
    """
    last_s = compute_s / num_layers
    shows = np.ones(len(rows), np.bool_)
    found = [0.0] * rows.shape[1]
    for _ in range(_ROUNDS):
        found, _ = fit_nonnegative(
            rows[shows].tolist(), times[shows].tolist(), known=last_s[shows].tolist()
        )
        moved_s = rows @ np.array(found)
        now = moved_s + last_s > compute_s
        if not now.any() or (now == shows).all():
            break
        shows = now
    moved_s = rows @ np.array(found)
    fitted: _Floats = np.maximum(compute_s, moved_s + last_s)
    return found, fitted


def _error(fitted: _Floats, times: _Floats) -> float:
    """Return the mean squared relative error, as ``fit_nonnegative`` has it."""
    return float(np.mean(((fitted - times) / np.maximum(fitted, times)) ** 2))
