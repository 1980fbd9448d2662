"""What rules the rows of one pool: the table, the device pool, the mass, the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.engines.sglang.sparse.device_pool import SparseDevicePool
from sgl_tiered.sparse.keep import KeepFacts, KeepPolicy
from sgl_tiered.sparse.mass import PageMass, SlotMass
from sgl_tiered.sparse.rows import RowBinding

__all__ = ["SparseParts"]


@dataclass(frozen=True, slots=True)
class SparseParts:
    """The parts of one pool.

    Attributes:
        binding: where each token of each layer lies.
        device: copies to it and from it.
        policy: what of a load is kept.
        slots: what attention gave to the tokens on the device.
        pages: the same for pages that the cache's table knows.
        measured: ids of the requests whose attention is measured.
        share: of the bytes of whole pages, what loads are expected to bring.
    """

    binding: RowBinding
    device: SparseDevicePool
    policy: KeepPolicy
    slots: SlotMass
    pages: PageMass
    measured: set[str]
    share: float = 1.0

    def choose(
        self, first_token: int, mean: npt.NDArray[np.float32]
    ) -> list[npt.NDArray[np.int64]] | None:
        """Return per layer what of a load is kept; None for all of it.

        Args:
            first_token: position in the prompt of the load's first token.
            mean: float32 [num_layers, num_tokens], NaN where nothing is known.
        """
        num_tokens = mean.shape[1]
        if np.isnan(mean).all():
            return None
        kept = self.policy.keep(KeepFacts(first_token, num_tokens, mean))
        if all(len(tokens) == num_tokens for tokens in kept):
            return None
        return kept

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture of the rows."""
        binding = self.binding
        return {
            "rows": binding.num_rows,
            "rows_used": binding.num_rows - binding.num_free,
            "rows_dropped": binding.num_dropped,
            "rows_dropped_evictable": binding.num_dropped_unheld,
            "pages_with_mass": self.pages.num_pages,
            "mass_bytes": self.slots.num_bytes + self.pages.num_bytes,
        }
