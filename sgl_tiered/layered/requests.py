"""Who uses which logical page, and wants which of its layers kept on the device.

Two requests that share a page may retain different layers: a layer-page is kept while
anybody who uses it wants it kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import LayerReport, PassRequest
from sgl_tiered.layered.binding import LayerBinding

__all__ = ["RequestBook", "RequestRecord"]

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, from its first forward to ``finished``.

    Attributes:
        key: its name.
        serial: counts requests; higher is more recent.
        retained: bool [num_layers], kept on the device.
        pages: int64 [n], logical, in order.
        epochs: uint32 [n], of the pages when they were noted.
        num_tokens: that have KV.
        num_retained: layers that are kept now.
        fewest_layers: that ever were.
        layer_pages_streamed, layer_pages_offloaded, layer_pages_pulled: of KV.
        acts_streamed, acts_offloaded, acts_pulled: layer-pages of activations that
            crossed the link.
        unsent: layer-pages of KV that would have crossed it, and did not.
    """

    key: Hashable
    serial: int
    retained: Bools
    pages: Int64s
    epochs: npt.NDArray[np.uint32]
    num_tokens: int = 0
    num_retained: int = field(init=False)
    fewest_layers: int = field(init=False)
    layer_pages_streamed: int = 0
    layer_pages_offloaded: int = 0
    layer_pages_pulled: int = 0
    acts_streamed: int = 0
    acts_offloaded: int = 0
    acts_pulled: int = 0
    unsent: int = 0
    num_act_pages: int = 0
    num_kv_pages: int = 0
    rebuild_s: float = 0.0
    rebuild_exposed_s: float = 0.0
    stall_s: float = 0.0
    num_passes: int = 0

    def __post_init__(self) -> None:
        self.num_retained = int(np.count_nonzero(self.retained))
        self.fewest_layers = self.num_retained

    def report(self, kv_bytes: int, act_bytes: int) -> LayerReport:
        """Return what became of its layers so far.

        Args:
            kv_bytes: of a layer-page of KV.
            act_bytes: of one of activations.
        """
        acts = self.acts_streamed + self.acts_offloaded + self.acts_pulled
        return LayerReport(
            layers_retained=self.fewest_layers,
            num_layers=len(self.retained),
            bytes_streamed=_bytes(
                self.layer_pages_streamed, kv_bytes, self.acts_streamed, act_bytes
            ),
            bytes_offloaded=_bytes(
                self.layer_pages_offloaded, kv_bytes, self.acts_offloaded, act_bytes
            ),
            bytes_pulled=_bytes(
                self.layer_pages_pulled, kv_bytes, self.acts_pulled, act_bytes
            ),
            stall_s=self.stall_s,
            num_passes=self.num_passes,
            num_act_pages=self.num_act_pages,
            num_kv_pages=self.num_kv_pages,
            bytes_saved=self.unsent * kv_bytes - acts * act_bytes,
            rebuild_s=self.rebuild_s,
            rebuild_exposed_s=self.rebuild_exposed_s,
        )


class RequestBook:
    """All requests that run or are paused.

    Attributes:
        users: int16 [num_pages], requests that use a page.
        keep: int16 [num_layers, num_pages], requests that want it on the device.
        last_used: int64 [num_pages], number of the last forward that read it.
        owner: int64 [num_pages], serial of the last request that noted it.
    """

    def __init__(self, binding: LayerBinding) -> None:
        self._binding = binding
        self.users = np.zeros(binding.num_pages, np.int16)
        self.keep = np.zeros(binding.device.shape, np.int16)
        self.last_used = np.zeros(binding.num_pages, np.int64)
        self.owner = np.zeros(binding.num_pages, np.int64)
        self._records: dict[Hashable, RequestRecord] = {}
        self._by_serial: dict[int, RequestRecord] = {}
        self._num_seen = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._records

    def __getitem__(self, key: Hashable) -> RequestRecord:
        return self._records[key]

    def by_serial(self, serial: int) -> RequestRecord | None:
        """Return a request that is not finished."""
        return self._by_serial.get(serial)

    def retained(self, request: PassRequest) -> Bools:
        """Return bool [num_layers], what it wants kept if it runs now."""
        if request.retained is not None:
            return request.retained
        if request.key in self._records:
            return self._records[request.key].retained
        return np.ones(self._binding.num_layers, np.bool_)

    def note(self, request: PassRequest) -> RequestRecord:
        """Take note of a request's pages and layers as they are now."""
        retained = self.retained(request)
        record = self._records.get(request.key)
        if record is None:
            self._num_seen += 1
            nothing = np.zeros(0, np.int64)
            record = RequestRecord(
                request.key,
                self._num_seen,
                retained.copy(),
                nothing,
                nothing.astype(np.uint32),
            )
            self._records[request.key] = record
            self._by_serial[record.serial] = record
        elif not np.array_equal(retained, record.retained):
            self.retain(record, retained)
        self._turn_to(record, np.asarray(request.pages, np.int64))
        return record

    def live_pages(self, record: RequestRecord, count: int | None = None) -> Int64s:
        """Return int64 [n], those of a request's first ``count`` pages it still has.

        After its last forward the tree may have given it others for what somebody else
        had computed. Those freed then may hold another request's tokens by now.
        """
        pages: Int64s = record.pages[:count][self._live(record)[:count]]
        return pages

    def retain(self, record: RequestRecord, retained: Bools) -> None:
        """Change the layers that a request wants kept."""
        live = self.live_pages(record)
        self._add(live, retained & ~record.retained, 1)
        self._add(live, record.retained & ~retained, -1)
        record.retained = retained.copy()
        record.num_retained = int(np.count_nonzero(retained))
        record.fewest_layers = min(record.fewest_layers, record.num_retained)

    def remove(self, key: Hashable) -> RequestRecord:
        """Forget a request; its pages stay."""
        record = self._records.pop(key)
        del self._by_serial[record.serial]
        self._leave(record)
        return record

    def forget(self, pages: Int64s) -> None:
        """Nobody uses these pages any more; before the binding forgets them."""
        self.users[pages] = 0
        self.keep[:, pages] = 0

    def check(self) -> None:
        """Assert that the counts are those of the records; for tests."""
        users = np.zeros_like(self.users)
        keep = np.zeros_like(self.keep)
        for record in self._records.values():
            live = self.live_pages(record)
            np.add.at(users, live, 1)
            keep[np.ix_(record.retained, live)] += 1
        assert np.array_equal(users, self.users), "users are miscounted"
        assert np.array_equal(keep, self.keep), "kept layers are miscounted"

    def _turn_to(self, record: RequestRecord, pages: Int64s) -> None:
        num_old = len(record.pages)
        grew = (
            len(pages) >= num_old
            and np.array_equal(pages[:num_old], record.pages)
            and bool(self._live(record).all())
        )
        if not grew:
            # The tree may have given it other pages for what somebody else computed.
            self._leave(record)
            num_old = 0
        added = pages[num_old:]
        if not len(added) and grew:
            return
        self.users[added] += 1
        self._add(added, record.retained, 1)
        self.owner[added] = record.serial
        record.pages = pages.copy()
        record.epochs = self._binding.epoch[pages]

    def _leave(self, record: RequestRecord) -> None:
        live = self.live_pages(record)
        self.users[live] -= 1
        self._add(live, record.retained, -1)

    def _live(self, record: RequestRecord) -> Bools:
        live: Bools = self._binding.epoch[record.pages] == record.epochs
        return live

    def _add(self, pages: Int64s, layers: Bools, count: int) -> None:
        if layers.all():
            self.keep[:, pages] += count
        elif layers.any():
            self.keep[np.ix_(layers, pages)] += count


def _bytes(num_kv: int, kv_bytes: int, num_acts: int, act_bytes: int) -> int:
    return num_kv * kv_bytes + num_acts * act_bytes
