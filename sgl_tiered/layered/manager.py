"""What the engine calls: KV of which each layer is on the device or on the host.

It guarantees that a forward finds every layer that it reads, and room for every layer
that it writes. It decides nothing: which layers a request keeps, who decodes and what
leaves under pressure are decisions of ``policies/layers``, handed in as ``retained``,
``release``, ``hold`` and ``pull``.

A layer that is not kept goes to the host as soon as it is written; its copy on the
device stays until the room is needed (``lazy``) and is read in place until then.

One thread, the engine's. Pages are logical unless called physical.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.layered.base import (
    LayerReadError,
    LayerReport,
    LayerRoom,
    LayerRoomError,
    PassPlan,
    PassRequest,
)
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.passes import Batch, Forward, LostRows, Needs
from sgl_tiered.layered.requests import RequestBook, RequestRecord
from sgl_tiered.layered.room import RoomMaker
from sgl_tiered.layered.units import layer_pages_needed, plan_reads

__all__ = ["LayerManager"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class LayerManager:
    """Layer-wise KV of one rank.

    Args:
        binding: the table, with nothing in it.
        mover: copies.
        page_tokens: tokens in one page.
        half_pages: layer-pages of each half of the staging room, at least the pages of
            the longest request of which any layer may leave the device.
        lazy: a copy that is on the host as well leaves the device when its room is
            needed; if False, at once.

    Attributes:
        stall_s: seconds that forwards have waited for copies, all together.
        bytes_streamed: that they have staged.

    Raises:
        ValueError: no room is left beside the staging ones.
    """

    def __init__(
        self,
        binding: LayerBinding,
        mover: LayerMover,
        page_tokens: int,
        half_pages: int,
        *,
        lazy: bool = True,
    ) -> None:
        if page_tokens < 1 or half_pages < 1:
            raise ValueError(f"pages of {page_tokens} tokens, halves of {half_pages}")
        if 2 * half_pages >= binding.num_physical:
            raise ValueError(
                f"two halves of {half_pages} leave nothing of {binding.num_physical}"
            )
        self._binding = binding
        self._mover = mover
        self._page_tokens = page_tokens
        self._lazy = lazy
        self._halves = (binding.set_aside(half_pages), binding.set_aside(half_pages))
        self._book = RequestBook(binding)
        self._room = RoomMaker(binding, self._book, mover)
        self._forward: Forward | None = None
        self._lost: LostRows | None = None
        self._num_passes = 0
        self.stall_s = 0.0
        self.bytes_streamed = 0

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
        return record.report(self._mover.layer_page_bytes)

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
        return self._book[key].report(self._mover.layer_page_bytes)

    # -- a forward ------------------------------------------------------------------

    def begin_pass(self, requests: Sequence[PassRequest]) -> PassPlan:
        """Make room for a forward and start bringing what it reads.

        Blocks where room comes only with copies under way. Ends with ``end_pass``.

        Returns:
            The plan; if it refuses requests, nothing has begun.
        """
        assert self._forward is None, "the last forward was not ended"
        self._lost = None
        if any(one.is_lost for one in requests):
            lost = LostRows(requests, self._binding.padding)
            plan = lost.plan(self._begin(lost.live))
            self._lost = lost
            return plan
        return self._begin(requests)

    def _begin(self, requests: Sequence[PassRequest]) -> PassPlan:
        started_s = self._mover.clock.now()
        batch = self._batch(requests)
        self._room.collect()
        self._room.retry()
        self._clear(batch.new_pages)
        strangers = [one.key for one in requests if one.key not in self._book]
        records = tuple(self._book.note(one) for one in requests)
        needs = self._needs(batch)
        if not self._room.make(needs.num_at_once + needs.num_passing):
            refused = _greedy(needs, self._binding.num_free)
            return self._refuse(batch, strangers, refused or (len(requests) - 1,))
        # From here on nothing of the batch leaves the device before it was read.
        self._enter(batch)
        bound, staged = batch.staged(self._binding)
        too_long = batch.excess(staged)
        if too_long.any():
            reserve = needs.num_at_once + needs.num_passing
            if not self._bring_back(batch.pages[too_long & ~batch.is_new], reserve):
                self._leave(batch)
                refused = np.unique(batch.request_of[too_long]).tolist()
                return self._refuse(batch, strangers, tuple(refused))
            bound, staged = batch.staged(self._binding)
        self._bind_missing(batch, needs)
        bound[:, batch.new] = self._binding.device[:, batch.new_pages]
        reads = plan_reads(bound, staged, batch.pages, batch.indptr, self._halves)
        self._num_passes += 1
        self._book.last_used[batch.pages] = self._num_passes
        self._forward = Forward(
            batch,
            records,
            reads,
            self._mover.stream(reads.units),
            needs.passing,
            [bool(one.any()) for one in needs.passing],
            self._mover.clock.now() - started_s,
        )
        for record, count in zip(records, _per_request(batch, staged), strict=True):
            record.layer_pages_streamed += int(count)
        staged_pages = sum(len(unit.rows) for unit in reads.units)
        self.bytes_streamed += staged_pages * self._mover.layer_page_bytes
        return PassPlan((), reads.groups, batch.indptr, len(reads.units))

    def pages_for_write(self, layer: int, pages: npt.NDArray[np.integer]) -> Int32s:
        """Return the physical layer-pages that a layer's KV is written to.

        Called once per layer, in order, before it is written.

        Args:
            layer: which; the attention of earlier ones is queued.
            pages: int, any shape; logical pages of the batch.

        Returns:
            int32, of the same shape.

        Raises:
            LayerRoomError: copies to the host failed, so that earlier layers still
                take the room.
        """
        forward = self._running()
        self._room.layer = layer
        if forward.is_passing[layer]:
            self._bind_passing(forward, layer)
        places: Int32s = self._binding.device[layer][pages]
        return places if self._lost is None else self._lost.places(pages, places)

    def layer_written(self, layer: int) -> None:
        """Note that a layer's KV is queued to be written: what is not kept leaves."""
        forward = self._running()
        batch = forward.batch
        self._binding.written(layer, batch.written_pages)
        if len(batch.passing_pages):
            self._room.offload(self._only(layer), batch.passing_pages)

    def table(self, layer: int) -> Int32s:
        """Return int32 [n], where each page of the batch is read in a layer.

        The requests' pages one after the other, as ``PassPlan.indptr`` says. Valid
        from ``wait_unit`` of a group to its ``unit_done``.
        """
        table: Int32s = self._running().reads.table[layer]
        return table if self._lost is None else self._lost.table(table)

    def wait_unit(self, layer: int, group: int) -> float:
        """Block until a layer of a group can be read; return the seconds waited.

        Raises:
            LayerReadError: it could not be brought; the forward has to be ended.
        """
        forward = self._running()
        index = int(forward.reads.unit_of[layer, group])
        if index < 0:
            return 0.0
        started_s = self._mover.clock.now()
        try:
            forward.stream.wait(index)
        except Exception as error:
            keys = forward.readers(index)
            raise LayerReadError(layer, keys, str(error)) from error
        stall_s = self._mover.clock.now() - started_s
        forward.stall_s += stall_s
        return stall_s

    def unit_done(self, layer: int, group: int) -> None:
        """Note that all that reads a layer of a group is queued."""
        forward = self._running()
        index = int(forward.reads.unit_of[layer, group])
        if index >= 0:
            forward.stream.done(index)

    def end_pass(self, ok: bool = True) -> None:
        """End the forward; to be called however it ended.

        Args:
            ok: every layer was written. If not, its new tokens have no KV, and what
                the requests had before is as it was.

        Raises:
            LayerReadError: a queued copy turned out to have failed; the forward has
                ended as if not ``ok``.
        """
        forward = self._running()
        self._forward = None
        batch = forward.batch
        forward.stall_s += forward.stream.end()
        self.stall_s += forward.stall_s
        failed = forward.stream.failed if ok else {}
        ok = ok and not failed
        self._leave(batch)
        self._room.collect()
        for record, request in zip(forward.records, batch.requests, strict=True):
            record.stall_s += forward.stall_s
            record.num_passes += 1
            if ok:
                record.num_tokens = request.num_context + request.num_new
            else:
                record.num_tokens = request.num_context
        if ok:
            self._binding.completed(batch.pages[batch.is_written & batch.is_full])
            if len(batch.completed_pages):
                everywhere = np.ones(self._binding.num_layers, np.bool_)
                self._room.offload(everywhere, batch.completed_pages)
        else:
            self._clear(batch.new_pages)
        self._drop_eagerly()
        for index, reason in failed.items():
            unit = forward.reads.units[index]
            raise LayerReadError(unit.layer, forward.readers(index), reason)

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

    def open_load(self, pages: Int64s, retained: Bools | None = None) -> bool:
        """Give pages that a tier will fill a place; False if there is no room.

        Layers that are not retained are to be written to the host rows: ``where``.
        Ends with ``close_load``.

        Args:
            pages: int64 [n], without KV.
            retained: bool [num_layers]; None for all.
        """
        assert self._forward is None, "a load was opened during a forward"
        pages = np.asarray(pages, np.int64)
        layers = retained
        if layers is None:
            layers = np.ones(self._binding.num_layers, np.bool_)
        self._room.collect()
        self._clear(pages)
        missing = (self._binding.device[:, pages] < 0) & layers[:, None]
        if not self._room.make(int(np.count_nonzero(missing))):
            return False
        found, where = missing.nonzero()
        self._binding.bind(found, pages[where])
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

    # -- the rest ---------------------------------------------------------------------

    def close(self) -> None:
        """End the threads; what waits is not copied."""
        if self._forward is not None:
            self.end_pass(ok=False)
        self._mover.close()
        self._room.collect()

    def check(self) -> None:
        """Assert every invariant; O(everything), for tests."""
        self._binding.check()
        self._book.check()

    def _running(self) -> Forward:
        assert self._forward is not None, "no forward is under way"
        return self._forward

    def _batch(self, requests: Sequence[PassRequest]) -> Batch:
        return Batch(requests, self._page_tokens, self.max_context_pages)

    def _needs(self, batch: Batch) -> Needs:
        retained = [self._book.retained(one) for one in batch.requests]
        return batch.needs(self._binding, retained)

    def _unknown(self) -> LayerReport:
        num_layers = self._binding.num_layers
        return LayerReport(num_layers, num_layers, 0, 0, 0, 0.0, 0)

    def _only(self, layer: int) -> Bools:
        layers = np.zeros(self._binding.num_layers, np.bool_)
        layers[layer] = True
        return layers

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

    def _enter(self, batch: Batch) -> None:
        self._room.in_forward[batch.pages] = True
        self._room.layer = 0

    def _leave(self, batch: Batch) -> None:
        self._room.in_forward[batch.pages] = False
        self._room.layer = self._binding.num_layers

    def _refuse(
        self, batch: Batch, strangers: Sequence[Hashable], refused: tuple[int, ...]
    ) -> PassPlan:
        for key in strangers:
            self._book.remove(key)
        return PassPlan(refused, (), batch.indptr, 0)

    def _bind_missing(self, batch: Batch, needs: Needs) -> None:
        layers, where = needs.missing.nonzero()
        if len(layers):
            self._binding.bind(layers, batch.new_pages[where])

    def _bind_passing(self, forward: Forward, layer: int) -> None:
        """Take room for a layer's new pages that will not stay on the device."""
        batch = forward.batch
        positions = forward.passing[layer].nonzero()[0]
        if self._binding.num_free < len(positions):
            started_s = self._mover.clock.now()
            if not self._room.make(len(positions)):
                # Copies to the host failed: once more, while somebody waits for them.
                self._room.retry(needed=True)
                if not self._room.make(len(positions)):
                    missing = len(positions) - self._binding.num_free
                    raise LayerRoomError(layer, missing, forward.writers(layer))
            forward.stall_s += self._mover.clock.now() - started_s
        places = self._binding.bind(layer, batch.new_pages[positions])
        forward.reads.table[layer, batch.new[positions]] = places
        forward.is_passing[layer] = False

    def _bring_back(self, pages: Int64s, reserve: int) -> bool:
        """Load pages to the device that staging cannot hold; False without room."""
        pages = np.unique(pages)
        layers = np.ones(self._binding.num_layers, np.bool_)
        self._room.settle(pages)
        away = int(np.count_nonzero(self._binding.device[:, pages] < 0))
        if not self._room.make(away + reserve):
            return False
        self._room.pull(layers, pages, away)
        self._room.settle(pages)
        return not np.any(self._binding.device[:, pages] < 0)

    def _drop_eagerly(self) -> None:
        if not self._lazy:
            self._room.drop(self._binding.num_physical)


def _greedy(needs: Needs, available: int) -> tuple[int, ...]:
    """Return the positions of requests that do not fit, first come first."""
    refused = []
    for position, count in enumerate(needs.per_request.tolist()):
        if count > available:
            refused.append(position)
        else:
            available -= count
    return tuple(refused)


def _per_request(batch: Batch, staged: Bools) -> Int64s:
    """Return int64 [num_requests], staged layer-pages of each."""
    counts = np.bincount(batch.request_of, staged.sum(axis=0), len(batch.requests))
    return counts.astype(np.int64)
