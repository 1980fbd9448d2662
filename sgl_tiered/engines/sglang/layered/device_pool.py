"""The device as the tiers below see it, where layers are placed one by one.

They go on to know logical pages. Where a page's layers lie is noted on the engine's
thread before a transfer begins and holds until it has ended: on the device, or in the
host region, which is copied to and from like a device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.copier import CpuLayerCopier
from sgl_tiered.engines.sglang.layered.driver import LayerDriver

__all__ = ["LayeredDevicePool"]

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class LayeredDevicePool:
    """A ``DevicePool`` over a `LayeredPool`; work is done when a call returns.

    Args:
        copier: of the pool.
        driver: notes where pages lie.
        layout: shape of a page.
    """

    def __init__(
        self, copier: CpuLayerCopier, driver: LayerDriver, layout: PageLayout
    ) -> None:
        self._copier = copier
        self._driver = driver
        self._layout = layout

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
        places = self._driver.transfers[layer, device_pages]
        here, away = places >= 0, places < 0
        if here.any():
            self._copier.load(layer, region, rows[here], places[here])
        if away.any():
            self._copier.load_host(layer, region, rows[away], device_pages[away])

    def store_pages(
        self, region: Bytes, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers of pages from where they lie to rows of ``region``."""
        del after
        for layer in range(self._layout.num_layers):
            places = self._driver.transfers[layer, device_pages]
            here, away = places >= 0, places < 0
            if here.any():
                self._copier.store(layer, region, rows[here], places[here])
            if away.any():
                self._copier.store_host(layer, region, rows[away], device_pages[away])
