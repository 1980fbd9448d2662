"""What rules the rows of one pool: the table, the device pool, the mass, the choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.plans import OffloadPlan
from sgl_tiered.engines.device.sparse_pool import SparseDevicePool
from sgl_tiered.serving.sparse_report import SparseLoad
from sgl_tiered.sparse.gauge import MassGauge
from sgl_tiered.sparse.keep import SpanChoice
from sgl_tiered.sparse.rows import RowBinding
from sgl_tiered.sparse.stored import StoredTokens, best_of_pages

__all__ = ["SparseParts"]


@dataclass(frozen=True, slots=True)
class SparseParts:
    """The parts of one pool.

    Attributes:
        binding: where each token of each layer lies.
        device: copies to it and from it.
        choice: what of a load is kept.
        gauge: what attention gave to tokens, on the device and in the cache's table.
        measured: ids of the requests whose attention is measured.
        share: of the bytes of stored pages, what loads are expected to bring.
        stored: which tokens of their pages the tiers hold; None where they hold all.
    """

    binding: RowBinding
    device: SparseDevicePool
    choice: SpanChoice
    gauge: MassGauge
    measured: set[str]
    share: float = 1.0
    stored: StoredTokens | None = None

    def forget(self, rows: npt.NDArray[np.int32]) -> None:
        """Forget what is kept beside rows of the table that are given up."""
        self.gauge.forget_rows(rows)
        if self.stored is not None:
            self.stored.forget(rows)

    def judged(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return what attention gave to tokens on the device, where pages are cut.

        Args:
            slots: int64 [n].

        Returns:
            float32 [num_layers, n], of the head that gave most; NaN where no query was
            asked.
        """
        book = self.gauge.every
        assert book is not None, "the selection does not look at mass"
        mean, _ = book.slots.read(slots)
        most: npt.NDArray[np.float32] = mean.max(axis=1)
        return most

    def num_judged(
        self, mean: npt.NDArray[np.float32], lacking: npt.NDArray[np.bool_]
    ) -> int:
        """Return how many leading pages of a prompt can be stored in part.

        Args:
            mean: float32 [num_layers, n * page_tokens], as ``judged`` returns it.
            lacking: bool [n], pages that were loaded so, and are stored already.
        """
        shape = (len(mean), len(lacking), self.binding.page_tokens)
        unknown = np.isnan(mean).reshape(shape).any(axis=(0, 2))
        missing = np.flatnonzero(unknown & ~lacking)
        return int(missing[0]) if len(missing) else len(lacking)

    def choose_stored(
        self,
        plan: OffloadPlan,
        mean: npt.NDArray[np.float32],
        device_pages: npt.NDArray[np.int64],
    ) -> None:
        """Settle what of its pages an offload will store.

        Args:
            plan: of the offload.
            mean: float32 [num_layers, num_tokens], of the prompt from its start.
            device_pages: int64 [n], where the plan's pages lie.
        """
        assert self.stored is not None, "pages are stored whole"
        tokens, count = self.binding.page_tokens, self.device.stored_tokens
        kept = best_of_pages(mean, plan.positions, tokens, count)
        self.device.choose(device_pages, self.stored.agree(plan.pages, kept))

    def load_of(
        self, device_pages: npt.NDArray[np.int64], kept: Sequence[npt.NDArray[np.int64]]
    ) -> SparseLoad:
        """Return what to report of a load whose pages are bound.

        Args:
            device_pages: int64 [n].
            kept: per layer, which of their tokens come.
        """
        num_pages, device = len(device_pages), self.device
        return SparseLoad(
            num_pages * self.binding.page_tokens,
            [len(tokens) for tokens in kept],
            int(device.load_bytes(device_pages).sum()),
            num_pages * device.whole_bytes,
            self.choice.selection.name,
            device.written_as,
        )

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture of the rows."""
        binding = self.binding
        return {
            "policy": self.choice.selection.name,
            "rows": binding.num_rows,
            "rows_used": binding.num_rows - binding.num_free,
            "rows_dropped": binding.num_dropped,
            "rows_dropped_evictable": binding.num_dropped_unheld,
            "pages_with_mass": self.gauge.num_pages,
            "mass_bytes": self.gauge.num_bytes,
            **self._stored_stats(),
        }

    def _stored_stats(self) -> dict[str, Any]:
        """Return the same of what is stored in part; empty where nothing is."""
        if self.stored is None:
            return {}
        return {
            "pages_stored": self.stored.num_pages,
            "stored_tokens_of_page": self.device.stored_tokens,
            "choice_bytes": self.stored.num_bytes,
        }
