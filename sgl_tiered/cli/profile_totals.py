"""From the sums of a server's prompts to the shares of a sparsity profile."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_tiered.cli.profiled_server import AttentionReport
from sgl_tiered.policies.sparsity.profile import (
    FRACTIONS,
    SparsityProfile,
    held_curve,
)

__all__ = ["ProfileTotals"]


class ProfileTotals:
    """Sums over prompts; a curve of all is weighted by what each prompt has to hold.

    Args:
        local_tokens: keys nearer to their query were left out.
    """

    def __init__(self, local_tokens: int) -> None:
        self._local_tokens = local_tokens
        self._num_prompts = self._num_tokens = self._num_queries = 0
        self._visible = self._num_kv_heads = 0
        self._small: Any = 0
        self._mass: Any = 0.0
        self._held_top: Any = 0.0
        self._held_later: Any = 0.0
        self._later_mass: Any = 0.0
        self._num_later = 0

    def add(self, front: AttentionReport, rest: AttentionReport) -> None:
        """Add a prompt.

        Args:
            front: sums of its first half.
            rest: of the run of all of it, which found that half cached, or should have.
        """
        if not rest.first:
            # Nothing was cached, so the second run has all queries.
            parts = [rest]
        elif rest.first == front.num_queries:
            parts = [front, rest]
            self._add_later(front, rest)
        else:
            parts = [front]
        mass = np.zeros_like(parts[-1].mass)
        for part in parts:
            mass[:, : part.mass.shape[1]] += part.mass
            self._small = self._small + part.small
            self._visible += part.visible
            self._num_queries += part.num_queries
        self._num_prompts += 1
        self._num_tokens += mass.shape[1]
        self._num_kv_heads = front.num_kv_heads
        self._mass = self._mass + mass.sum(axis=1)
        held = [held_curve(row, row, FRACTIONS) for row in mass]
        self._held_top = self._held_top + np.array(held)

    def _add_later(self, front: AttentionReport, rest: AttentionReport) -> None:
        # The last tokens of the first half were near to all that could have read them:
        # nothing is known of them yet, and a server keeps such tokens anyway.
        num_known = front.mass.shape[1] - self._local_tokens
        before, after = front.mass[:, :num_known], rest.mass[:, :num_known]
        held = [
            held_curve(row, later, FRACTIONS)
            for row, later in zip(before, after, strict=True)
        ]
        self._held_later = self._held_later + np.array(held)
        self._later_mass = self._later_mass + after.sum(axis=1)
        self._num_later += 1

    def profile(
        self, *, model: str, fingerprint: str, engine: str, created: str
    ) -> tuple[SparsityProfile, list[str]]:
        """Return the shares, and notes."""
        notes = []
        if self._num_later < self._num_prompts:
            notes.append(
                f"{self._num_prompts - self._num_later} of {self._num_prompts} prompts "
                "lost their first half from the cache: what later text reads is "
                "measured on the others."
            )
        num_heads = self._small.shape[1]
        later = None
        if self._num_later:
            later = _shares(self._held_later, self._later_mass)
        return SparsityProfile(
            model=model,
            fingerprint=fingerprint,
            num_kv_heads=self._num_kv_heads,
            num_tokens=self._num_tokens,
            num_prompts=self._num_prompts,
            local_tokens=self._local_tokens,
            small_share=self._small / max(self._visible, 1),
            fractions=np.array(FRACTIONS),
            held_by_top=_shares(self._held_top, self._mass),
            held_later=later,
            long_share=np.minimum(self._mass / (self._num_queries * num_heads), 1.0),
            engine=engine,
            created=created,
        ), notes


def _shares(held: Any, whole: Any) -> Any:
    """Divide curves ``[L, K]`` by wholes ``[L]``; a layer without mass is flat."""
    shares = held / np.maximum(whole, np.finfo(np.float64).tiny)[:, None]
    shares[:, -1] = 1.0
    return np.minimum(shares, 1.0)
