"""What rules the rows of one pool: the table, the device pool, the mass, the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_tiered.engines.sglang.sparse.device_pool import SparseDevicePool
from sgl_tiered.sparse.gauge import MassGauge
from sgl_tiered.sparse.keep import SpanChoice
from sgl_tiered.sparse.rows import RowBinding

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
    """

    binding: RowBinding
    device: SparseDevicePool
    choice: SpanChoice
    gauge: MassGauge
    measured: set[str]

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
        }
