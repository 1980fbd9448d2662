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

from sgl_tiered.layered.base import (
    LayerReadError,
    LayerRoomError,
    PassPlan,
    PassRequest,
)
from sgl_tiered.layered.passes import Batch, Forward, LostRows, Needs
from sgl_tiered.layered.requests import RequestRecord
from sgl_tiered.layered.resting import RestingLayers
from sgl_tiered.layered.units import plan_reads

__all__ = ["LayerManager"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class LayerManager(RestingLayers):
    """Layer-wise KV of one rank; made as `RestingLayers` says."""

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
        choice, source = None, None
        if self._acts is not None:
            source = self._acts.source
            choice = self._acts.choose(batch)
            if choice.rowless.any():
                needs = self._needs(batch, choice.rowless)
                if not self._room.make(needs.num_at_once + needs.num_passing):
                    refused = _greedy(needs, self._binding.num_free)
                    refused = refused or (len(requests) - 1,)
                    return self._refuse(batch, strangers, refused)
        # From here on nothing of the batch leaves the device before it was read.
        self._enter(batch)
        bound, staged = batch.staged(self._binding)
        too_long = batch.excess(staged, source)
        if too_long.any():
            reserve = needs.num_at_once + needs.num_passing
            if not self._bring_back(batch.pages[too_long & ~batch.is_new], reserve):
                self._leave(batch)
                refused = np.unique(batch.request_of[too_long]).tolist()
                return self._refuse(batch, strangers, tuple(refused))
            bound, staged = batch.staged(self._binding)
        self._bind_missing(batch, needs)
        passing_acts = None
        if self._acts is not None and choice is not None:
            passing_acts = self._acts.enter(batch, choice)
        bound[:, batch.new] = self._binding.device[:, batch.new_pages]
        if source is not None:
            self._count_kinds(batch, records, staged)
        else:
            for record, count in zip(records, _per_request(batch, staged), strict=True):
                record.layer_pages_streamed += int(count)
        reads = plan_reads(
            bound, staged, batch.pages, batch.indptr, self._halves, source
        )
        if self._mover.weights is not None:
            self._mover.weights.begin(self._binding.num_layers)
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
            passing_acts,
        )
        staged_pages = sum(len(unit.rows) for unit in reads.units)
        self.bytes_streamed += staged_pages * self._mover.layer_page_bytes
        if source is not None:
            staged_acts = sum(unit.num_acts for unit in reads.units)
            self.bytes_streamed += staged_acts * self._mover.act_page_bytes
        return PassPlan((), reads.groups, batch.indptr, len(reads.units))

    def staged_kinds(self, requests: Sequence[PassRequest]) -> tuple[Int64s, Int64s]:
        """Return what requests would stage if they ran now, for mini-batches.

        Args:
            requests: of the next forward; not begun.

        Returns:
            int64 [n] twice: pages whose KV would be computed from activations, those on
            the device included, and pages of KV; of each the most over all layers.
        """
        acts = np.zeros(len(requests), np.int64)
        kvs = np.zeros(len(requests), np.int64)
        for n, one in enumerate(requests):
            num_old = 0 if one.is_lost else -(-one.num_context // self._page_tokens)
            pages = np.asarray(one.pages[:num_old], np.int64)
            away = self._binding.device[:, pages] < 0
            is_act = self._binding.is_act[pages]
            acts[n] = np.count_nonzero(away & is_act, axis=1).max()
            kvs[n] = np.count_nonzero(away & ~is_act, axis=1).max()
        return acts, kvs

    def wait_weights(self, layer: int) -> float:
        """Block until a layer's emulated weights are here; return the seconds waited.

        Called before the layer is computed; those of the next one are then on their
        way. Returns 0 where none are emulated.
        """
        weights = self._mover.weights
        if weights is None:
            return 0.0
        forward = self._running()
        started_s = self._mover.clock.now()
        weights.wait(layer)
        waited_s = self._mover.clock.now() - started_s
        forward.stall_s += waited_s
        return waited_s

    def acts_for_write(self, layer: int, pages: npt.NDArray[np.integer]) -> Int32s:
        """Return where the activations of a layer's new tokens are to be kept.

        Called for each layer, in order, before ``pages_for_write`` of it; as often as
        wanted.

        Args:
            layer: which; the attention of earlier ones is queued.
            pages: int, any shape; logical pages of the batch that are written.

        Returns:
            int32, of the same shape: places in the act area, -1 for pages of KV and
            those of lost requests.

        Raises:
            LayerRoomError: copies to the host failed, so that earlier layers still
                have the places.
        """
        forward = self._running()
        if self._acts is not None and forward.num_captured <= layer:
            self._room.layer = layer
            self._acts.bind(forward, layer)
        places: Int32s = self._binding.act[layer][pages]
        return places if self._lost is None else self._lost.acts(pages, places)

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
        if self._acts is not None:
            captured = self._binding.act[layer, batch.written_pages] >= 0
            is_act = self._binding.is_act[batch.written_pages]
            assert np.all(captured[is_act]), "activations were not captured"
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
        if self._mover.weights is not None:
            self._mover.weights.end()
        stream = forward.stream
        forward.stall_s += stream.end()
        self.stall_s += forward.stall_s
        self.rebuild_s += stream.rebuild_s
        self.rebuild_exposed_s += stream.rebuild_exposed_s
        self.num_rebuilt += stream.num_rebuilt
        if self.on_measured is not None:
            self.on_measured(
                stream.rebuilds.mean(self._page_tokens),
                stream.loads.mean(self._page_tokens),
            )
        failed = stream.failed if ok else {}
        ok = ok and not failed
        self._leave(batch)
        self._room.collect()
        for record, request in zip(forward.records, batch.requests, strict=True):
            record.stall_s += forward.stall_s
            record.num_passes += 1
            record.rebuild_s += stream.rebuild_s
            record.rebuild_exposed_s += stream.rebuild_exposed_s
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

    def _needs(self, batch: Batch, rowless: Bools | None = None) -> Needs:
        retained = [self._book.retained(one) for one in batch.requests]
        return batch.needs(self._binding, retained, rowless)

    def _only(self, layer: int) -> Bools:
        layers = np.zeros(self._binding.num_layers, np.bool_)
        layers[layer] = True
        return layers

    def _enter(self, batch: Batch) -> None:
        self._room.in_forward[batch.pages] = True
        self._room.layer = 0

    def _leave(self, batch: Batch) -> None:
        self._room.in_forward[batch.pages] = False
        self._room.layer = self._binding.num_layers

    def _count_kinds(
        self, batch: Batch, records: Sequence[RequestRecord], staged: Bools
    ) -> None:
        """Note the kinds of each request's pages, and what it stages of them."""
        binding = self._binding
        is_act = binding.is_act[batch.pages]
        here = staged & is_act & (binding.act[:, batch.pages] >= 0)
        across = staged & is_act & ~here
        for n, (kv, acts, unsent) in enumerate(
            zip(
                _per_request(batch, staged & ~is_act).tolist(),
                _per_request(batch, across).tolist(),
                _per_request(batch, staged & is_act).tolist(),
                strict=True,
            )
        ):
            record, mine = records[n], is_act[batch.indptr[n] : batch.indptr[n + 1]]
            record.layer_pages_streamed += kv
            record.acts_streamed += acts
            record.unsent += unsent
            record.num_act_pages = int(np.count_nonzero(mine))
            record.num_kv_pages = len(mine) - record.num_act_pages

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
