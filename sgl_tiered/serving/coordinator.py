"""The engine's side of waiting loads: requests by their id, and jobs for the loader.

What waits for what, and for how long, is decided in `sgl_tiered.cache.waiting`, which
the simulator shares. The coordinator adds the requests' names and says where in memory
the bytes of a started load lie. It knows neither tensors nor SGLang's objects, so it is
tested without either. Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
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
from sgl_tiered.pipelines.page_numbers import PageNumbers, host_numbers
from sgl_tiered.pipelines.staging import StagedRead
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["LoadCoordinator", "RequestState"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_MEMORY_TIERS = (TierId.HOST, TierId.CXL)


@dataclass(slots=True, eq=False)
class RequestState(WaitingLoad[StagedRead]):
    """A waiting load, and what else is known of its request.

    Attributes:
        num_offloaded: pages of the prompt already given to the offload.
        counted: it is in the statistics.
        load_share: share of the bytes of its pages that a load is expected to bring.
        num_loading: loads of it that may still read their sources; they may outlive
            the request.
        afterwards: what gives the sources back, once none does.
    """

    num_offloaded: int = 0
    counted: bool = False
    load_share: float = 1.0
    num_loading: int = 0
    afterwards: list[Callable[[], None]] = field(default_factory=list)


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

    @property
    def rids(self) -> Collection[str]:
        """Names of the requests of which something is known."""
        return self._states.keys()

    def track(
        self, rid: str, digest: bytes, tokens: Int32s, max_pages: int
    ) -> RequestState:
        """Note the prompt of a request, and how much of it may be reused.

        One that only goes on where the former ended replaces it; any other prompt
        begins anew. Neither happens while a load of the former runs.
        """
        state = self._states.get(rid)
        if state is not None and state.started:
            return state
        if state is None or not _goes_on(state, digest, tokens):
            self.release(rid)
            state = self._states[rid] = RequestState(digest, tokens, max_pages)
        elif len(tokens) != len(state.tokens):
            state.tokens, state.decision = tokens, None
        self.limit(state, max_pages)
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

    def begin(self, state: RequestState, device_pages: PageNumbers) -> LoadJob | None:
        """Commit the load into ``device_pages``; None where the cache moved on.

        Args:
            state: of the request; ``loadable_pages`` was asked just before.
            device_pages: a device page for each page to load.
        """
        plan = self.start(state)
        if plan is None:
            return None
        end = self.ready_end(state)
        skip = end - len(device_pages)
        assert 0 <= skip <= end <= plan.num_pages, (skip, end, plan.num_pages)
        return self._job(plan, state, skip, end, device_pages)

    def begin_back(self, state: RequestState, device_pages: PageNumbers) -> LoadJob:
        """Return the job for the back of a split prompt, after ``resume`` gave it.

        Args:
            state: of the request.
            device_pages: a device page for each page that ``resume`` named.
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

    def load_begins(self, state: RequestState) -> None:
        """Note that a load of a request is submitted: its sources are being read."""
        state.num_loading += 1

    def load_ended(self, state: RequestState) -> None:
        """Note that it has ended; the request may be long forgotten."""
        state.num_loading -= 1
        if not state.num_loading:
            effects, state.afterwards = state.afterwards, []
            for effect in effects:
                effect()

    def _after_loads(self, state: RequestState, effect: Callable[[], None]) -> None:
        if state.num_loading:
            state.afterwards.append(effect)
        else:
            effect()

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
        device_pages: PageNumbers,
    ) -> LoadJob:
        segments = self._segments(plan, state, skip, end)
        num_bytes = None if plan.num_bytes is None else plan.num_bytes[skip:end]
        if self.load_bytes is not None:
            num_bytes = self.load_bytes(host_numbers(device_pages))
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


def _goes_on(state: RequestState, digest: bytes, tokens: Int32s) -> bool:
    """Return whether tokens are those of a request, or more or fewer of the same."""
    known = state.tokens
    num = min(len(known), len(tokens))
    return state.digest == digest and np.array_equal(known[:num], tokens[:num])
