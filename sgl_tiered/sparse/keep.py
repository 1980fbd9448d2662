"""Which tokens of a span stay, layer by layer, when it is loaded to the device.

The choice is a selection's (``policies/sparsity``). Here are the facts that it is given
of a span, the budget, and what stays whatever it says.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts, Selection
from sgl_tiered.policies.sparsity.solver import HeldCurves, ratios_for_quality
from sgl_tiered.sparse.gauge import Reading

__all__ = ["RECENT", "SINKS", "SpanChoice"]

Int64s = npt.NDArray[np.int64]

SINKS = 4
"""The first tokens of a prompt: attention rests there where it has nothing to read
(arXiv:2309.17453), and without them it goes astray."""
RECENT = 64
"""The last tokens before what is computed next: no query far off has judged them."""
_ROUNDING = 1e-6


class SpanChoice:
    """A selection with a budget. A pure function of its arguments.

    Args:
        selection: who chooses.
        num_layers: of the model.
        keep: the byte budget, as a share of all layers' tokens, above 0 and at most 1.
        max_lost: the quality budget instead: the share of long-range attention that may
            be lost; needs ``curves``. Every selection gets the bytes that the solver
            needs for it.
        curves: of the model's profile.
        is_wrong: for tests only: keeps what the selection drops. A gate that a good
            choice passes has to fail with it.
    """

    def __init__(
        self,
        selection: Selection,
        num_layers: int,
        keep: float,
        *,
        max_lost: float | None = None,
        curves: HeldCurves | None = None,
        is_wrong: bool = False,
    ) -> None:
        if max_lost is not None and curves is None:
            raise ValueError("a quality budget without curves")
        self.selection = selection
        self._num_layers = num_layers
        self._keep = keep
        self._max_lost = max_lost
        self._curves = curves
        self._is_wrong = is_wrong

    def share(self, floor: float = 0.0) -> float:
        """Return the share of all layers' tokens to keep.

        Args:
            floor: every layer keeps this share at least.
        """
        if self._max_lost is None or self._curves is None:
            return self._keep
        ratios = ratios_for_quality(self._curves, self._max_lost, floor)
        return float(ratios.mean())

    def keep(
        self, first_token: int, num_tokens: int, known: tuple[Reading, ...]
    ) -> KeepSets | None:
        """Return per layer the tokens of the span that stay, ascending, from 0.

        What the selection looks at and nobody has judged stays, even where that is more
        than the budget.

        Args:
            first_token: position in the prompt of the span's first token.
            num_tokens: of the span.
            known: of its tokens, a reading for each book of the selection's gauge.

        Returns:
            None if all stays: also where nothing is known of any token.
        """
        unknown = np.zeros((self._num_layers, num_tokens), np.bool_)
        for reading in known:
            unknown |= reading.reads <= 0.0
        if unknown.all():
            return None
        kept = self.selection.keep(self.facts(first_token, num_tokens, known))
        if self._is_wrong:
            kept = [_others(tokens, num_tokens) for tokens in kept]
        elif unknown.any():
            kept = [
                np.union1d(tokens, np.flatnonzero(row)).astype(np.int64)
                for tokens, row in zip(kept, unknown, strict=True)
            ]
        if all(len(tokens) == num_tokens for tokens in kept):
            return None
        return kept

    def facts(
        self, first_token: int, num_tokens: int, known: tuple[Reading, ...]
    ) -> PrefixFacts:
        """Return what the selection is told; arguments as for ``keep``."""
        num_sinks = min(max(SINKS - first_token, 0), num_tokens)
        num_always = min(num_sinks + RECENT, num_tokens)
        readings = list(known)
        mass = readings.pop(0) if self.selection.needs_mass else None
        recent = readings.pop(0) if self.selection.window_tokens else None
        share = self.share(num_always / max(num_tokens, 1))
        whole = self._num_layers * num_tokens
        return PrefixFacts(
            self._num_layers,
            num_tokens,
            math.ceil(share * whole - _ROUNDING),
            mass=None if mass is None else mass.mean * mass.reads[:, None],
            reads=None if mass is None else mass.reads,
            # A window is as long for all tokens, so means rank them as sums do.
            recent_mass=None if recent is None else recent.mean,
            curves=self._curves,
            num_sinks=num_sinks,
            num_recent=RECENT,
        )


def _others(kept: Int64s, num_tokens: int) -> Int64s:
    """Return as many tokens, those first that are not kept."""
    dropped = np.setdiff1d(np.arange(num_tokens, dtype=np.int64), kept)
    others: Int64s = np.sort(np.concatenate([dropped, kept])[: len(kept)])
    return others
