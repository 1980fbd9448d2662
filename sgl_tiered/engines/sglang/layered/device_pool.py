"""The device as the tiers below see it, where layers are placed one by one.

They go on to know logical pages. Where a page's layers lie is noted on the engine's
thread before a transfer begins and holds until it has ended: on the device, or in the
host region, which is copied to and from like a device. A page that is kept as
activations has its layers in the act area or in the host region of activations; below,
they lie one after the other from the first byte of its slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.act_transfers import ActTransfers
from sgl_tiered.engines.device.layer_copier import CpuLayerCopier
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.layered.base import ActCopier, LayerCopier
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.stream_weights import WeightSlots

__all__ = ["ActBytes", "LayerCopies", "LayeredDevicePool"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class ActBytes:
    """The memory that holds activations, on a CPU.

    Args:
        area: uint8 [num_acts + 1, act_layer_page_bytes], the act area.
        region: uint8 [num_act_rows, >= num_layers * act_layer_page_bytes], their host
            region; a row has one layer after the other.
    """

    def __init__(self, area: Bytes, region: Bytes) -> None:
        self._area = area
        self._region = region
        self._width = area.shape[1]

    @classmethod
    def of_pool(cls, pool: Any) -> ActBytes | None:
        """Return that of a `LayeredPool`; None where its pages are KV only."""
        area = getattr(pool, "acts", None)
        if area is None:
            return None
        pages = area.view(len(area), -1).view(torch.uint8).numpy()
        return cls(pages, pool.act_region.array)

    def load(self, layer: int, region: Bytes, rows: Int64s, act_rows: Int64s) -> None:
        """Copy one layer of rows of another region to rows of ours."""
        self._copy(layer, self._region, act_rows, region, rows)

    def store(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        places: npt.NDArray[np.int32],
        act_rows: Int64s,
    ) -> None:
        """Copy one layer of activations to rows of another region.

        Args:
            layer: which.
            region: uint8 [num_rows, >= page_bytes].
            rows: int64 [n], where they go.
            places: int32 [n], in the act area, or -1 where the host row is to be read.
            act_rows: int64 [n], of our region.
        """
        here, away = places >= 0, places < 0
        offset, width = layer * self._width, self._width
        if here.any():
            from_area = places[here]
            page_copy.copy_rows(
                region, rows[here], offset, self._area, from_area, 0, width
            )
        if away.any():
            self._copy(layer, region, rows[away], self._region, act_rows[away])

    def _copy(
        self, layer: int, dst: Bytes, dst_rows: Int64s, src: Bytes, src_rows: Int64s
    ) -> None:
        offset = layer * self._width
        page_copy.copy_rows(dst, dst_rows, offset, src, src_rows, offset, self._width)


class LayeredDevicePool:
    """A ``DevicePool`` over a `LayeredPool`; work is done when a call returns.

    Args:
        copier: of the pool.
        driver: notes where pages lie.
        layout: shape of a page.
        acts: holds activations; None where pages are KV only.
    """

    def __init__(
        self,
        copier: CpuLayerCopier,
        driver: LayerDriver,
        layout: PageLayout,
        acts: ActBytes | None = None,
    ) -> None:
        self._copier = copier
        self._driver = driver
        self._layout = layout
        self._acts = acts

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    @property
    def waiter_copies(self) -> bool:
        """Copies and forward share the cores."""
        return True

    def mark(self) -> object:
        """Return nothing to wait for: the CPU's forward ends before its results."""
        return None

    def load_layer(
        self,
        layer: int,
        region: Bytes,
        rows: Int64s,
        device_pages: Int64s,
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> None:
        """Copy one layer of pages from rows of ``region`` to where they are to lie."""
        del after, by_waiter
        host_rows = device_pages
        if self._acts is not None:
            noted = self._noted
            host_rows, is_act = noted.rows[device_pages], noted.is_act[device_pages]
            if is_act.any():
                self._acts.load(layer, region, rows[is_act], host_rows[is_act])
                rows, device_pages = rows[~is_act], device_pages[~is_act]
                host_rows = host_rows[~is_act]
        places = self._driver.transfers[layer, device_pages]
        here, away = places >= 0, places < 0
        if here.any():
            self._copier.load(layer, region, rows[here], places[here])
        if away.any():
            self._copier.load_host(layer, region, rows[away], host_rows[away])

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers of pages from where they lie to rows of ``region``."""
        del after
        host_rows = device_pages
        if self._acts is not None:
            noted = self._noted
            host_rows, is_act = noted.rows[device_pages], noted.is_act[device_pages]
            if is_act.any():
                targets, act_rows = rows[is_act], host_rows[is_act]
                for layer in range(self._layout.num_layers):
                    places = noted.places[layer, device_pages[is_act]]
                    self._acts.store(layer, region, targets, places, act_rows)
                rows, device_pages = rows[~is_act], device_pages[~is_act]
                host_rows = host_rows[~is_act]
        for layer in range(self._layout.num_layers):
            places = self._driver.transfers[layer, device_pages]
            here, away = places >= 0, places < 0
            if here.any():
                self._copier.store(layer, region, rows[here], places[here])
            if away.any():
                self._copier.store_host(layer, region, rows[away], host_rows[away])

    @property
    def _noted(self) -> ActTransfers:
        noted = self._driver.act_transfers
        assert noted is not None, "activations without a binding that knows of them"
        return noted


@dataclass(frozen=True, slots=True)
class LayerCopies:
    """Copies of one pool.

    Attributes:
        copier: between its tensor and its host region.
        device_pool: returns, for the driver, what the tiers below copy with.
        close: ends threads of its own.
        acts: copies and rebuilds activations; None where there are none.
    """

    copier: LayerCopier
    device_pool: Callable[[LayerDriver], DevicePool]
    close: Callable[[], None]
    acts: ActCopier | None = None
    weights: WeightSlots | None = None
