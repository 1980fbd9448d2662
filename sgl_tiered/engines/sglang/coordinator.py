"""From "this prompt waits" to "its pages arrive": one state per request.

The scheduler asks again and again whether a request may be admitted; the coordinator
answers from the cache's decision and from transfers that run elsewhere. It knows
neither tensors nor SGLang's objects, so it is tested without either. Everything here
runs on the scheduler's thread.

Life of a load: ``prepare`` asks the cache for a decision and, where pages come from
disk, commits it and starts the read into staging memory; ``loadable_pages`` says how
many pages the admission may count on; ``begin`` hands the job for the layer-wise loader
out; ``landed`` frees the staging memory; ``settle`` ends the plan once the engine's own
tree holds the pages, so that no second request moves them again meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.plans import Decision, LoadPlan, TransferResult
from sgl_tiered.pipelines.layerwise_load import LoadJob, Segment
from sgl_tiered.pipelines.staging import StagedRead, StagingReader
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["LoadCoordinator", "RequestState"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_MEMORY_TIERS = (TierId.HOST, TierId.CXL)
_MIN_PATIENCE_S = 0.25
_PATIENCE_FACTOR = 4.0
"""A read or another request's load may take this many times its predicted time, or the
recompute's time where that is longer, before the request goes on without it."""


@dataclass(slots=True)
class RequestState:
    """What is known of one request between its arrival and its end.

    Attributes:
        digest: namespace.
        tokens: int32 token ids of the prompt so far.
        max_pages: pages that may be reused (the last token is always computed).
        decision: the cache's last answer, where no plan is committed.
        plan: the committed load.
        staged: the read of the plan's disk pages, where it has any.
        num_good: leading pages of the plan that can be loaded.
        patience_s: how long the read may be waited for.
        bad_pages: indices into the plan whose bytes failed a check.
        give_up_at_s: when waiting for the read ends; None before it was waited for.
        waiting_since_s: when waiting for another request's load began.
        memory_only: the disk was given up for this request.
        started: the layer-wise load was handed out.
        num_offloaded: pages of the prompt already given to the offload.
        counted: it is in the statistics.
        reason: one clause about the last decision, for reports.
    """

    digest: bytes
    tokens: Int32s
    max_pages: int
    decision: Decision | None = None
    plan: LoadPlan | None = None
    staged: StagedRead | None = None
    num_good: int = 0
    bad_pages: list[int] = field(default_factory=list)
    patience_s: float = 0.0
    give_up_at_s: float | None = None
    waiting_since_s: float | None = None
    memory_only: bool = False
    started: bool = False
    num_offloaded: int = 0
    counted: bool = False
    reason: str = ""


class LoadCoordinator:
    """Loads for requests that wait; see the module's docstring."""

    def __init__(
        self,
        cache: TieredCache,
        memory: dict[TierId, MemoryTier],
        stager: StagingReader | None,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._memory = memory
        self._stager = stager
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._staging: dict[int, RequestState] = {}

    def state(self, rid: str) -> RequestState | None:
        """Return what is known of a request."""
        return self._states.get(rid)

    @property
    def num_staging(self) -> int:
        """Reads from disk that requests wait for."""
        return len(self._staging)

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

    def prefetch(self, state: RequestState, device_pages: int) -> None:
        """Start reading from disk for a request that has just arrived.

        Its patience begins later, when it could be admitted but for the read.
        """
        decision = self._decide(state, device_pages)
        if decision.lookup is Lookup.HIT and decision.num_from(TierId.DISK):
            self._stage(state, decision)

    def prepare(self, state: RequestState, device_pages: int) -> bool:
        """Decide and start what can be started; False while the request should wait.

        Args:
            state: of the request, which could be admitted now.
            device_pages: pages of the prompt that are on the device now.
        """
        if state.plan is not None:
            if self._covers(state, device_pages):
                return self._staged_or_late(state)
            self._abandon(state)
        decision = self._decide(state, device_pages)
        if decision.lookup is Lookup.PENDING:
            return self._waited_long(state, decision)
        if decision.num_from(TierId.DISK) == 0 or not self._stage(state, decision):
            state.waiting_since_s = None
            return True
        if state.plan is not None:
            return self._staged_or_late(state)
        if self._waited_long(state, decision):
            state.memory_only = True
            return True
        return False

    def loadable_pages(self, state: RequestState, device_pages: int) -> int:
        """Return how many pages after ``device_pages`` can be loaded at once."""
        if state.started:
            return 0
        if state.plan is not None:
            if not self._covers(state, device_pages):
                self._abandon(state)
            elif state.staged is None or state.staged.done:
                return state.plan.first_page + state.num_good - device_pages
            else:
                return 0
        decision = state.decision
        if decision is None or decision.first_page != device_pages:
            decision = self._decide(state, device_pages)
        if decision.lookup is not Lookup.HIT or decision.num_from(TierId.DISK):
            return 0
        return decision.num_pages

    def begin(self, state: RequestState, device_pages: Int64s) -> LoadJob | None:
        """Commit the load into ``device_pages``; None where the cache moved on.

        Args:
            state: of the request; ``loadable_pages`` was asked just before.
            device_pages: int64 [n], device page for each page to load.
        """
        if state.plan is None:
            if state.decision is None:
                return None
            state.plan = self._cache.commit_load(state.decision)
            state.decision = None
            if state.plan is None:
                return None
            state.num_good = state.plan.num_pages
        plan = state.plan
        skip = state.num_good - len(device_pages)
        assert 0 <= skip <= plan.num_pages, (skip, plan.num_pages, len(device_pages))
        state.started = True
        return LoadJob(plan, self._segments(state, skip), device_pages)

    def landed(self, state: RequestState) -> None:
        """Note that nothing writes to the device for this load any more."""
        if state.staged is not None and self._stager is not None:
            self._stager.release(state.staged)
            state.staged = None

    def settle(self, state: RequestState, *, landed: bool) -> None:
        """End a started load: its pages are in the engine's tree now, or lost."""
        self.landed(state)
        plan, state.plan = state.plan, None
        state.started = False
        if plan is not None:
            self._staging.pop(plan.plan_id, None)
            bad = np.array(sorted(set(state.bad_pages)), dtype=np.int32)
            self._cache.finish_load(plan, landed=landed, bad_pages=bad)
        state.bad_pages = []
        state.num_good = 0

    def release(self, rid: str) -> None:
        """Forget a request, and end whatever was prepared for it."""
        state = self._states.pop(rid, None)
        if state is not None and state.plan is not None:
            self.settle(state, landed=False)

    def release_all(self) -> None:
        """Forget every request (the cache is being reset)."""
        for rid in list(self._states):
            self.release(rid)

    def stage_finished(
        self, plan: LoadPlan, positions: Int32s, result: TransferResult
    ) -> None:
        """Take the end of a read from disk: pages up to the first bad one are good."""
        state = self._staging.pop(plan.plan_id, None)
        if state is None or state.plan is not plan:
            return
        bad = positions[~result.ok]
        state.bad_pages.extend(int(page) for page in bad)
        if len(bad):
            state.num_good = int(bad.min())
            state.reason = result.error or "a page failed its check"

    def _decide(self, state: RequestState, device_pages: int) -> Decision:
        memory_only = state.memory_only or self._stager is None
        decision = self._cache.lookup(
            state.digest,
            state.tokens,
            device_pages,
            max_pages=max(state.max_pages - device_pages, 0),
            tiers_allowed=_MEMORY_TIERS if memory_only else None,
        )
        state.decision = decision
        state.reason = decision.reason
        return decision

    def _stage(self, state: RequestState, decision: Decision) -> bool:
        """Commit and start reading; False where waiting for it would be in vain.

        True without a plan means that other reads hold the staging memory for now.
        """
        assert self._stager is not None
        disk = np.flatnonzero(decision.tiers == TierId.DISK).astype(np.int32)
        largest = self._stager.largest_read_pages
        if len(disk) > largest:
            # Load what fits; the rest is computed. A larger staging size avoids it.
            decision = self._cache.lookup(
                state.digest,
                state.tokens,
                decision.first_page,
                max_pages=int(disk[largest]),
            )
            disk = np.flatnonzero(decision.tiers == TierId.DISK).astype(np.int32)
            if len(disk) == 0 or len(disk) > largest:
                state.memory_only = True
                return False
        plan = self._cache.commit_load(decision)
        if plan is None:
            return False
        staged = self._stager.try_submit(plan, disk)
        if staged is None:
            self._cache.finish_load(plan, landed=False)
            if not self._staging:
                # Nobody's read will free rows, so waiting would never end.
                state.memory_only = True
                return False
            return True
        state.plan, state.staged, state.decision = plan, staged, None
        state.num_good = plan.num_pages
        state.patience_s = self._patience_s(decision)
        state.give_up_at_s = None
        self._staging[plan.plan_id] = state
        return True

    def _staged_or_late(self, state: RequestState) -> bool:
        if state.staged is None or state.staged.done:
            return True
        now = self._clock.now()
        if state.give_up_at_s is None:
            state.give_up_at_s = now + state.patience_s
        if now < state.give_up_at_s:
            return False
        state.memory_only = True
        self._abandon(state)
        state.reason = "the disk was late, so the pages are recomputed"
        return True

    def _waited_long(self, state: RequestState, decision: Decision) -> bool:
        now = self._clock.now()
        if state.waiting_since_s is None:
            state.waiting_since_s = now
        return now - state.waiting_since_s > self._patience_s(decision)

    def _patience_s(self, decision: Decision) -> float:
        return max(
            _MIN_PATIENCE_S, decision.recompute_s, _PATIENCE_FACTOR * decision.load_s
        )

    def _covers(self, state: RequestState, device_pages: int) -> bool:
        plan = state.plan
        assert plan is not None
        return plan.first_page <= device_pages < plan.first_page + state.num_good

    def _abandon(self, state: RequestState) -> None:
        self.settle(state, landed=False)
        state.decision = None

    def _segments(self, state: RequestState, skip: int) -> tuple[Segment, ...]:
        """Say where the bytes of each page from ``skip`` on lie in memory now."""
        plan = state.plan
        assert plan is not None
        segments = []
        wanted = np.arange(skip, state.num_good, dtype=np.int32)
        tiers = plan.tiers[wanted]
        for tier, memory in self._memory.items():
            chosen = wanted[tiers == tier]
            if len(chosen):
                addresses = plan.addresses[chosen]
                segments.append(Segment.of_tier(memory, addresses, chosen - skip))
        staged = state.staged
        if staged is not None:
            kept = (staged.positions >= skip) & (staged.positions < state.num_good)
            if kept.any():
                positions = staged.positions[kept] - skip
                segments.append(Segment(staged.region, staged.rows[kept], positions))
        return tuple(segments)
