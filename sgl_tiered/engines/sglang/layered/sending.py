"""Where the KV of pages lies that a prefill server sends to a decode server.

A layer of a page is sent from its host row where that is valid, which it stays for as
long as SGLang keeps the page, and else from its place on the device. What is sent from
there is pinned until the push has ended: like what an offload to a tier reads. So no
layer is brought back for a transfer, and none waits for its copy to the host.

What a request waits for is noted on the scheduler's thread; the threads that push ask
for addresses, and say when they have ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.engines.sglang.layered.driver import LayerDriver

__all__ = ["LayerSources", "SentPages"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
_HOST, _NOWHERE = -1, -2


class SentPages(np.ndarray):
    """Logical pages, int32 [n], that know which sending they are of."""

    number: int = 0

    def __array_finalize__(self, made_from: object) -> None:
        """Keep the number in what is cut out of it."""
        self.number = getattr(made_from, "number", 0)


class LayerSources:
    """Sources of one pool's transfers.

    Args:
        pool: a `LayeredPool` whose pages are all KV.
        driver: of it.

    Attributes:
        region: address and bytes of the host region, beside SGLang's own buffers.
        num_host_bytes, num_device_bytes: sent from either so far.
    """

    def __init__(self, pool: Any, driver: LayerDriver) -> None:
        layout = driver.plan.layout
        rows = pool.region.array
        self.region = (int(rows.ctypes.data), int(rows.nbytes))
        self.part_bytes = layout.part_bytes
        self.num_host_bytes = 0
        self.num_device_bytes = 0
        self._driver = driver
        self._device = (pool.k_buffer[0].data_ptr(), pool.v_buffer[0].data_ptr())
        self._row_bytes = int(rows.strides[0])
        layers = range(layout.num_layers)
        self._offsets = tuple(
            np.array([[offset(layer)] for layer in layers], np.int64)
            for offset in (layout.key_offset, layout.value_offset)
        )
        shape = (layout.num_layers, driver.plan.num_pages + 1)
        self._places: Int32s = np.full(shape, _NOWHERE, np.int32)
        self._rooms: dict[int, list[int]] = {}
        self._pinned: dict[int, Int64s] = {}
        self._ended: deque[int] = deque()
        self._num_begun = 0
        driver.on_freed = self.freed

    # -- The scheduler's thread ------------------------------------------------

    def begin(self, room: int, pages: npt.NDArray[np.integer]) -> SentPages:
        """Note where pages lie, and keep what is on the device where it is.

        Args:
            room: of the transfer.
            pages: int [n], logical, each once.
        """
        manager = self._driver.manager
        self.collect()
        manager.poll()
        binding, logical = manager.binding, pages.astype(np.int64)
        device = binding.device[:, logical]
        is_here = binding.filled[:, logical] & (device >= 0)
        places = np.where(is_here, device, _NOWHERE)
        places[binding.on_host[:, logical]] = _HOST
        self._places[:, logical] = places
        self._num_begun += 1
        number = -self._num_begun
        here = logical[(places >= 0).any(axis=0)]
        if len(here):
            # Numbers of offloads are positive.
            self._driver.begin_store(number, here)
            self._pinned[number] = here
            self._rooms.setdefault(room, []).append(number)
        sent = pages.view(SentPages)
        sent.number = number
        return sent

    def collect(self) -> None:
        """Take note of pushes that have ended."""
        while self._ended:
            self._unpin(self._ended.popleft())

    def end(self, room: int) -> None:
        """Note that a transfer is over, however it ended."""
        for number in self._rooms.pop(room, ()):
            self._unpin(number)

    def freed(self, pages: Int64s) -> None:
        """Note that SGLang gives pages up: nobody waits for what is sent of them."""
        self.collect()
        for number, pinned in list(self._pinned.items()):
            if np.isin(pinned, pages).any():
                self._unpin(number)

    def _unpin(self, number: int) -> None:
        if self._pinned.pop(number, None) is not None:
            self._driver.end_store(number)

    # -- Threads that push -----------------------------------------------------

    def addresses(self, pages: npt.NDArray[np.integer]) -> Int64s | None:
        """Return where keys and values of pages begin, int64 [2, num_layers, n].

        None where a layer of a page is nowhere: then nothing may be sent.
        """
        places = self._places[:, pages].astype(np.int64)
        if (places == _NOWHERE).any():
            return None
        rows = self.region[0] + np.asarray(pages, np.int64) * self._row_bytes
        return np.stack(
            [
                np.where(places < 0, rows + offsets, base + places * self.part_bytes)
                for base, offsets in zip(self._device, self._offsets, strict=True)
            ]
        )

    def sent(self, pages: npt.NDArray[np.integer], num_from_host: int) -> None:
        """Note the end of a push, whichever it was.

        Args:
            pages: as ``begin`` returned them, or the first of them.
            num_from_host: bytes that came from host rows; below 0 where it failed.
        """
        if num_from_host >= 0:
            total = 2 * len(self._places) * len(pages) * self.part_bytes
            self.num_host_bytes += num_from_host
            self.num_device_bytes += total - num_from_host
        number = getattr(pages, "number", 0)
        if number:
            self._ended.append(number)

    def num_from_host(self, addresses: Int64s) -> int:
        """Return how many bytes of pushes from addresses come from host rows."""
        begin, size = self.region
        is_host = (addresses >= begin) & (addresses < begin + size)
        return int(np.count_nonzero(is_host)) * self.part_bytes
