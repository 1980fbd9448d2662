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

from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.collectives import guard_counters
from sgl_tiered.engines.sglang.layered.pauses import PauseLog
from sgl_tiered.errors import TieredError
from sgl_tiered.layered.base import LayerReport, PassPlan, PassRequest
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.pipelines.contention import ContentionGuard

__all__ = ["LayerDriver", "NoRoomError"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
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
            "layerkv_forwards_repeated": 0,
            "layerkv_requests_lost": 0,
        }
        # In a batch still, but ended with an error: the others are computed.
        self._lost: set[str] = set()
        # Had a forward, and still hold KV.
        self.known: set[str] = set()
        self._is_open = False
        self._has_padding = False
        self._loc: torch.Tensor | None = None
        self._write_pages: Int64s = np.empty(0, np.int64)
        self._write_index: torch.Tensor = torch.empty(0)
        self._write_offsets: torch.Tensor = torch.empty(0)
        # Where pages lie that a transfer to or from a lower tier reads or writes.
        shape = (plan.layout.num_layers, plan.num_pages + 1)
        self.transfers: Int32s = np.full(shape, -1, np.int32)
        self._loading: dict[str, Int64s] = {}
        self._storing: dict[int, Int64s] = {}

    # -- Forward ---------------------------------------------------------------

    def decide(self, rid: str, retained: Bools) -> None:
        """Say which layers of a prompt its first pass is to leave on the device."""
        self._decided[rid] = retained

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
        if self._lost:
            requests = [replace(r, is_lost=r.key in self._lost) for r in requests]
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
        if loc is not self._loc:
            self._loc = loc
            pages = loc.numpy() // page_tokens
            unique, index = np.unique(pages, return_inverse=True)
            # Page 0 is where padding is written to, in the tensor as well.
            self._has_padding = bool(len(unique)) and unique[0] == 0
            self._write_pages = unique[1:] if self._has_padding else unique
            self._write_index = torch.from_numpy(index.reshape(-1))
            self._write_offsets = loc % page_tokens
        places = self.manager.pages_for_write(layer, self._write_pages)
        if self._has_padding:
            places = np.concatenate([np.zeros(1, places.dtype), places])
        starts = torch.from_numpy(places.astype(np.int64) * page_tokens)
        return starts[self._write_index] + self._write_offsets

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

    def take_report(self, rid: str) -> dict[str, Any] | None:
        """Return what became of a request's layers, once; None if nothing."""
        report = self._reports.pop(rid, None) or self.manager.report(rid)
        steps_paused, paused_s = self.pauses.of(rid)
        self.pauses.forget(rid)
        if report is None or not report.num_passes:
            return None
        return {
            "layers_retained": report.layers_retained,
            "num_layers": report.num_layers,
            "bytes_streamed": report.bytes_streamed,
            "bytes_offloaded": report.bytes_offloaded,
            "bytes_pulled": report.bytes_pulled,
            "stall_s": report.stall_s,
            "steps_paused": steps_paused,
            "paused_s": round(paused_s, 6),
        }

    # -- Tiers below -----------------------------------------------------------

    @property
    def num_stores(self) -> int:
        """Offloads to the tiers below that read pages where they are."""
        return len(self._storing)

    def begin_store(self, number: int, pages: Int64s) -> None:
        """Keep pages where they are while a transfer reads them."""
        self.manager.pin(pages)
        self._storing[number] = pages
        self._note_places(pages)

    def end_store(self, number: int) -> None:
        """Note the end of that."""
        self.manager.unpin(self._storing.pop(number))

    def open_load(self, rid: str, pages: Int64s) -> bool:
        """Make room for pages that come from a tier below; False where there is none.

        Layers that the request is to keep on the device go there, the others straight
        to the host region.
        """
        retained = self._decided.get(rid)
        if retained is None:
            retained = self.manager.held(rid)
        if not self.manager.open_load(pages, retained):
            return False
        self._loading[rid] = pages
        self._note_places(pages)
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
        for rid, loading in list(self._loading.items()):
            if np.isin(loading, pages).any():
                self.manager.close_load(self._loading.pop(rid), False)
        self.manager.freed(pages)

    def _note_places(self, pages: Int64s) -> None:
        for layer in range(self.plan.layout.num_layers):
            self.transfers[layer, pages] = self.manager.where(layer, pages)

    def close(self) -> None:
        """End the threads that copy; what waits is not copied."""
        self.manager.close()
        if self.on_close is not None:
            self.on_close()

    # -- Reports ---------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Return what ended requests did, and who waits, for the metrics."""
        copies = {
            f"layerkv_copies_{name}": count
            for name, count in self.manager.failures().items()
        }
        asked = {} if self._guard is None else guard_counters(self._guard)
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
        room, plan = self.manager.room(), self.plan
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
            **self.counters(),
        }
