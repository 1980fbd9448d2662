"""Looking ahead over the queue: pages come up from the disk before they are needed.

The engine and the simulator run this very object; they differ only in what reads
(``Reader``) and in how they tell of the queue. ``advance`` walks the first ``window``
waiting requests in their order, finds what only the disk has of them, and starts what
the policy says is due, as promotions into the first memory tier: copies that every
request can use. A page is read once, whoever waits for it. Room is made from what none
of these requests needs; where there is no such room, nothing is read ahead.

A promotion that nobody waits for any more (an abort, an admission without it) is
cancelled, and its unread rest left out. A request that the engine would take while its
pages are on their way asks ``hold_s``, waits or goes without (`waiting.py`), and what
is waited for goes before all other reads. Everything here runs on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np

from sgl_tiered.cache.device_prefetcher import DevicePrefetcher, Waiting
from sgl_tiered.cache.planner import Way
from sgl_tiered.cache.promotion import Whereabouts
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, PromotePlan, TransferResult
from sgl_tiered.policies.prefetch.base import Decoding, PrefetchPolicy, QueueFacts

__all__ = [
    "DEFAULT_WINDOW",
    "Prefetcher",
    "Read",
    "Reader",
    "Waiting",
    "measured_tpot_s",
]

DEFAULT_WINDOW = 16
"""Requests looked at; each costs a walk of the index, some tens of microseconds."""
_LEAST_S = 1e-4
"""A read whose predicted end has passed is not there yet."""
_MIN_PATIENCE_S = 0.25
_PATIENCE_FACTOR = 4.0
"""A promotion may take this many times its predicted time before requests go without
it, whatever the predictions say."""


class Read(Protocol):
    """A promotion under way."""

    @property
    def num_left(self) -> int:
        """Pages still to come; 0 once it ended."""
        ...

    def hurry(self) -> None:
        """Let it go before other transfers: a request is held up by it."""
        ...

    def cancel(self) -> None:
        """Leave out what was not begun; its end is told as ever."""
        ...


class Reader(Protocol):
    """Reads promotions one after the other, in the order of their submission."""

    def submit(self, plan: PromotePlan) -> Read | None:
        """Start reading; None where it takes nothing more now. Never blocks."""
        ...


@dataclass(slots=True, eq=False)
class _Promoting:
    plan: PromotePlan
    read: Read
    expected_s: float
    give_up_s: float
    waiters: set[Waiting] = field(default_factory=set)
    is_cancelled: bool = False


class Prefetcher:
    """Starts promotions for waiting requests; see the module's docstring.

    Args:
        cache: knows where pages are.
        policy: says when a read is due.
        reader: reads; not asked where there is no disk.
        clock: says how late a read is.
        window: requests at the head of the queue that are looked at.
        device: takes pages further, to the device; None to stop at the host.
    """

    def __init__(
        self,
        cache: TieredCache,
        policy: PrefetchPolicy,
        reader: Reader | None,
        clock: Clock,
        window: int = DEFAULT_WINDOW,
        device: DevicePrefetcher | None = None,
    ) -> None:
        self.device = device
        self._cache = cache
        self._policy = policy
        self._reader = reader
        self._clock = clock
        self._window = window
        self._promotions: dict[int, _Promoting] = {}
        # Row of the table -> the promotion that brings its page.
        self._row_plans: dict[int, int] = {}
        self.num_started = 0
        self.num_cancelled = 0

    @property
    def policy(self) -> PrefetchPolicy:
        """The policy."""
        return self._policy

    @property
    def window(self) -> int:
        """Requests that are looked at."""
        return self._window

    @property
    def is_busy(self) -> bool:
        """Whether a promotion or a fetch is under way."""
        is_fetching = self.device is not None and self.device.is_busy
        return is_fetching or bool(self._promotions)

    def advance(
        self,
        waiting: Sequence[tuple[Waiting, int]],
        *,
        others: Sequence[Waiting] = (),
        busy_s: float = 0.0,
        is_blocked: bool = False,
        tpot_s: float = 0.0,
        decoding: Sequence[Decoding] = (),
        sizes: Sequence[int] = (),
        reserved_pages: int = 0,
    ) -> float:
        """Start what is due and cancel what nobody waits for.

        Args:
            waiting: requests in the order of the queue, each with its pages that are
                on the device; those beyond the window are not looked at.
            others: requests that wait behind these.
            busy_s, is_blocked, tpot_s, decoding: see ``QueueFacts``.
            sizes, reserved_pages: see ``DevicePrefetcher.advance``.

        Returns:
            Seconds until something will be due, if nothing changes; infinite for never.
        """
        if not self._policy.looks_ahead:
            return math.inf
        if self._cache.promoter.rests:
            self._cancel_promotions()
        waiting = waiting[: self._window]
        places = [self._look(state, first_page) for state, first_page in waiting]
        self._note_waiters(waiting, others, places)
        services_s = [
            self._service_s(state, first_page, place)
            for (state, first_page), place in zip(waiting, places, strict=True)
        ]
        facts = QueueFacts(
            tuple(services_s), busy_s, is_blocked, tpot_s, tuple(decoding)
        )
        starts_s = self._policy.starts_s(facts)
        # It is asked again when the pass or step under way has ended, not before.
        slack_s = max(busy_s, tpot_s)
        due_s = self._promote(waiting, places, starts_s, slack_s)
        if self.device is None:
            return due_s
        heads = (waiting, others, starts_s, slack_s, sizes[: self._window])
        return min(due_s, self.device.advance(*heads, reserved_pages))

    def hold_s(self, state: Waiting, first_page: int, busy_s: float) -> float | None:
        """Say whether a request that could be admitted should wait for promoted pages.

        Those that it waits for hurry from now on.

        Args:
            state: of the request.
            first_page: its pages that are on the device.
            busy_s: predicted time of the pass that it would join, without it.

        Returns:
            Seconds until they should be there; 0 where going without them is faster;
            None where nothing of it is on its way.
        """
        if not self._promotions:
            return None
        place = self._look(state, first_page)
        numbers = self._plans_of(place)
        if not numbers:
            return None
        now_s = self._clock.now()
        if any(self._promotions[number].give_up_s < now_s for number in numbers):
            return 0.0
        left_s = max(self._left_s(number) for number in numbers)
        # Of the pages before the first that is to come some may be on disk only; they
        # are read, or computed, afterwards.
        missing = np.union1d(place.wanted, place.coming)
        num_ready = int(missing[0])
        planner = self._cache.planner
        going = planner.judge(
            first_page=first_page,
            num_pages=place.num_found,
            num_ready=num_ready,
            num_missing=int(place.coming[-1]) + 1 - num_ready,
            num_tokens=len(state.tokens),
            left_s=left_s,
            can_split=False,
            busy_s=busy_s,
        )
        if planner.may_leave and going.way is Way.GO:
            return 0.0
        for number in numbers:
            promoting = self._promotions[number]
            promoting.waiters.add(state)
            promoting.read.hurry()
        return max(left_s, _LEAST_S)

    def finished(
        self, plan: PromotePlan, positions: Int32s, result: TransferResult
    ) -> None:
        """Take the end of a promotion.

        Args:
            plan: as submitted.
            positions: in it of the pages that were read.
            result: one element per position.
        """
        del self._promotions[plan.plan_id]
        for row in plan.pages.tolist():
            if self._row_plans.get(row) == plan.plan_id:
                del self._row_plans[row]
        self._cache.promoter.finish(plan, positions, result)

    def cancel_all(self) -> None:
        """Cancel everything (the cache is being reset); promotions end as ever."""
        self._cancel_promotions()
        if self.device is not None:
            self.device.cancel_all()

    # -- Private ---------------------------------------------------------------

    def _promote(
        self,
        waiting: Sequence[tuple[Waiting, int]],
        places: Sequence[Whereabouts],
        starts_s: Sequence[float],
        slack_s: float,
    ) -> float:
        """Start the promotions that are due; return when the next one will be."""
        behind_s = self._behind_s()
        loads_s = self._worth_s(waiting, places, starts_s, behind_s)
        due_s = self._policy.due_in_s([s - behind_s for s in starts_s], loads_s)
        for number, (state, first_page) in enumerate(waiting):
            if not loads_s[number]:
                continue
            if due_s[number] > slack_s:
                return due_s[number] - slack_s
            if not self._start(state, first_page, waiting):
                break
        return math.inf

    def _cancel_promotions(self) -> None:
        for promoting in self._promotions.values():
            self._cancel(promoting)
        # Nobody waits for what was cancelled.
        self._row_plans.clear()

    def _look(self, state: Waiting, first_page: int) -> Whereabouts:
        prompt = (state.digest, state.tokens)
        return self._cache.promoter.look(prompt, first_page, state.max_pages)

    def _plans_of(self, place: Whereabouts) -> set[int]:
        rows = place.rows[place.coming].tolist()
        # A copy in flight that no promotion makes is an offload's.
        return {self._row_plans[row] for row in rows if row in self._row_plans}

    def _note_waiters(
        self,
        waiting: Sequence[tuple[Waiting, int]],
        others: Sequence[Waiting],
        places: Sequence[Whereabouts],
    ) -> None:
        if not self._promotions:
            return
        everybody = [*(state for state, _ in waiting), *others]
        alive = {state for state in everybody if _may_wait(state)}
        for promoting in self._promotions.values():
            promoting.waiters &= alive
        for (state, _), place in zip(waiting, places, strict=True):
            if _may_wait(state):
                for number in self._plans_of(place):
                    self._promotions[number].waiters.add(state)
        for promoting in self._promotions.values():
            if not promoting.waiters:
                self._cancel(promoting)

    def _cancel(self, promoting: _Promoting) -> None:
        if not promoting.is_cancelled:
            promoting.is_cancelled = True
            promoting.read.cancel()
            self.num_cancelled += 1

    def _service_s(self, state: Waiting, first_page: int, place: Whereabouts) -> float:
        """Return the time to compute what is found nowhere."""
        page = self._cache.config.layout.page_tokens
        num_pages = -(-len(state.tokens) // page)
        known = first_page + place.num_found
        return self._cache.planner.compute_s(known, max(num_pages - known, 1))

    def _worth_s(
        self,
        waiting: Sequence[tuple[Waiting, int]],
        places: Sequence[Whereabouts],
        starts_s: Sequence[float],
        behind_s: float,
    ) -> list[float]:
        """Return the time of each one's read; 0 where computing is no slower.

        A read that ends before its request can start costs nothing. What is read for
        one request is not read again for a later one.
        """
        planner = self._cache.planner
        if planner.load_policy == "never" or self._cache.promoter.rests:
            return [0.0] * len(waiting)
        loads_s = []
        seen: set[int] = set()
        end_s = behind_s
        for (state, first_page), place, start_s in zip(
            waiting, places, starts_s, strict=True
        ):
            rows = [row for row in place.rows[place.wanted].tolist() if row not in seen]
            load_s = 0.0
            if rows and _may_wait(state):
                load_s = planner.load_s(TierId.DISK, len(rows))
                late_s = max(0.0, end_s + load_s - start_s)
                compute_s = planner.compute_s(
                    first_page + int(place.wanted[0]), len(place.wanted)
                )
                saves_s = planner.compute_weight * compute_s
                if planner.may_leave and late_s >= saves_s:
                    load_s = 0.0
                else:
                    end_s += load_s
                    seen.update(rows)
            loads_s.append(load_s)
        return loads_s

    def _start(
        self,
        state: Waiting,
        first_page: int,
        waiting: Sequence[tuple[Waiting, int]],
    ) -> bool:
        """Promote what a request lacks; False where nothing more can be started."""
        promoter = self._cache.promoter
        needed = [(other.digest, other.tokens) for other, _ in waiting]
        prompt = (state.digest, state.tokens)
        plan = promoter.plan(prompt, first_page, state.max_pages, needed)
        if plan is None:
            return False
        read = None if self._reader is None else self._reader.submit(plan)
        if read is None:
            nothing = TransferResult.failed(0, 0.0, "")
            promoter.finish(plan, np.zeros(0, np.int32), nothing)
            return False
        load_s = self._cache.planner.load_s(TierId.DISK, plan.num_pages)
        takes_s = self._behind_s() + load_s
        now_s = self._clock.now()
        self._promotions[plan.plan_id] = _Promoting(
            plan,
            read,
            now_s + takes_s,
            now_s + max(_MIN_PATIENCE_S, _PATIENCE_FACTOR * takes_s),
            {state},
        )
        self._row_plans.update(dict.fromkeys(plan.pages.tolist(), plan.plan_id))
        self.num_started += 1
        return True

    def _behind_s(self) -> float:
        """Return the predicted time until every promotion under way has ended."""
        num_left = sum(p.read.num_left for p in self._promotions.values())
        return self._cache.planner.load_s(TierId.DISK, num_left) if num_left else 0.0

    def _left_s(self, number: int) -> float:
        """Return the predicted time until one promotion has ended."""
        lefts = list(accumulate(p.read.num_left for p in self._promotions.values()))
        num_left = lefts[list(self._promotions).index(number)]
        left_s = self._cache.planner.load_s(TierId.DISK, num_left) if num_left else 0.0
        # What is late may well take as long again.
        overdue_s = self._clock.now() - self._promotions[number].expected_s
        return max(left_s, overdue_s)


def _may_wait(state: Waiting) -> bool:
    """Return whether a request may still use what is promoted for it."""
    return not (state.has_plan or state.memory_only)


def measured_tpot_s(passed: Sequence[tuple[int, float]]) -> float:
    """Return the time per output token; 0 where nothing is known.

    Args:
        passed: of each request that decodes, its tokens so far and the time since the
            first of them.
    """
    num_gaps = sum(max(num_tokens - 1, 0) for num_tokens, _ in passed)
    past_s = sum(past_s for num_tokens, past_s in passed if num_tokens > 1)
    return past_s / num_gaps if num_gaps else 0.0
