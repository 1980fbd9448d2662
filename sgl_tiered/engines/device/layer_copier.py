"""Copies of layer-pages between a `LayeredPool` and its host region, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.cuda_ops import as_byte_pages
from sgl_tiered.layered.base import LayerCopier
from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.testing.fault_switch import FaultSwitch

__all__ = ["CpuLayerCopier", "FaultyCopier", "strike"]

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class CpuLayerCopier:
    """A ``LayerCopier`` whose copies have ended when a call returns.

    Args:
        pool: a `LayeredPool`.
        layout: shape of a page.
        breaks_staging: for tests: leave one page in four of what is staged as it was.
    """

    def __init__(
        self, pool: Any, layout: PageLayout, *, breaks_staging: bool = False
    ) -> None:
        self._layout = layout
        self._keys: Bytes = as_byte_pages(pool.k_buffer[0], layout).numpy()
        self._values: Bytes = as_byte_pages(pool.v_buffer[0], layout).numpy()
        self._region: Bytes = pool.region.array
        self._breaks_staging = breaks_staging
        page_copy.prepare()

    @property
    def waiter_copies(self) -> bool:
        """Copies and forward share the cores."""
        return True

    def mark(self) -> object:
        """Return nothing to wait for: the forward has written when it returns."""
        return None

    def to_host(
        self, layer: int, physical: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy layer-pages to one layer of host rows."""
        del after
        page_copy.gather_layer(
            self._region,
            rows,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            self._keys,
            self._values,
            physical,
            self._layout.part_bytes,
        )

    def to_device(
        self, layer: int, rows: Int64s, physical: Int32s, after: object
    ) -> None:
        """Copy one layer of host rows to layer-pages."""
        del after
        if self._breaks_staging:
            kept = np.arange(len(rows)) % 4 != 0
            rows, physical = rows[kept], physical[kept]
        self.load(layer, self._region, rows, physical)

    def load(
        self, layer: int, region: Bytes, rows: Int64s, physical: npt.NDArray[Any]
    ) -> None:
        """Copy one layer of rows of any region to layer-pages."""
        page_copy.copy_layer(
            self._keys,
            self._values,
            physical,
            region,
            rows,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            self._layout.part_bytes,
        )

    def store(
        self, layer: int, region: Bytes, rows: Int64s, physical: npt.NDArray[Any]
    ) -> None:
        """Copy layer-pages to one layer of rows of any region."""
        page_copy.gather_layer(
            region,
            rows,
            self._layout.key_offset(layer),
            self._layout.value_offset(layer),
            self._keys,
            self._values,
            physical,
            self._layout.part_bytes,
        )

    def load_host(self, layer: int, region: Bytes, rows: Int64s, to: Int64s) -> None:
        """Copy one layer of rows of another region to the rows of ours."""
        self._between(layer, self._region, to, region, rows)

    def store_host(self, layer: int, region: Bytes, rows: Int64s, frm: Int64s) -> None:
        """Copy one layer of our rows to rows of another region."""
        self._between(layer, region, rows, self._region, frm)

    def _between(
        self, layer: int, dst: Bytes, dst_rows: Int64s, src: Bytes, src_rows: Int64s
    ) -> None:
        # Keys and values of a layer lie side by side in a row.
        offset = self._layout.key_offset(layer)
        num_bytes = self._layout.layer_page_bytes
        page_copy.copy_rows(dst, dst_rows, offset, src, src_rows, offset, num_bytes)


class FaultyCopier:
    """A ``LayerCopier`` for tests, whose copies fail or hang when they are told to.

    Args:
        copier: does the copies.
        switch: its ``error`` and ``hang`` strike copies, to the host as its ``store``.
    """

    def __init__(self, copier: LayerCopier, switch: FaultSwitch) -> None:
        self._copier = copier
        self._switch = switch

    @property
    def waiter_copies(self) -> bool:
        """Whether the engine's thread copies what it would have to wait for."""
        return self._copier.waiter_copies

    def mark(self) -> object:
        """Return a token for all work queued so far."""
        return self._copier.mark()

    def to_host(
        self, layer: int, physical: Int32s, rows: Int64s, after: object
    ) -> None:
        """Copy layer-pages to one layer of host rows, or fail."""
        strike(self._switch, is_store=True)
        self._copier.to_host(layer, physical, rows, after)

    def to_device(
        self, layer: int, rows: Int64s, physical: Int32s, after: object
    ) -> Arrival | None:
        """Copy one layer of host rows to layer-pages, or fail."""
        strike(self._switch, is_store=False)
        return self._copier.to_device(layer, rows, physical, after)


def strike(switch: FaultSwitch, *, is_store: bool) -> None:
    """Fail or hang, if a copy is to.

    Raises:
        OSError: it is to fail.
    """
    fault = switch.strike({"error", "hang"}, is_store=is_store)
    if fault is None:
        return
    if fault.kind == "hang":
        switch.hold(fault)
    else:
        raise OSError("injected error")
