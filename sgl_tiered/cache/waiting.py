"""Requests that wait for pages on their way: decide, start the reads, bound the wait.

The engine's coordinator and the simulator run this very object; they differ only in
what reads from disk (``Staging``) and in what a started load is. Everything here runs
on one thread.

Life of a load: ``prepare`` asks the cache for a decision and, where pages come from
disk, commits it and starts the read into staging memory; ``loadable_pages`` says how
many pages the admission may count on; ``start`` commits what needs no read; ``landed``
frees the staging memory; ``settle`` ends the plan once the engine's own tree holds the
pages, so that no second request moves them again meanwhile.

While a read is under way each ``prepare`` judges it anew, by what has arrived and how
late the rest is: wait on; go without the rest, with what has arrived; or, where the
engine can run a pass over a part of a prompt, split: load what has arrived at the
front, compute on from there, and let the rest be read from its end. ``chunk_end`` says
how far such a pass goes, and ``resume``, asked before each further one, whether the two
have met. A page is computed or loaded, never both in one prompt, so a read that fails,
stalls or comes late costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.planner import PassFacts, Way, weight_among
from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import Resume, StagedT, Staging, WaitingLoad
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.plans import Decision, LoadPlan, TransferResult

__all__ = ["WaitingLoads"]

Int32s = npt.NDArray[np.int32]

_MIN_PATIENCE_S = 0.25
_PATIENCE_FACTOR = 4.0
"""A read or another request's load may take this many times its predicted time, or the
recompute's time where that is longer, before the request goes on without it, whatever
the predictions say."""
_CROWDING_SHARE = 0.25
_ASK_AGAIN_SHARE = 0.1
_LEAST_ASK_S = 1e-3
LATE = "the disk was late, so the pages are recomputed"


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
        self._pass_compute_s = 0.0
        self._pass_load_s = 0.0
        self._pass_tokens = 0
        # Brings pages up ahead of need; whoever has one sets it.
        self.prefetcher: Prefetcher | None = None
        # Whether a pass over a part of a prompt may be run now; the engine sets it.
        self.can_split: Callable[[], bool] = lambda: False

    @property
    def num_staging(self) -> int:
        """Reads from disk that requests wait for."""
        return len(self._reads)

    @property
    def pass_compute_s(self) -> float:
        """Predicted time of computing what was admitted into the last pass."""
        return self._pass_compute_s

    def begin_pass(self, num_waiting: int = 1, *, is_busy: bool = False) -> None:
        """Note that a new pass is being put together; see ``weight_among``."""
        self._cache.planner.compute_weight = weight_among(num_waiting, is_busy=is_busy)
        self._pass_compute_s = self._pass_load_s = 0.0
        self._pass_tokens = 0

    @property
    def pass_tokens(self) -> int:
        """Tokens that those admitted into the last pass will still take room for."""
        return self._pass_tokens

    def admitted(self, first_token: int, num_tokens: int, to_come: int = 0) -> None:
        """Note what a request adds to the pass that is being put together.

        Args:
            first_token, num_tokens: what is computed of it.
            to_come: tokens that it will still take room for, answer included.
        """
        self._pass_tokens += to_come
        self._pass_compute_s += self._compute_s(first_token, num_tokens)

    def crowds(self, first_token: int, num_tokens: int) -> bool:
        """Return whether a request would make the pass notably longer than it is."""
        compute_s = self._compute_s(first_token, num_tokens)
        return compute_s > _CROWDING_SHARE * self._pass_compute_s

    def _compute_s(self, first_token: int, num_tokens: int) -> float:
        page = self._cache.config.layout.page_tokens
        pages = -(-num_tokens // page)
        return self._cache.planner.compute_s(first_token // page, pages)

    def limit(self, state: LoadT, max_pages: int) -> None:
        """Note how many pages of a prompt may be reused from now on.

        A plan that reaches beyond them is given up: the engine has to compute the
        rest of the prompt, and computes nothing of what is loaded. A load that has
        begun is left alone; whoever began it counts on all of it.
        """
        if max_pages == state.max_pages or state.started:
            return
        state.max_pages, state.decision = max_pages, None
        plan = state.plan
        if plan is not None and plan.first_page + plan.num_pages > max_pages:
            self._abandon(state)

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
                return self._ready_or_replan(state)
            self._abandon(state)
        if self.prefetcher is not None and not state.memory_only:
            left_s = self.prefetcher.hold_s(state, device_pages, self._pass_compute_s)
            if left_s is not None:
                return self._await(state, left_s)
        decision = self.decide(state, device_pages, can_split=self.can_split())
        if decision.lookup is Lookup.PENDING:
            return self._waited_long(state, decision)
        if decision.num_from(TierId.DISK) == 0 or not self._stage(state, decision):
            state.waiting_since_s = None
            return True
        if state.plan is not None:
            return self._ready_or_replan(state)
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
            elif state.waits:
                return 0
            else:
                end = state.plan.first_page + self.ready_end(state)
                return max(end - device_pages, 0)
        decision = state.decision
        if decision is None or decision.first_page != device_pages:
            decision = self.decide(state, device_pages)
        if decision.lookup is not Lookup.HIT or decision.num_from(TierId.DISK):
            return 0
        return decision.num_pages

    def ready_end(self, state: LoadT) -> int:
        """Return the position in the plan up to which it can be loaded at once."""
        return state.front if state.is_split else state.num_good

    def start(self, state: LoadT) -> LoadPlan | None:
        """Commit what ``loadable_pages`` promised; None where the cache moved on.

        The pages to load are the plan's last ones before ``ready_end``.
        """
        if state.plan is None:
            if state.decision is None:
                return None
            state.plan = self._commit(state, state.decision)
            state.decision = None
            if state.plan is None:
                return None
            state.num_good = state.plan.num_pages
        state.started = True
        self._note_load(state.plan, 0, self.ready_end(state))
        return state.plan

    def chunk_end(self, state: LoadT) -> int | None:
        """Return after which page the next pass over a split prompt should end."""
        if state.plan is None or not state.is_split or state.back_from is not None:
            return None
        return state.plan.first_page + state.compute_to

    def resume(self, state: LoadT, computed_pages: int) -> Resume:
        """Say how a split prompt goes on after a pass.

        Args:
            state: of a request for which ``chunk_end`` gave a page.
            computed_pages: leading pages of the prompt that are on the device.

        Where pages are to be loaded, the load counts as started.
        """
        plan = state.plan
        if plan is None or state.back_from is not None:
            return Resume()
        done = computed_pages - plan.first_page
        missing = self._missing(state)
        missing = missing[missing >= done]
        num_pages = plan.num_pages
        if done >= num_pages or done < 0:
            self._abandon(state)
            return Resume()
        if not len(missing):
            state.back_from, state.started = done, True
            self._note_load(plan, done, num_pages)
            return Resume(load_pages=num_pages - done)
        until = int(missing[-1]) + 1
        if state.staged is None or state.staged.done:
            return self._compute_on(state, until - done, until < num_pages)
        going = self._cache.planner.judge(
            first_page=plan.first_page,
            num_pages=num_pages,
            num_ready=done,
            num_missing=until - done,
            num_tokens=len(state.tokens),
            left_s=self._left_s(state),
            can_split=True,
        )
        num_next = going.compute_pages
        if going.way is Way.WAIT:
            # The read is nearly over. A pass of that length costs its overhead at most.
            left_s = self._left_s(state)
            first = plan.first_page + done
            num_next = self._cache.planner.pages_within(first, until - done, left_s)
        if going.way is not Way.GO:
            return Resume(compute_pages=num_next)
        state.report.replans.append("the back was late, so what is missing is computed")
        state.staged.cancel()
        return self._compute_on(state, until - done, until < num_pages)

    def published(self, state: LoadT, num_pages: int) -> None:
        """Note that the engine's tree holds the first ``num_pages`` of the prompt."""
        plan = state.plan
        if plan is None:
            return
        if not state.is_split or state.back_from is not None:
            if state.started:
                self.settle(state, landed=True)
            return
        state.started = False
        if num_pages >= plan.first_page + plan.num_pages:
            # It was computed to its end, so nothing of the back is wanted.
            self.settle(state, landed=state.front > 0)

    def landed(self, state: LoadT) -> None:
        """Note that nothing reads the staging memory for this load any more."""
        if state.is_split and state.back_from is None and state.plan is not None:
            return
        self._release(state)

    def settle(self, state: LoadT, *, landed: bool) -> None:
        """End a plan: its pages are in the engine's tree now, or lost."""
        self._release(state)
        plan, state.plan = state.plan, None
        state.started = False
        if plan is not None:
            self._reads.pop(plan.plan_id, None)
            bad = np.array(sorted(set(state.bad_pages)), dtype=np.int32)
            unused = np.arange(self.ready_end(state), plan.num_pages, dtype=np.int32)
            if state.is_split and state.back_from is not None:
                unused = unused[unused < state.back_from]
            if landed:
                used = np.ones(plan.num_pages, np.bool_)
                used[unused] = False
                state.report.add_pages(plan, used)
            self._after_loads(
                state,
                partial(
                    self._cache.finish_load,
                    plan,
                    landed=landed,
                    bad_pages=bad,
                    unused=unused,
                ),
            )
        state.bad_pages = []
        state.num_good = state.front = state.compute_to = 0
        state.is_split = state.waits = False
        state.back_from = None

    def stage_finished(
        self, plan: LoadPlan, positions: Int32s, result: TransferResult
    ) -> None:
        """Take the end of a read from disk: pages up to the first bad one are good.

        Args:
            plan: that was read for.
            positions: in it of the pages that were attempted.
            result: one element per position.
        """
        state = self._reads.pop(plan.plan_id, None)
        if state is None or state.plan is not plan:
            return
        state.report.read_s = result.seconds
        bad = positions[~result.ok]
        state.bad_pages.extend(int(page) for page in bad)
        if len(bad):
            state.reason = result.error or "a page failed its check"
            state.report.replans.append(state.reason)
        if state.waits:
            state.waits = False
            if len(bad):
                state.num_good = int(bad.min())

    def decide(
        self, state: LoadT, device_pages: int, *, can_split: bool = False
    ) -> Decision:
        """Ask the cache anew."""
        memory_only = state.memory_only or self._staging is None
        decision = self._cache.lookup(
            state.digest,
            state.tokens,
            device_pages,
            max_pages=max(state.max_pages - device_pages, 0),
            tiers_allowed=self._memory_tiers if memory_only else None,
            facts=self._facts(can_split),
        )
        state.decision = decision
        state.reason = decision.reason
        state.report.decision = decision
        return decision

    def _facts(self, can_split: bool) -> PassFacts:
        wait_s = {}
        num_ahead = sum(_num_left(other) for other in self._reads.values())
        if num_ahead:
            wait_s[TierId.DISK] = self._cache.planner.load_s(TierId.DISK, num_ahead)
        return PassFacts(wait_s, self._pass_compute_s, self._pass_load_s, can_split)

    def _note_load(self, plan: LoadPlan, begin: int, end: int) -> None:
        """Add a load's time to that of the pass which it will run under."""
        part = plan.part(begin, end)
        self._pass_load_s += self._cache.planner.direct_s(*part)

    def _commit(self, state: LoadT, decision: Decision) -> LoadPlan | None:
        """Commit a decision; None where the cache has moved on.

        All plans are made here, and none reaches beyond what may be reused.
        """
        if decision.first_page + decision.num_pages > state.max_pages:
            return None
        return self._cache.commit_load(decision)

    def _stage(self, state: LoadT, decision: Decision) -> bool:
        """Commit and start reading; False where waiting for it would be in vain.

        True without a plan means that others hold the staging memory for now.
        """
        staging = self._staging
        assert staging is not None
        disk = _to_read(decision)
        largest = staging.largest_read_pages
        if len(disk) > largest:
            # Load what fits; the rest is computed. A larger staging size avoids it.
            decision = self._cache.lookup(
                state.digest,
                state.tokens,
                decision.first_page,
                max_pages=int(np.flatnonzero(decision.tiers == TierId.DISK)[largest]),
                facts=self._facts(False),
            )
            disk = _to_read(decision)
            if len(disk) == 0 or len(disk) > largest:
                state.memory_only = True
                return False
        if len(disk) > staging.num_free_rows:
            return self._wait_for_rows(state)
        now_s = self._clock.now()
        queue_s = self._facts(False).wait_s.get(TierId.DISK, 0.0)
        plan = self._commit(state, decision)
        if plan is None:
            return False
        staged = staging.try_submit(plan, disk)
        if staged is None:
            self._cache.finish_load(plan, landed=False)
            return self._wait_for_rows(state)
        state.plan, state.staged, state.decision = plan, staged, None
        state.report.decision = decision
        state.waits, state.num_good = True, plan.num_pages
        state.patience_s = _patience_s(decision) + queue_s
        state.give_up_at_s = None
        state.ask_again_s = -1.0
        state.expected_s = (
            now_s + queue_s + self._cache.planner.load_s(TierId.DISK, len(disk))
        )
        self._reads[plan.plan_id] = state
        self._num_holding += 1
        if decision.split_at:
            first_disk = int((plan.tiers == TierId.DISK).argmax())
            self._split(state, first_disk, decision.split_at)
        return True

    def _split(self, state: LoadT, front: int, compute_to: int) -> None:
        assert state.staged is not None
        state.staged.turn_round()
        state.is_split, state.waits = True, False
        state.report.is_split = True
        state.front, state.compute_to = front, compute_to

    def _wait_for_rows(self, state: LoadT) -> bool:
        """Return whether somebody's read or load will free staging memory."""
        if not self._num_holding:
            # Nobody will, so waiting would never end.
            state.memory_only = True
        return self._num_holding > 0

    def _ready_or_replan(self, state: LoadT) -> bool:
        """Return True once the request can go on, with a changed plan if need be."""
        if not state.waits:
            return True
        now_s = self._clock.now()
        if state.give_up_at_s is None:
            state.give_up_at_s = now_s + state.patience_s
            self._ask_again_at(state.give_up_at_s)
        if self._cache.planner.may_leave and self._replan(state):
            return True
        if now_s < state.give_up_at_s:
            self._ask_again(state)
            return False
        self._go_without(state)
        return True

    def _await(self, state: LoadT, left_s: float) -> bool:
        """Wait for promoted pages, or go without them; True where the request goes."""
        now_s = self._clock.now()
        if state.waiting_since_s is None:
            state.waiting_since_s = now_s
            state.patience_s = max(_MIN_PATIENCE_S, _PATIENCE_FACTOR * left_s)
        if left_s > 0.0 and now_s < state.waiting_since_s + state.patience_s:
            self._ask_again_at(now_s + max(left_s, _LEAST_ASK_S))
            return False
        state.memory_only = True
        state.decision = state.waiting_since_s = None
        state.reason = LATE
        state.report.replans.append(LATE)
        return True

    def _replan(self, state: LoadT) -> bool:
        """Judge a read under way; True where the request goes on without waiting."""
        plan, staged = state.plan, state.staged
        assert plan is not None
        assert staged is not None
        missing = self._missing(state)
        if not len(missing):
            # Everything is there; the note of the read's end is on its way.
            return False
        num_ready = int(missing[0])
        going = self._cache.planner.judge(
            first_page=plan.first_page,
            num_pages=plan.num_pages,
            num_ready=num_ready,
            num_missing=int(missing[-1]) + 1 - num_ready,
            num_tokens=len(state.tokens),
            left_s=self._left_s(state),
            can_split=self.can_split(),
            busy_s=self._pass_compute_s,
        )
        if going.way is Way.WAIT:
            return False
        if going.way is Way.GO:
            self._go_without(state)
            return True
        state.report.replans.append(
            f"{num_ready} pages are there; the next {going.compute_pages} are computed "
            "while the rest is read"
        )
        self._split(state, num_ready, num_ready + going.compute_pages)
        return True

    def _go_without(self, state: LoadT) -> None:
        """Give up what has not been read; what has arrived at the front is loaded."""
        plan, staged = state.plan, state.staged
        assert plan is not None
        assert staged is not None
        state.memory_only = True
        missing = self._missing(state)
        num_ready = int(missing[0]) if len(missing) else plan.num_pages
        staged.cancel()
        if num_ready:
            state.num_good, state.waits = num_ready, False
        else:
            self._abandon(state)
        state.reason = LATE
        state.report.replans.append(f"{LATE}; {num_ready} of {plan.num_pages} had come")

    def _compute_on(self, state: LoadT, num_pages: int, has_back: bool) -> Resume:
        """Compute what will not come, and load what lies behind it afterwards."""
        if has_back:
            return Resume(compute_pages=num_pages)
        self._abandon(state)
        return Resume()

    def _missing(self, state: LoadT) -> Int32s:
        """Return the positions of the plan that cannot be loaded (yet)."""
        plan, staged = state.plan, state.staged
        assert plan is not None
        is_missing = plan.tiers == TierId.DISK
        if staged is not None:
            is_missing[staged.arrived] = False
        return np.flatnonzero(is_missing).astype(np.int32)

    def _left_s(self, state: LoadT) -> float:
        """Return the predicted time until a read under way has ended."""
        staged, plan = state.staged, state.plan
        assert staged is not None
        assert plan is not None
        planner = self._cache.planner
        num_ahead = 0
        for plan_id, other in self._reads.items():
            if plan_id == plan.plan_id:
                break
            num_ahead += _num_left(other)
        num_left, num_arrived = staged.num_left, len(staged.arrived)
        left_s = planner.load_s(TierId.DISK, num_left + num_ahead)
        now_s = self._clock.now()
        overdue_s = now_s - state.expected_s
        if overdue_s <= 0:
            # Of the parts under way nobody knows how much has come: by schedule.
            least = planner.load_s(TierId.DISK, staged.num_unbegun + num_ahead)
            return min(left_s, max(least, -overdue_s))
        # It is as late as it is: it may well take as long again.
        left_s = max(left_s, overdue_s)
        if num_arrived and staged.started_s is not None:
            page_s = (now_s - staged.started_s) / num_arrived
            left_s = max(left_s, num_left * page_s)
        return left_s

    def _ask_again(self, state: LoadT) -> None:
        """Ask for another look when the read should have ended, then ever later."""
        now_s = self._clock.now()
        if state.ask_again_s > now_s:
            return
        late_s = max(_ASK_AGAIN_SHARE * (now_s - state.expected_s), _LEAST_ASK_S)
        state.ask_again_s = max(state.expected_s, now_s + late_s)
        self._ask_again_at(state.ask_again_s)

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
        end = state.compute_to if state.is_split else state.num_good
        return plan.first_page <= device_pages < plan.first_page + end

    def _abandon(self, state: LoadT) -> None:
        self.settle(state, landed=False)
        state.decision = None

    def _release(self, state: LoadT) -> None:
        if state.staged is not None and self._staging is not None:
            self._after_loads(state, partial(self._staging.release, state.staged))
            state.staged = None
            self._num_holding -= 1

    def _after_loads(self, state: LoadT, effect: Callable[[], None]) -> None:
        """Give back what loads of a request read, once none of them runs any more.

        At once, unless an engine says that a load may outlive its request.
        """
        del state
        effect()


def _num_left(state: WaitingLoad[StagedT]) -> int:
    return 0 if state.staged is None else state.staged.num_left


def _to_read(decision: Decision) -> Int32s:
    """Return the positions of a decision's pages that are read from disk."""
    disk = np.flatnonzero(decision.tiers == TierId.DISK).astype(np.int32)
    return disk[disk >= decision.split_at]


def _patience_s(decision: Decision) -> float:
    return max(
        _MIN_PATIENCE_S, decision.recompute_s, _PATIENCE_FACTOR * decision.load_s
    )
