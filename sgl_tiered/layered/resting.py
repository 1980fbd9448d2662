"""What is asked of layers between forwards, and by the tiers below.

One thread, the engine's. Pages are logical unless called physical.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.layered.activations import Activations
from sgl_tiered.layered.base import ActChooser, LayerReport, LayerRoom
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.passes import Forward, LostRows
from sgl_tiered.layered.requests import RequestBook, RequestRecord
from sgl_tiered.layered.room import RoomMaker
from sgl_tiered.layered.units import layer_pages_needed

__all__ = ["RestingLayers"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Sample = tuple[int, float]


class RestingLayers:
    """Layer-wise KV of one rank.

    Args:
        binding: the table, with nothing in it.
        mover: copies.
        page_tokens: tokens in one page.
        half_pages: layer-pages of each half of the staging room, at least the pages of
            the longest request of which any layer may leave the device.
        lazy: a copy that is on the host as well leaves the device when its room is
            needed; if False, at once.
        choose: which new pages are kept as activations; None for none of them. Asked
            where the binding has room for activations.

    Attributes:
        stall_s: seconds that forwards have waited for copies, all together.
        bytes_streamed: that they have staged.
        rebuild_s: seconds of computing KV for their reads from activations.
        rebuild_exposed_s: of these, after all that a unit loads had landed.
        num_rebuilt: layer-pages that this made.
        on_measured: told at the end of each forward of a rebuild and of a load of KV of
            a layer, in the mean: tokens and seconds, or None where there was none.

    Raises:
        ValueError: no room is left beside the staging ones; the mover and the binding
            do not agree on activations.
    """

    def __init__(
        self,
        binding: LayerBinding,
        mover: LayerMover,
        page_tokens: int,
        half_pages: int,
        *,
        lazy: bool = True,
        choose: ActChooser | None = None,
    ) -> None:
        if page_tokens < 1 or half_pages < 1:
            raise ValueError(f"pages of {page_tokens} tokens, halves of {half_pages}")
        if 2 * half_pages >= binding.num_physical:
            raise ValueError(
                f"two halves of {half_pages} leave nothing of {binding.num_physical}"
            )
        act_bytes = 0 if binding.plan is None else binding.plan.act_layer_page_bytes
        if act_bytes != mover.act_page_bytes:
            raise ValueError(
                f"activations of {act_bytes} B, moved as {mover.act_page_bytes} B"
            )
        self._binding = binding
        self._mover = mover
        self._page_tokens = page_tokens
        self._lazy = lazy
        self._halves = (binding.set_aside(half_pages), binding.set_aside(half_pages))
        self._book = RequestBook(binding)
        self._room = RoomMaker(binding, self._book, mover)
        self._acts: Activations | None = None
        if binding.kinds is not None and binding.plan is not None:
            self._acts = Activations(
                binding,
                binding.kinds,
                binding.plan,
                self._room,
                mover,
                page_tokens,
                choose or _all_kv,
            )
        self._forward: Forward | None = None
        self._lost: LostRows | None = None
        self._num_passes = 0
        self.stall_s = 0.0
        self.bytes_streamed = 0
        self.rebuild_s = 0.0
        self.rebuild_exposed_s = 0.0
        self.num_rebuilt = 0
        self.on_measured: Callable[[Sample | None, Sample | None], None] | None = None

    @property
    def binding(self) -> LayerBinding:
        """The table; to be read only."""
        return self._binding

    @property
    def clock(self) -> Clock:
        """By which stalls are measured."""
        return self._mover.clock

    @property
    def max_context_pages(self) -> int:
        """The longest request of which any layer may leave the device, in pages."""
        return len(self._halves[0])

    @property
    def is_idle(self) -> bool:
        """True while no copy to or from the host is under way."""
        return self._forward is None and self._mover.num_flights == 0

    # -- between forwards ------------------------------------------------------------

    def room(self) -> LayerRoom:
        """Return the physical layer-pages by what they are used for; O(all of them)."""
        facts = self._room.facts()
        staging = 2 * self.max_context_pages
        return LayerRoom(
            facts.free, facts.spare, facts.landing, facts.cached, facts.total - staging
        )

    def needed(
        self, num_context: int, num_new: int, retained: Bools | None = None
    ) -> int:
        """Return the layer-pages that a forward takes for a request.

        Args:
            num_context: tokens that have KV.
            num_new: tokens to be computed.
            retained: bool [num_layers]; None for all.
        """
        if retained is None:
            retained = np.ones(self._binding.num_layers, np.bool_)
        return layer_pages_needed(num_context, num_new, retained, self._page_tokens)

    def num_rowless(self, num_pages: int) -> int:
        """Return how many of so many new pages would stay on the device, in all layers.

        They lack a row of KV, and a row or the places to be activations.

        Args:
            num_pages: that the next forward begins, all requests together; full ones.
        """
        return 0 if self._acts is None else self._acts.num_rowless(num_pages)

    def poll(self) -> None:
        """Take note of copies that have ended; start again what failed."""
        assert self._forward is None, "polled during a forward"
        self._room.collect()
        self._room.retry()
        self._drop_eagerly()

    def finished(self, key: Hashable) -> LayerReport:
        """Forget a request: it has ended, or will be computed anew.

        Its pages stay, as cached ones, until they are freed.
        """
        assert self._forward is None, "finished during a forward"
        if key not in self._book:
            return self._unknown()
        self._room.collect()
        record = self._book.remove(key)
        return self._report(record)

    def freed(self, pages: npt.ArrayLike) -> None:
        """Take back all that these pages have; whoever used them does no more.

        Args:
            pages: int [n], each once.
        """
        assert self._forward is None, "freed during a forward"
        gone = np.asarray(pages, np.int64)
        if not len(gone):
            return
        self._room.collect()
        self._book.forget(gone)
        self._binding.forget(gone)
        epoch = self._binding.epoch
        self._mover.call_off(
            lambda flight: not np.any(epoch[flight.pages] == flight.epochs)
        )

    def held(self, key: Hashable) -> Bools:
        """Return bool [num_layers], the layers that a request wants on the device."""
        if key not in self._book:
            return np.ones(self._binding.num_layers, np.bool_)
        return self._book[key].retained.copy()

    def num_held(self, keys: Sequence[Hashable]) -> list[int]:
        """Return how many layers each request wants on the device; see ``held``."""
        book, num_layers = self._book, self._binding.num_layers
        return [book[k].num_retained if k in book else num_layers for k in keys]

    def away(self, keys: Sequence[Hashable]) -> Int64s:
        """Return int64 [n], the layer-pages of each that are on the host only."""
        counts = np.zeros(len(keys), np.int64)
        for n, key in enumerate(keys):
            if key in self._book:
                pages = self._book.live_pages(self._book[key])
                away = self._binding.on_host[:, pages]
                counts[n] = np.count_nonzero(
                    away & (self._binding.device[:, pages] < 0)
                )
        return counts

    def release(self, key: Hashable, layers: Bools) -> int:
        """Keep these layers no longer: they go to the host, in the background.

        Returns:
            Layer-pages that can leave the device, now or once they are on the host.
        """
        record = self._book[key]
        self._book.retain(record, record.retained & ~layers)
        pages = self._full_pages(record)
        self._room.offload(layers, pages)
        can_go = (self._binding.device[:, pages] >= 0) & layers[:, None]
        can_go &= self._book.keep[:, pages] == 0
        can_go &= ~self._binding.rowless[pages]
        self._drop_eagerly()
        return int(np.count_nonzero(can_go))

    def hold(self, key: Hashable, layers: Bools) -> int:
        """Keep these layers from now on.

        Returns:
            Layer-pages of them that are on the host only: see ``pull``.
        """
        record = self._book[key]
        self._book.retain(record, record.retained | layers)
        away = self._binding.device[:, self._book.live_pages(record)] < 0
        return int(np.count_nonzero(away & layers[:, None]))

    def missing(self, key: Hashable) -> int:
        """Return the layer-pages of held layers that ``pull`` could queue now."""
        record = self._book[key]
        pages = self._full_pages(record)
        binding = self._binding
        away = (binding.device[:, pages] < 0) & ~binding.copying[:, pages]
        return int(np.count_nonzero(away[record.retained]))

    def pull(self, key: Hashable, max_layer_pages: int | None = None) -> int:
        """Bring held layers back, as far as room is free or cached copies can go.

        Returns:
            Layer-pages whose copy was queued.
        """
        self._room.collect()
        record = self._book[key]
        most = (
            self._binding.num_physical if max_layer_pages is None else max_layer_pages
        )
        return self._room.pull(record.retained, self._full_pages(record), most)

    def push(self, max_layer_pages: int) -> int:
        """Copy cached pages to the host, coldest first, so that ``pull`` finds room.

        Returns:
            Layer-pages whose copy was queued.
        """
        return self._room.push(max_layer_pages) if max_layer_pages > 0 else 0

    def failures(self) -> dict[str, int]:
        """Return how many attempts to copy have failed, and how many outages began."""
        down, up = self._mover.to_host, self._mover.to_device
        return {
            "failed_to_host": down.num_failed,
            "failed_to_device": up.num_failed,
            "outages": down.num_outages + up.num_outages,
        }

    def report(self, key: Hashable) -> LayerReport:
        """Return what became of a request's layers so far."""
        if key not in self._book:
            return self._unknown()
        return self._report(self._book[key])

    # -- tiers below ------------------------------------------------------------------

    def pin(self, pages: Int64s) -> None:
        """Keep the device copies of pages where they are until ``unpin``."""
        np.add.at(self._binding.pinned, pages, 1)

    def unpin(self, pages: Int64s) -> None:
        """Take back one ``pin``."""
        np.subtract.at(self._binding.pinned, pages, 1)

    def where(self, layer: int, pages: Int64s) -> Int32s:
        """Return int32 [n], physical layer-pages; -1 for the host row."""
        places: Int32s = self._binding.device[layer][pages]
        return places

    def open_load(
        self,
        pages: Int64s,
        retained: Bools | None = None,
        is_act: Bools | None = None,
    ) -> bool:
        """Give pages that a tier will fill a place; False if there is no room.

        Layers that are not retained are to be written to the host rows: ``where``. All
        layers of activations are to be: what is retained comes with ``pull``. A tier's
        page has one kind only, so without rows of it there is no room.
        Ends with ``close_load``.

        Args:
            pages: int64 [n], without KV, each once.
            retained: bool [num_layers]; None for all.
            is_act: bool [n], which arrive as activations; None for none of them.
        """
        assert self._forward is None, "a load was opened during a forward"
        binding = self._binding
        pages = np.asarray(pages, np.int64)
        layers = retained
        if layers is None:
            layers = np.ones(binding.num_layers, np.bool_)
        self._room.collect()
        self._clear(pages)
        missing = (binding.device[:, pages] < 0) & layers[:, None]
        kinds = binding.kinds
        if kinds is None:
            assert is_act is None or not np.any(is_act), "no rows of activations"
        else:
            if is_act is None:
                is_act = np.zeros(len(pages), np.bool_)
            is_act = np.asarray(is_act, np.bool_)
            kv_rows, act_rows = kinds.num_free_rows
            num_acts = int(np.count_nonzero(is_act))
            if num_acts > act_rows or len(pages) - num_acts > kv_rows:
                return False
            missing &= ~is_act
        if not self._room.make(int(np.count_nonzero(missing))):
            return False
        if kinds is not None and is_act is not None:
            binding.unbind(pages[is_act])
            binding.new_kinds(pages, is_act)
        found, where = missing.nonzero()
        binding.bind(found, pages[where])
        return True

    def close_load(self, pages: Int64s, ok: bool) -> None:
        """Note that a load has ended: the pages have KV in all layers, or in none."""
        if not ok:
            return
        pages = np.asarray(pages, np.int64)
        bound = self._binding.device[:, pages] >= 0
        layers, where = bound.nonzero()
        self._binding.written(layers, pages[where])
        layers, where = (~bound).nonzero()
        self._binding.written_to_host(layers, pages[where])
        self._binding.completed(pages)

    def _report(self, record: RequestRecord) -> LayerReport:
        return record.report(self._mover.layer_page_bytes, self._mover.act_page_bytes)

    def _unknown(self) -> LayerReport:
        num_layers = self._binding.num_layers
        return LayerReport(num_layers, num_layers, 0, 0, 0, 0.0, 0)

    def _full_pages(self, record: RequestRecord) -> Int64s:
        num_full = record.num_tokens // self._page_tokens
        return self._book.live_pages(record, num_full)

    def _clear(self, pages: Int64s) -> None:
        """Wait for copies that still use these pages, and forget their KV."""
        if not len(pages):
            return
        self._room.settle(pages)
        if self._binding.filled[:, pages].any():
            self._binding.void(pages)
            # The epoch stays: what was to be sent of them is not what comes next.
            self._room.forget_due(pages)
        if self._acts is not None:
            self._binding.no_kinds(pages)

    def _drop_eagerly(self) -> None:
        if not self._lazy:
            self._room.drop(self._binding.num_physical)
            if self._binding.kinds is not None:
                self._room.drop_acts(len(self._binding.kinds.places))


def _all_kv(_num_act: int, _num_kv: int, num_new: int) -> Bools:
    return np.zeros(num_new, np.bool_)
