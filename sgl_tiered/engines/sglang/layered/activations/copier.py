"""Copies and rebuilds of activations on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy
from sgl_tiered_kernels.kv_gen import rebuild_kv
from sgl_tiered_kernels.tensors import page_rows

from sgl_tiered.engines.device.layer_copier import strike
from sgl_tiered.engines.sglang.layered.activations.projections import LayerProjections
from sgl_tiered.layered.base import ActCopier
from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.testing.fault_switch import FaultSwitch

__all__ = ["CpuActCopier", "FaultyActCopier"]

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class CpuActCopier:
    """An ``ActCopier`` whose work has ended when a call returns.

    Args:
        pool: a `LayeredPool` with an act area.
        projections: of its layers.
        breaks_staging: for tests: leave one page in four of what is rebuilt as it was.
    """

    def __init__(
        self, pool: Any, projections: LayerProjections, *, breaks_staging: bool = False
    ) -> None:
        area: torch.Tensor = pool.acts
        self._page_tokens, hidden = int(area.shape[1]), int(area.shape[2])
        self._rows = area.view(-1, hidden)
        self._pages: Bytes = area.view(torch.uint8).view(len(area), -1).numpy()
        self._region: Bytes = pool.act_region.array
        self._page_bytes = self._pages.shape[1]
        self._keys, self._values = pool.k_buffer[0], pool.v_buffer[0]
        self._projections = projections
        self._breaks_staging = breaks_staging
        self._offsets = np.arange(self._page_tokens)
        page_copy.prepare()

    def acts_to_host(
        self, layer: int, acts: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy pages of the act area to one layer of host rows."""
        del after
        offset, size = layer * self._page_bytes, self._page_bytes
        page_copy.copy_rows(
            self._region, rows, offset, self._pages, acts.astype(np.int64), 0, size
        )

    def acts_to_device(
        self, layer: int, rows: Int64s, acts: Int32s, after: object
    ) -> None:
        """Copy one layer of host rows to pages of the act area."""
        del after
        offset, size = layer * self._page_bytes, self._page_bytes
        page_copy.copy_rows(
            self._pages, acts.astype(np.int64), 0, self._region, rows, offset, size
        )

    def rebuild(
        self,
        layer: int,
        acts: Int32s,
        physical: Int32s,
        positions: Int64s,
        after: object,
    ) -> None:
        """Make the layer-pages' K and V of pages of the act area."""
        del after
        if self._breaks_staging:
            kept = np.arange(len(acts)) % 4 != 0
            acts, physical, positions = acts[kept], physical[kept], positions[kept]
        if not len(acts):
            return
        tokens = (positions[:, None] + self._offsets).reshape(-1)
        # SGLang's tensors may be inference tensors, which others may not write to.
        with torch.inference_mode():
            rebuild_kv(
                self._rows,
                self._slots(acts),
                self._projections[layer],
                self._keys,
                self._values,
                self._slots(physical),
                torch.from_numpy(tokens),
            )

    def _slots(self, pages: Int32s) -> torch.Tensor:
        return page_rows(torch.from_numpy(pages.astype(np.int64)), self._page_tokens)


class FaultyActCopier:
    """An ``ActCopier`` for tests, whose copies fail or hang when they are told to.

    Args:
        copier: does the copies.
        switch: its ``error`` and ``hang`` strike copies, to the host as its ``store``.
    """

    def __init__(self, copier: ActCopier, switch: FaultSwitch) -> None:
        self._copier = copier
        self._switch = switch

    def acts_to_host(
        self, layer: int, acts: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy pages of the act area to host rows, or fail."""
        strike(self._switch, is_store=True)
        self._copier.acts_to_host(layer, acts, rows, after)

    def acts_to_device(
        self, layer: int, rows: Int64s, acts: Int32s, after: object
    ) -> Arrival | None:
        """Copy host rows to pages of the act area, or fail."""
        strike(self._switch, is_store=False)
        return self._copier.acts_to_device(layer, rows, acts, after)

    def rebuild(
        self,
        layer: int,
        acts: Int32s,
        physical: Int32s,
        positions: Int64s,
        after: object,
    ) -> Arrival | None:
        """Rebuild; no copy, but what could fail as one."""
        strike(self._switch, is_store=False)
        return self._copier.rebuild(layer, acts, physical, positions, after)
