"""Joins SGLang's forwards, scheduler and tiers to the layer manager of one pool.

All of it runs on the scheduler's thread, which is the one that runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_tiered.engines.device.act_transfers import ActTransfers
from sgl_tiered.engines.device.device_rows import DeviceRows
from sgl_tiered.engines.sglang.layered.activations.capture import rows_of_pages
from sgl_tiered.engines.sglang.layered.activations.reports import (
    COUNTERS,
    activation_report,
    activation_stats,
    count_report,
)
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.collectives import guard_counters
from sgl_tiered.errors import TieredError
from sgl_tiered.layered.base import LayerReport, PassPlan, PassRequest
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.pipelines.contention import ContentionGuard
from sgl_tiered.serving.layered.batches import Packing
from sgl_tiered.serving.layered.pauses import PauseLog

__all__ = ["LayerDriver", "NoRoomError"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
UInt8s = npt.NDArray[np.uint8]
_MAX_REPORTS = 1024
"""Of requests that ended and were not asked for."""


class NoRoomError(TieredError, RuntimeError):
    """A forward cannot begin: some of its requests have no room for their layers.

    Attributes:
        keys: their ids.
    """

    def __init__(self, keys: Sequence[str], num_requests: int, room: object) -> None:
        self.keys = tuple(keys)
        super().__init__(
            f"{len(keys)} of {num_requests} requests were admitted without room for "
            f"their layers: {room}"
        )


class LayerDriver:
    """What a `LayeredPool` and the scheduler ask of the layers.

    Args:
        manager: places the layers.
        plan: sizes, and what the user asked for.
        guard: asked by its copies; None where nobody is.

    Attributes:
        pauses: who waits between two tokens.
    """

    def __init__(
        self,
        manager: LayerManager,
        plan: LayerPlan,
        guard: ContentionGuard | None = None,
    ) -> None:
        self.manager = manager
        self.plan = plan
        self._guard = guard
        # Ends what copies besides the manager's threads.
        self.on_close: Callable[[], None] | None = None
        # Told of pages that SGLang gives up, before they are.
        self.on_freed: Callable[[Int64s], None] | None = None
        # Told that a forward is to begin, ahead of its first copies.
        self.on_begin: Callable[[], None] | None = None
        # Bytes of weights that rebuilding has brought from host memory.
        self.weights_brought: Callable[[], int] | None = None
        # Orders a forward's requests; None for as they come.
        self.packing: Packing | None = None
        self.num_paused = 0
        self.pauses = PauseLog(manager.clock)
        # Of whoever decides, set where a scheduler is attached.
        self.decision_counters: Callable[[], dict[str, float]] = dict
        self._decided: dict[str, Bools] = {}
        self._reports: dict[str, LayerReport] = {}
        self._totals: dict[str, float] = {
            "layerkv_bytes_streamed": 0,
            "layerkv_bytes_offloaded": 0,
            "layerkv_bytes_pulled": 0,
            "layerkv_stall_s": 0.0,
            "layerkv_requests": 0,
            "layerkv_turns_held": 0,
            "layerkv_forwards_repeated": 0,
            "layerkv_requests_lost": 0,
        }
        if plan.acts is not None:
            self._totals |= dict.fromkeys(COUNTERS, 0.0)
        # In a batch still, but ended with an error: the others are computed.
        self._lost: set[str] = set()
        # Had a forward, and still hold KV.
        self.known: set[str] = set()
        self._is_open = False
        # Whether the forward writes pages that are kept as activations.
        self._captures = False
        self._has_padding = False
        # The same where the forward's places are not on the host.
        self._device_rows: DeviceRows | None = None
        self._loc: torch.Tensor | None = None
        self._write_pages: Int64s = np.empty(0, np.int64)
        self._write_index: torch.Tensor = torch.empty(0)
        self._write_offsets: torch.Tensor = torch.empty(0)
        # Where pages lie that a transfer to or from a lower tier reads or writes.
        shape = (plan.layout.num_layers, plan.num_pages + 1)
        self.transfers: Int32s = np.full(shape, -1, np.int32)
        # The same of their activations, where pages may be kept as such: what is moved
        # of a page, its places in the act area, and its row of either host region.
        self.act_transfers: ActTransfers | None = None
        if manager.binding.kinds is not None:
            self.act_transfers = ActTransfers(*shape, plan.num_kv_rows)
        self._loading: dict[str, Int64s] = {}
        self._storing: dict[int, Int64s] = {}

    # -- Forward ---------------------------------------------------------------

    def decide(self, rid: str, retained: Bools) -> None:
        """Say which layers of a prompt its first pass is to leave on the device."""
        self._decided[rid] = retained

    def undecide(self, rid: str) -> None:
        """Take that back: it has no first pass now."""
        self._decided.pop(rid, None)

    def decided(self, rid: str) -> Bools | None:
        """Return that for the pass; None for a request that had its first."""
        return self._decided.get(rid)

    def begin_pass(self, requests: Sequence[PassRequest]) -> PassPlan:
        """Begin a forward; its requests were checked to fit before.

        Raises:
            NoRoomError: they do not, although all layers may leave; nothing has begun.
        """
        self.broke_off()
        self._loc = None
        self._captures = False
        self._device_rows = None
        if self._lost:
            requests = [replace(r, is_lost=r.key in self._lost) for r in requests]
        if self.on_begin is not None:
            self.on_begin()
        plan = self.manager.begin_pass(requests)
        if plan.refused:
            # Admission counts before pages are given out, so it may be off by a few.
            # In one order: the ranks of a server have to let go alike.
            for rid in sorted(self.known):
                self.manager.release(rid, np.ones(len(self.transfers), np.bool_))
            plan = self.manager.begin_pass(requests)
        if plan.refused:
            keys = [str(requests[n].key) for n in plan.refused]
            raise NoRoomError(keys, len(requests), self.manager.room())
        self._is_open = True
        rids = []
        for one in requests:
            self._decided.pop(str(one.key), None)
            if not one.is_lost:
                rids.append(str(one.key))
        self.known.update(rids)
        self.pauses.takes_part(rids)
        return plan

    def broke_off(self) -> None:
        """Note that the forward, if one is under way, will not reach its end."""
        if self._is_open:
            self._is_open = False
            self.manager.end_pass(ok=False)

    def repeats(self) -> None:
        """Note that a forward that broke off is run again."""
        self._totals["layerkv_forwards_repeated"] += 1

    def lose(self, rids: Collection[str]) -> None:
        """Note requests that end with an error: forwards pass them over from now on."""
        self._totals["layerkv_requests_lost"] += len(set(rids) - self._lost)
        self._lost.update(rids)

    def is_lost(self, rid: str) -> bool:
        """Return whether a request is one of those."""
        return rid in self._lost

    def slots_for_write(self, layer: int, loc: torch.Tensor) -> torch.Tensor:
        """Return where the new tokens of the forward go in a layer.

        Args:
            layer: counted from the first of the pool.
            loc: int64 [n], SGLang's slots, the same object for all layers.
        """
        page_tokens = self.plan.layout.page_tokens
        self._take_rows(loc)
        places = self.manager.pages_for_write(layer, self._write_pages)
        if self._has_padding:
            places = np.concatenate([np.zeros(1, places.dtype), places])
        starts = torch.from_numpy(places.astype(np.int64) * page_tokens)
        return starts[self._write_index] + self._write_offsets

    def capture(self, loc: torch.Tensor) -> None:
        """Say where the forward that has begun writes, ahead of its first layer.

        Args:
            loc: as of ``slots_for_write``.
        """
        self._take_rows(loc)
        self._captures = bool(self.manager.binding.is_act[self._write_pages].any())

    def capture_on_device(self, rows: DeviceRows) -> None:
        """Say where the forward that has begun writes, on a device with streams.

        Args:
            rows: of it; those of padding, which lie behind, left out.
        """
        self._device_rows = rows
        self._captures = bool(self.manager.binding.is_act[rows.pages].any())

    def wait_weights(self, layer: int) -> None:
        """Block until a layer's emulated weights have come, in a forward."""
        if self._is_open:
            self.manager.wait_weights(layer)

    @property
    def num_write_rows(self) -> int:
        """Tokens that the forward writes; on a CPU, those of padding included."""
        rows = self._device_rows
        return len(self._write_offsets if rows is None else rows)

    @property
    def has_rows_behind(self) -> bool:
        """Whether more rows may follow those, which are padding and not written."""
        return self._device_rows is not None

    def acts_for_write(
        self, layer: int
    ) -> tuple[torch.Tensor | None, torch.Tensor] | None:
        """Return which rows of a layer's input are kept, and where; see ``capture``.

        Called once per layer, in order, before ``slots_for_write``.

        Returns:
            int64 [n], rows of the forward, None for all, and int64 [n], tokens of the
            act area; or None where nothing is kept.
        """
        if not (self._is_open and self._captures):
            return None
        if self._device_rows is not None:
            places = self.manager.acts_for_write(layer, self._device_rows.pages)
            return self._device_rows.of_layer(places)
        places = self.manager.acts_for_write(layer, self._write_pages)
        if self._has_padding:
            places = np.concatenate([np.full(1, -1, places.dtype), places])
        return rows_of_pages(
            places, self._write_index, self._write_offsets, self.plan.layout.page_tokens
        )

    def _take_rows(self, loc: torch.Tensor) -> None:
        """Sort the tokens that a forward writes by their pages, once for all layers."""
        if loc is self._loc:
            return
        self._loc = loc
        page_tokens = self.plan.layout.page_tokens
        pages = loc.numpy() // page_tokens
        unique, index = np.unique(pages, return_inverse=True)
        # Page 0 is where padding is written to, in the tensor as well.
        self._has_padding = bool(len(unique)) and unique[0] == 0
        self._write_pages = unique[1:] if self._has_padding else unique
        self._write_index = torch.from_numpy(index.reshape(-1))
        self._write_offsets = loc % page_tokens

    def end_pass(self) -> None:
        """Note that the last layer of the forward was read."""
        self._is_open = False
        self.manager.end_pass()

    # -- Requests --------------------------------------------------------------

    def finished(self, rid: str) -> None:
        """Note that a request holds no KV any more: ended, aborted or retracted."""
        self._decided.pop(rid, None)
        self._lost.discard(rid)
        self.known.discard(rid)
        self.pauses.ended(rid)
        report = self.manager.finished(rid)
        if not report.num_passes:
            return
        self._reports[rid] = report
        if len(self._reports) > _MAX_REPORTS:
            oldest = next(iter(self._reports))
            del self._reports[oldest]
            self.pauses.forget(oldest)
        totals = self._totals
        totals["layerkv_bytes_streamed"] += report.bytes_streamed
        totals["layerkv_bytes_offloaded"] += report.bytes_offloaded
        totals["layerkv_bytes_pulled"] += report.bytes_pulled
        totals["layerkv_stall_s"] += report.stall_s
        totals["layerkv_requests"] += 1
        if self.plan.acts is not None:
            count_report(totals, report)

    def can_leave(self, num_pages: int) -> bool:
        """Return whether layers of a request may leave, as they could be streamed.

        Args:
            num_pages: that it will have in the end.
        """
        return num_pages <= self.manager.max_context_pages

    def paused(self, rids: Sequence[str]) -> None:
        """Note who waits in this step."""
        self.num_paused = len(rids)
        self.pauses.left_out(rids)

    def held(self) -> None:
        """Note that nobody decodes in this turn: stores read all that could leave."""
        self._totals["layerkv_turns_held"] += 1

    def take_report(self, rid: str) -> dict[str, Any] | None:
        """Return what became of a request's layers, once; None if nothing."""
        report = self._reports.pop(rid, None) or self.manager.report(rid)
        steps_paused, paused_s = self.pauses.of(rid)
        self.pauses.forget(rid)
        if report is None or not report.num_passes:
            return None
        activations = {}
        if self.plan.acts is not None:
            activations = {"activations": activation_report(report)}
        return {
            "layers_retained": report.layers_retained,
            "num_layers": report.num_layers,
            "bytes_streamed": report.bytes_streamed,
            "bytes_offloaded": report.bytes_offloaded,
            "bytes_pulled": report.bytes_pulled,
            "stall_s": report.stall_s,
            "steps_paused": steps_paused,
            "paused_s": round(paused_s, 6),
            **activations,
        }

    # -- Tiers below -----------------------------------------------------------

    @property
    def stores(self) -> frozenset[int]:
        """Offloads and transfers that read pages where they are, by number."""
        return frozenset(self._storing)

    def kinds(self, pages: Int64s) -> tuple[UInt8s, Bools] | None:
        """Return what pages would be stored as; None where all of them are KV.

        Activations that the host lacks in some layer, and the act area as well, are
        computed no second time: such a page goes down as KV.

        Returns:
            uint8 [n], of each page, and bool [n], of which neither is whole.
        """
        binding = self.manager.binding
        if binding.kinds is None:
            return None
        in_area = binding.act[:, pages] >= 0
        has_act = (in_area | binding.on_host[:, pages]).all(axis=0)
        has_kv = (binding.device[:, pages] >= 0).all(axis=0)
        is_act = binding.is_act[pages]
        return (is_act & has_act).astype(np.uint8), is_act & ~has_act & ~has_kv

    def begin_store(
        self, number: int, pages: Int64s, kinds: UInt8s | None = None
    ) -> None:
        """Keep pages where they are while a transfer reads them.

        Args:
            number: of the transfer.
            pages: int64 [n].
            kinds: uint8 [n], the ``Representation`` to be stored; None for KV.
        """
        self.manager.pin(pages)
        self._storing[number] = pages
        self._note_places(pages, None if kinds is None else kinds.astype(np.bool_))

    def end_store(self, number: int) -> None:
        """Note the end of that."""
        self.manager.unpin(self._storing.pop(number))

    def open_load(self, rid: str, pages: Int64s, is_act: Bools | None = None) -> bool:
        """Make room for pages that come from a tier below; False where there is none.

        Layers that the request is to keep on the device go there, the others straight
        to the host region, as activations do in all layers.

        Args:
            rid: of the request.
            pages: int64 [n].
            is_act: bool [n], which come as activations; None for none of them.
        """
        retained = self._decided.get(rid)
        if retained is None:
            retained = self.manager.held(rid)
        if not self.manager.open_load(pages, retained, is_act):
            return False
        self._loading[rid] = pages
        self._note_places(pages, is_act)
        return True

    def close_loads(self) -> None:
        """Note that all loads have ended.

        One that broke counts as well: the forward runs on what is there, and then the
        missing span is computed into these pages (``repair.py``).
        """
        for pages in self._loading.values():
            self.manager.close_load(pages, True)
        self._loading.clear()

    def freed(self, pages: Int64s) -> None:
        """Take back what logical pages have; a load to them does not come any more."""
        if self.on_freed is not None:
            self.on_freed(pages)
        for rid, loading in list(self._loading.items()):
            if np.isin(loading, pages).any():
                self.manager.close_load(self._loading.pop(rid), False)
        self.manager.freed(pages)

    def _note_places(self, pages: Int64s, is_act: Bools | None) -> None:
        for layer in range(self.plan.layout.num_layers):
            self.transfers[layer, pages] = self.manager.where(layer, pages)
        if self.act_transfers is not None:
            binding = self.manager.binding
            self.act_transfers.note(pages, is_act, binding.act, binding.row)

    def close(self) -> None:
        """End the threads that copy; what waits is not copied."""
        self.manager.close()
        if self.on_close is not None:
            self.on_close()

    # -- Reports ---------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Return what ended requests did, and who waits, for the metrics."""
        copies: dict[str, float] = {
            f"layerkv_copies_{name}": count
            for name, count in self.manager.failures().items()
        }
        asked = {} if self._guard is None else guard_counters(self._guard)
        if self.plan.acts is not None:
            # Of forwards, each once; requests of one forward share its seconds.
            copies["layerkv_rebuild_s"] = self.manager.rebuild_s
            copies["layerkv_rebuild_exposed_s"] = self.manager.rebuild_exposed_s
            copies["layerkv_rebuild_layer_pages"] = self.manager.num_rebuilt
        return {
            **self._totals,
            **copies,
            "layerkv_steps_paused": self.pauses.num_steps,
            "layerkv_paused_s": self.pauses.seconds,
            **self.decision_counters(),
            **asked,
        }

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture, for ``GET /tiered/stats``."""
        room, plan, manager = self.manager.room(), self.plan, self.manager
        activations = {}
        if plan.chosen is not None:
            told = activation_stats(
                plan.chosen, plan.acts, manager.rebuild_s, manager.rebuild_exposed_s
            )
            if self.weights_brought is not None:
                told["weight_bytes"] = self.weights_brought()
            activations = {"activations": told}
        return {
            "logical_pages": plan.num_pages,
            "layer_pages": {
                "total": room.total,
                "free": room.free,
                "spare": room.spare,
                "landing": room.landing,
                "cached": room.cached,
                "staging": 2 * plan.half_pages,
            },
            "decode": plan.settings.decode,
            "paused": self.num_paused,
            **activations,
            **self.counters(),
        }
