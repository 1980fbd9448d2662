"""Requests that wait for pages on their way: decide, start the reads, bound the wait.

The engine's coordinator and the simulator run this very object; they differ only in
what reads from disk (``Staging``) and in what a started load is. Everything here runs
on one thread.

Life of a load: ``prepare`` asks the cache for a decision and, where pages come from
disk, commits it and starts the read into staging memory; ``loadable_pages`` says how
many pages the admission may count on; ``start`` commits what needs no read; ``landed``
frees the staging memory; ``settle`` ends the plan once the engine's own tree holds the
pages, so that no second request moves them again meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.plans import Decision, LoadPlan, TransferResult

__all__ = ["Staged", "Staging", "WaitingLoad", "WaitingLoads"]

Int32s = npt.NDArray[np.int32]

_MIN_PATIENCE_S = 0.25
_PATIENCE_FACTOR = 4.0
"""A read or another request's load may take this many times its predicted time, or the
recompute's time where that is longer, before the request goes on without it."""


class Staged(Protocol):
    """A read into staging memory."""

    @property
    def done(self) -> bool:
        """True once the read ended."""
        ...


StagedT = TypeVar("StagedT", bound=Staged)


class Staging(Protocol[StagedT]):
    """Reads pages that cannot be read in place into rows of memory."""

    @property
    def largest_read_pages(self) -> int:
        """Pages that one read can have at most, when nothing else is staged."""
        ...

    @property
    def num_free_rows(self) -> int:
        """Rows that a read submitted now could have."""
        ...

    def try_submit(self, plan: LoadPlan, positions: Int32s) -> StagedT | None:
        """Start reading ``plan.addresses[positions]``; None if rows are short."""
        ...

    def release(self, staged: StagedT) -> None:
        """Give the rows back; during the read they are kept until it ends."""
        ...


@dataclass(slots=True)
class WaitingLoad(Generic[StagedT]):
    """What is known of one request's load between its arrival and its end.

    Attributes:
        digest: namespace.
        tokens: int32 token ids of the prompt so far.
        max_pages: pages that may be reused (the last token is always computed).
        decision: the cache's last answer, where no plan is committed.
        plan: the committed load.
        staged: the read of the plan's disk pages, where it has any.
        num_good: leading pages of the plan that can be loaded.
        bad_pages: indices into the plan whose bytes failed a check.
        patience_s: how long the read may be waited for.
        give_up_at_s: when waiting for the read ends; None before it was waited for.
        waiting_since_s: when waiting for another request's load began.
        memory_only: the disk was given up for this request.
        started: the load to the device has begun.
        reason: one clause about the last decision, for reports.
    """

    digest: bytes
    tokens: Int32s
    max_pages: int
    decision: Decision | None = None
    plan: LoadPlan | None = None
    staged: StagedT | None = None
    num_good: int = 0
    bad_pages: list[int] = field(default_factory=list)
    patience_s: float = 0.0
    give_up_at_s: float | None = None
    waiting_since_s: float | None = None
    memory_only: bool = False
    started: bool = False
    reason: str = ""


LoadT = TypeVar("LoadT", bound=WaitingLoad)  # type: ignore[type-arg]


def _ignore(time_s: float) -> None:
    """Take no note of when a wait ends: an engine asks in every pass anyway."""


class WaitingLoads(Generic[LoadT, StagedT]):
    """Loads for requests that wait; see the module's docstring.

    Args:
        cache: decides.
        memory_tiers: tiers that are read in place.
        staging: reads from the others; None where there are none.
        clock: bounds the waiting.
        ask_again_at: called with the time at which a wait that begins will end.
    """

    def __init__(
        self,
        cache: TieredCache,
        memory_tiers: Collection[TierId],
        staging: Staging[StagedT] | None,
        clock: Clock,
        *,
        ask_again_at: Callable[[float], None] = _ignore,
    ) -> None:
        self._cache = cache
        self._memory_tiers = tuple(memory_tiers)
        self._staging = staging
        self._clock = clock
        self._ask_again_at = ask_again_at
        self._reads: dict[int, LoadT] = {}
        self._num_holding = 0

    @property
    def num_staging(self) -> int:
        """Reads from disk that requests wait for."""
        return len(self._reads)

    def prefetch(self, state: LoadT, device_pages: int) -> None:
        """Start reading from disk for a request that has just arrived.

        Its patience begins later, when it could be admitted but for the read.
        """
        decision = self.decide(state, device_pages)
        if decision.lookup is Lookup.HIT and decision.num_from(TierId.DISK):
            self._stage(state, decision)

    def prepare(self, state: LoadT, device_pages: int) -> bool:
        """Decide and start what can be started; False while the request should wait.

        Args:
            state: of the request, which could be admitted now.
            device_pages: pages of the prompt that are on the device now.
        """
        if state.plan is not None:
            if self._covers(state, device_pages):
                return self._staged_or_late(state)
            self._abandon(state)
        decision = self.decide(state, device_pages)
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

    def loadable_pages(self, state: LoadT, device_pages: int) -> int:
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
            decision = self.decide(state, device_pages)
        if decision.lookup is not Lookup.HIT or decision.num_from(TierId.DISK):
            return 0
        return decision.num_pages

    def start(self, state: LoadT) -> LoadPlan | None:
        """Commit what ``loadable_pages`` promised; None where the cache moved on.

        The pages to load are the plan's last ones before ``num_good``.
        """
        if state.plan is None:
            if state.decision is None:
                return None
            state.plan = self._cache.commit_load(state.decision)
            state.decision = None
            if state.plan is None:
                return None
            state.num_good = state.plan.num_pages
        state.started = True
        return state.plan

    def landed(self, state: LoadT) -> None:
        """Note that nothing reads the staging memory for this load any more."""
        if state.staged is not None and self._staging is not None:
            self._staging.release(state.staged)
            state.staged = None
            self._num_holding -= 1

    def settle(self, state: LoadT, *, landed: bool) -> None:
        """End a plan: its pages are in the engine's tree now, or lost."""
        self.landed(state)
        plan, state.plan = state.plan, None
        state.started = False
        if plan is not None:
            self._reads.pop(plan.plan_id, None)
            bad = np.array(sorted(set(state.bad_pages)), dtype=np.int32)
            self._cache.finish_load(plan, landed=landed, bad_pages=bad)
        state.bad_pages = []
        state.num_good = 0

    def stage_finished(
        self, plan: LoadPlan, positions: Int32s, result: TransferResult
    ) -> None:
        """Take the end of a read from disk: pages up to the first bad one are good."""
        state = self._reads.pop(plan.plan_id, None)
        if state is None or state.plan is not plan:
            return
        bad = positions[~result.ok]
        state.bad_pages.extend(int(page) for page in bad)
        if len(bad):
            state.num_good = int(bad.min())
            state.reason = result.error or "a page failed its check"

    def decide(self, state: LoadT, device_pages: int) -> Decision:
        """Ask the cache anew."""
        memory_only = state.memory_only or self._staging is None
        decision = self._cache.lookup(
            state.digest,
            state.tokens,
            device_pages,
            max_pages=max(state.max_pages - device_pages, 0),
            tiers_allowed=self._memory_tiers if memory_only else None,
        )
        state.decision = decision
        state.reason = decision.reason
        return decision

    def _stage(self, state: LoadT, decision: Decision) -> bool:
        """Commit and start reading; False where waiting for it would be in vain.

        True without a plan means that others hold the staging memory for now.
        """
        staging = self._staging
        assert staging is not None
        disk = np.flatnonzero(decision.tiers == TierId.DISK).astype(np.int32)
        largest = staging.largest_read_pages
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
        if len(disk) > staging.num_free_rows:
            return self._wait_for_rows(state)
        plan = self._cache.commit_load(decision)
        if plan is None:
            return False
        staged = staging.try_submit(plan, disk)
        if staged is None:
            self._cache.finish_load(plan, landed=False)
            return self._wait_for_rows(state)
        state.plan, state.staged, state.decision = plan, staged, None
        state.num_good = plan.num_pages
        state.patience_s = _patience_s(decision)
        state.give_up_at_s = None
        self._reads[plan.plan_id] = state
        self._num_holding += 1
        return True

    def _wait_for_rows(self, state: LoadT) -> bool:
        """Return whether somebody's read or load will free staging memory."""
        if not self._num_holding:
            # Nobody will, so waiting would never end.
            state.memory_only = True
        return self._num_holding > 0

    def _staged_or_late(self, state: LoadT) -> bool:
        if state.staged is None or state.staged.done:
            return True
        now_s = self._clock.now()
        if state.give_up_at_s is None:
            state.give_up_at_s = now_s + state.patience_s
            self._ask_again_at(state.give_up_at_s)
        if now_s < state.give_up_at_s:
            return False
        state.memory_only = True
        self._abandon(state)
        state.reason = "the disk was late, so the pages are recomputed"
        return True

    def _waited_long(self, state: LoadT, decision: Decision) -> bool:
        now_s = self._clock.now()
        patience_s = _patience_s(decision)
        if state.waiting_since_s is None:
            state.waiting_since_s = now_s
            self._ask_again_at(now_s + patience_s)
        return now_s >= state.waiting_since_s + patience_s

    def _covers(self, state: LoadT, device_pages: int) -> bool:
        plan = state.plan
        assert plan is not None
        return plan.first_page <= device_pages < plan.first_page + state.num_good

    def _abandon(self, state: LoadT) -> None:
        self.settle(state, landed=False)
        state.decision = None


def _patience_s(decision: Decision) -> float:
    return max(
        _MIN_PATIENCE_S, decision.recompute_s, _PATIENCE_FACTOR * decision.load_s
    )
