"""Stand-ins for the device and for a tier: to be held up, or told to fail."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import FoundPages, TransferResult
from sgl_tiered.tiers.base import TierHealth, TierIO
from sgl_tiered.tiers.checks import check_io, checksum

__all__ = ["FakeDevicePool", "FakeTier"]

UInt8s = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class FakeDevicePool:
    """A ``DevicePool`` of numpy arrays.

    Attributes:
        layers: uint8 [num_layers, num_pages, layer_page_bytes], keys then values.
        gates: one event per layer, set at first; ``load_layer`` waits for it.
        store_gate: the same for ``store_pages``.
        fail_layer: ``load_layer`` of this layer raises; -1 for none.
        fail_store: ``store_pages`` raises while True.
        copies: (layer, number of pages) of each ``load_layer`` that ended.
        waiter_copies: whether the waiting thread copies; set it before the load.
        by_waiter: who called ``load_layer``, one per call.
        store_started: a semaphore, released when a ``store_pages`` begins.
        marks: tokens handed to ``store_pages``.
    """

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self._layout = layout
        self.layers: UInt8s = np.zeros(
            (layout.num_layers, num_pages, layout.layer_page_bytes), np.uint8
        )
        self.gates = [threading.Event() for _ in range(layout.num_layers)]
        self.store_gate = threading.Event()
        self.store_started = threading.Semaphore(0)
        self.open_gates()
        self.fail_layer = -1
        self.fail_store = False
        self.copies: list[tuple[int, int]] = []
        self.waiter_copies = False
        self.by_waiter: list[bool] = []
        self.marks: list[object] = []
        self._num_marks = 0

    @property
    def layout(self) -> PageLayout:
        """Shape of one page."""
        return self._layout

    def open_gates(self) -> None:
        """Let everything pass."""
        for gate in [*self.gates, self.store_gate]:
            gate.set()

    def close_gates(self) -> None:
        """Hold every layer and every store until its gate is set."""
        for gate in [*self.gates, self.store_gate]:
            gate.clear()

    def fill(self, rng: np.random.Generator) -> None:
        """Put random bytes everywhere."""
        self.layers[:] = rng.integers(0, 256, self.layers.shape, np.uint8)

    def page(self, device_page: int) -> UInt8s:
        """Return a page as it lies in a tier: uint8 [page_bytes]."""
        return np.ascontiguousarray(self.layers[:, device_page]).reshape(-1)

    def mark(self) -> object:
        """Return a new number."""
        self._num_marks += 1
        return self._num_marks

    def load_layer(
        self,
        layer: int,
        region: UInt8s,
        rows: Int64s,
        device_pages: Int64s,
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> None:
        """Copy one layer in, once its gate is open."""
        del after
        self.by_waiter.append(by_waiter)
        self.gates[layer].wait()
        if layer == self.fail_layer:
            raise RuntimeError(f"layer {layer} was told to fail")
        begin = self._layout.key_offset(layer)
        end = begin + self._layout.layer_page_bytes
        self.layers[layer, device_pages] = region[rows, begin:end]
        self.copies.append((layer, len(rows)))

    def store_pages(
        self, region: UInt8s, rows: Int64s, device_pages: Int64s, after: object
    ) -> None:
        """Copy all layers out, once the gate is open."""
        self.store_started.release()
        self.store_gate.wait()
        if self.fail_store:
            raise RuntimeError("the store was told to fail")
        self.marks.append(after)
        for row, device_page in zip(rows.tolist(), device_pages.tolist(), strict=True):
            region[row, : self._layout.page_bytes] = self.page(device_page)


class FakeTier:
    """A ``Tier`` in memory whose transfers can be held and which keeps its records.

    Attributes:
        gate: set at first; every load and store waits for it before it ends.
        started: a semaphore, released when a transfer begins: wait for it to know
            that one is under way.
        usable: what ``health`` says.
    """

    def __init__(
        self, slot_bytes: int, num_slots: int, tier_id: TierId = TierId.DISK
    ) -> None:
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._tier_id = tier_id
        self._pages: dict[int, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.usable = True
        self._closed = False

    @property
    def tier_id(self) -> TierId:
        """As given."""
        return self._tier_id

    @property
    def slot_bytes(self) -> int:
        """Bytes set aside for one page."""
        return self._slot_bytes

    @property
    def num_slots(self) -> int:
        """Capacity in pages."""
        return self._num_slots

    def hold(self) -> None:
        """Withhold the end of every transfer until ``release``."""
        self.gate.clear()

    def release(self) -> None:
        """Let all transfers end."""
        self.gate.set()

    def load(self, io: TierIO) -> TransferResult:
        """Read pages, once the gate is open; one never stored is not ok."""
        check_io(io, self._num_slots, self._slot_bytes)
        self.started.release()
        self.gate.wait()
        ok = np.zeros(len(io.addresses), np.bool_)
        sums = np.zeros(len(io.addresses), np.uint64)
        for i, (address, row) in enumerate(zip(io.addresses, io.rows, strict=True)):
            page = self._pages.get(int(address))
            if page is None:
                continue
            sums[i] = checksum(page)
            wanted = sums[i] if io.records is None else io.records.checksums[i]
            ok[i] = wanted in (0, sums[i])
            io.buffer[row, : self._slot_bytes] = np.frombuffer(page, np.uint8)
        return self._result(ok, sums)

    def store(self, io: TierIO) -> TransferResult:
        """Write pages, once the gate is open."""
        check_io(io, self._num_slots, self._slot_bytes)
        self.started.release()
        self.gate.wait()
        sums = np.zeros(len(io.addresses), np.uint64)
        for i, (address, row) in enumerate(zip(io.addresses, io.rows, strict=True)):
            page = io.buffer[row, : self._slot_bytes].tobytes()
            self._pages[int(address)] = page
            sums[i] = checksum(page)
        return self._result(np.ones(len(sums), np.bool_), sums)

    def recover(self) -> FoundPages:
        """Return nothing."""
        return FoundPages.of([])

    def holds(self, addresses: Int64s) -> npt.NDArray[np.bool_]:
        """Return where pages are."""
        return np.array([int(a) in self._pages for a in addresses], np.bool_)

    def forget(self, addresses: Int64s) -> None:
        """Drop the pages."""
        for address in addresses.tolist():
            self._pages.pop(address, None)

    def health(self) -> TierHealth:
        """Return what ``usable`` says."""
        return TierHealth(usable=self.usable and not self._closed)

    def close(self) -> None:
        """Let everybody go."""
        self._closed = True
        self.gate.set()

    def _result(
        self, ok: npt.NDArray[np.bool_], sums: npt.NDArray[np.uint64]
    ) -> TransferResult:
        num_ok = int(ok.sum())
        return TransferResult(
            ok=ok,
            num_bytes=num_ok * self._slot_bytes,
            seconds=0.0,
            checksums=sums,
            error="" if num_ok == len(ok) else f"{len(ok) - num_ok} pages are not ok",
        )
