"""The engine's side of waiting loads: requests by their id, and jobs for the loader.

What waits for what, and for how long, is decided in `sgl_tiered.cache.waiting`, which
the simulator shares. The coordinator adds the requests' names and says where in memory
the bytes of a started load lie. It knows neither tensors nor SGLang's objects, so it is
tested without either. Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.promotion import Prompt
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting import WaitingLoads
from sgl_tiered.cache.waiting_state import Staging, WaitingLoad
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Decision, LoadPlan
from sgl_tiered.pipelines.layerwise_load import LoadJob, Segment
from sgl_tiered.pipelines.staging import StagedRead
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["LoadCoordinator", "RequestState"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_MEMORY_TIERS = (TierId.HOST, TierId.CXL)


@dataclass(slots=True)
class RequestState(WaitingLoad[StagedRead]):
    """A waiting load, and what else is known of its request.

    Attributes:
        num_offloaded: pages of the prompt already given to the offload.
        counted: it is in the statistics.
        load_share: share of the bytes of its pages that a load is expected to bring.
    """

    num_offloaded: int = 0
    counted: bool = False
    load_share: float = 1.0


class LoadCoordinator(WaitingLoads[RequestState, StagedRead]):
    """Loads for requests that wait; see the module's docstring."""

    def __init__(
        self,
        cache: TieredCache,
        memory: dict[TierId, MemoryTier],
        stager: Staging[StagedRead] | None,
        clock: Clock,
    ) -> None:
        super().__init__(cache, _MEMORY_TIERS, stager, clock)
        self._memory = memory
        # Bytes to copy of each page to the device; None for whole pages.
        self.load_bytes: Callable[[Int64s], Int64s] | None = None
        self._states: dict[str, RequestState] = {}

    def state(self, rid: str) -> RequestState | None:
        """Return what is known of a request."""
        return self._states.get(rid)

    def track(
        self, rid: str, digest: bytes, tokens: Int32s, max_pages: int
    ) -> RequestState:
        """Note the prompt of a request; a longer one replaces a shorter one."""
        state = self._states.get(rid)
        if state is None:
            state = RequestState(digest, tokens, max_pages)
            self._states[rid] = state
        elif len(tokens) != len(state.tokens) or max_pages != state.max_pages:
            state.tokens, state.max_pages = tokens, max_pages
            # It was made for other tokens, and might load more than may be reused.
            state.decision = None
        return state

    def decide(
        self, state: RequestState, device_pages: int, *, can_split: bool = False
    ) -> Decision:
        """Ask the cache anew, by the bytes that this request's load would bring."""
        planner = self._cache.planner
        planner.load_share = state.load_share
        try:
            return super().decide(state, device_pages, can_split=can_split)
        finally:
            planner.load_share = 1.0

    def begin(self, state: RequestState, device_pages: Int64s) -> LoadJob | None:
        """Commit the load into ``device_pages``; None where the cache moved on.

        Args:
            state: of the request; ``loadable_pages`` was asked just before.
            device_pages: int64 [n], device page for each page to load.
        """
        plan = self.start(state)
        if plan is None:
            return None
        end = self.ready_end(state)
        skip = end - len(device_pages)
        assert 0 <= skip <= end <= plan.num_pages, (skip, end, plan.num_pages)
        return self._job(plan, state, skip, end, device_pages)

    def begin_back(self, state: RequestState, device_pages: Int64s) -> LoadJob:
        """Return the job for the back of a split prompt, after ``resume`` gave it.

        Args:
            state: of the request.
            device_pages: int64 [n], device page for each page that ``resume`` named.
        """
        plan, begin = state.plan, state.back_from
        assert plan is not None
        assert begin is not None
        end = plan.num_pages
        assert end - begin == len(device_pages), (begin, end, len(device_pages))
        return self._job(plan, state, begin, end, device_pages)

    def to_load(
        self, state: RequestState, num_pages: int
    ) -> tuple[LoadPlan | Decision, int] | None:
        """Return where the pages to load next are listed, and the first one's position.

        None where the cache has moved on, and the load will not begin either.

        Args:
            state: of the request.
            num_pages: to load.
        """
        found = state.plan or state.decision
        if found is None:
            return None
        end = len(found.pages)
        if state.plan is not None and state.back_from is None:
            end = self.ready_end(state)
        first = end - num_pages
        return None if first < 0 else (found, first)

    def waiting_prompts(self, limit: int) -> list[Prompt]:
        """Return prompts of requests whose load has not begun, the oldest first."""
        found = (s for s in self._states.values() if not s.started)
        return [(state.digest, state.tokens) for state in islice(found, limit)]

    def release(self, rid: str) -> None:
        """Forget a request, and end whatever was prepared for it."""
        state = self._states.pop(rid, None)
        if state is not None and state.plan is not None:
            self.settle(state, landed=False)

    def release_waiting(self) -> None:
        """Forget every request whose load has not begun; a load goes on to its end."""
        for rid, state in list(self._states.items()):
            if not state.started:
                self.release(rid)

    def release_all(self) -> None:
        """Forget every request (the cache is being reset)."""
        for rid in list(self._states):
            self.release(rid)

    def _job(
        self,
        plan: LoadPlan,
        state: RequestState,
        skip: int,
        end: int,
        device_pages: Int64s,
    ) -> LoadJob:
        segments = self._segments(plan, state, skip, end)
        num_bytes = None if plan.num_bytes is None else plan.num_bytes[skip:end]
        if self.load_bytes is not None:
            num_bytes = self.load_bytes(device_pages)
        return LoadJob(plan, segments, device_pages, num_bytes)

    def _segments(
        self, plan: LoadPlan, state: RequestState, skip: int, end: int
    ) -> tuple[Segment, ...]:
        """Say where the bytes of the pages from ``skip`` to ``end`` lie in memory."""
        segments = []
        wanted = np.arange(skip, end, dtype=np.int32)
        tiers = plan.tiers[wanted]
        for tier, memory in self._memory.items():
            chosen = wanted[tiers == tier]
            if len(chosen):
                addresses = plan.addresses[chosen]
                segments.append(Segment.of_tier(memory, addresses, chosen - skip))
        staged = state.staged
        if staged is not None:
            kept = (staged.positions >= skip) & (staged.positions < end)
            if kept.any():
                positions = staged.positions[kept] - skip
                segments.append(Segment(staged.region, staged.rows[kept], positions))
        return tuple(segments)
