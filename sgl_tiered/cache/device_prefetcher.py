"""Looking ahead over the queue, second half: pages go on to the device before a turn.

Off by default. Where the device has room that neither the running requests nor those
ahead in the queue need, pages of a waiting request that lie in memory are copied into
slots of nobody, and put into the engine's tree once all of their layers are there: the
request then finds them as it finds any device hit. Nothing waits for such a copy. The
engine takes the slots back whenever it is short of room, a request whose turn comes too
early loads its pages itself, and what nobody waits for any more is cancelled.

The engine and the simulator run this very object; they differ in ``DeviceRoom``. All on
one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.plans import Int32s, LoadPlan
from sgl_tiered.policies.prefetch.base import PrefetchPolicy

__all__ = ["DevicePrefetcher", "DeviceRoom", "Waiting"]


class Waiting(Protocol):
    """A request that waits, as `waiting_state.WaitingLoad` knows it.

    Equal to nothing but itself, and kept by whoever knows it: its ``id`` may be another
    one's once it is gone.
    """

    digest: bytes
    tokens: Int32s
    max_pages: int
    memory_only: bool

    @property
    def has_plan(self) -> bool:
        """Whether a load of its own is committed."""
        ...


class DeviceRoom(Protocol):
    """The device, as far as pages can be put there ahead of need."""

    def room_pages(self) -> int:
        """Return the pages that could be had: free, evictable, or a fetch's now."""
        ...

    def submit(self, plan: LoadPlan, state: Waiting, keep: Sequence[Waiting]) -> bool:
        """Start copying; False, and nothing is held, where that is not possible now.

        Never blocks. At its end ``DevicePrefetcher.ended`` is called, once.

        Args:
            plan: what to copy.
            state: the request whose prompt it is.
            keep: requests whose pages on the device are not to be evicted for it.
        """
        ...

    def cancel(self, plan_id: int) -> None:
        """Give the pages back; ``ended`` is called before this returns."""
        ...


@dataclass(slots=True, eq=False)
class _Fetching:
    plan: LoadPlan
    waiters: set[Waiting] = field(default_factory=set)


class DevicePrefetcher:
    """Starts fetches for waiting requests; see the module's docstring.

    Args:
        cache: knows where pages are.
        policy: says when a fetch is due.
        rival_s: predicted time to have pages otherwise, given the first one and how
            many; None for computing them.
    """

    def __init__(
        self,
        cache: TieredCache,
        policy: PrefetchPolicy,
        rival_s: Callable[[int, int], float] | None = None,
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._rival_s = rival_s or cache.planner.compute_s
        # Where the pages go; whoever has a device sets it.
        self.room: DeviceRoom | None = None
        self._fetching: dict[int, _Fetching] = {}
        # Row of the table -> the fetch that brings its page.
        self._row_plans: dict[int, int] = {}
        self.num_started = 0
        self.num_landed = 0
        self.num_cancelled = 0

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is under way."""
        return bool(self._fetching)

    def is_coming(self, state: Waiting) -> bool:
        """Return whether a fetch under way is for a request."""
        return any(state in fetch.waiters for fetch in self._fetching.values())

    def advance(
        self,
        waiting: Sequence[tuple[Waiting, int]],
        others: Sequence[Waiting],
        starts_s: Sequence[float],
        slack_s: float,
        sizes: Sequence[int] = (),
        reserved_pages: int = 0,
    ) -> float:
        """Start what is due and cancel what nobody waits for.

        Args:
            waiting: requests in the order of the queue, each with its pages that are
                on the device.
            others: requests that wait behind these.
            starts_s: when each of ``waiting`` could start, as the policy says.
            slack_s: time until this is called again at the latest.
            sizes: pages that each will hold in all, answer included; without them,
                as many as its prompt.
            reserved_pages: pages that requests which run will still need.

        Returns:
            Seconds until something will be due, if nothing changes; infinite for never.
        """
        room, planner = self.room, self._cache.planner
        self._cancel_unwanted([*(state for state, _ in waiting), *others])
        if room is None or not waiting or planner.load_policy == "never":
            return math.inf
        runs = self._runs(waiting, sizes, room.room_pages() - reserved_pages)
        behind_s = sum(f.plan.predicted_s for f in self._fetching.values())
        loads_s = [
            self._load_s(rows, where[1])
            for rows, where in zip(runs, waiting, strict=True)
        ]
        begins_s = [start_s - behind_s for start_s in starts_s]
        due_s = self._policy.due_in_s(begins_s, loads_s)
        keep = [state for state, _ in waiting]
        for number, (state, first_page) in enumerate(waiting):
            if not loads_s[number]:
                continue
            if due_s[number] > slack_s:
                return due_s[number] - slack_s
            rows = self._not_coming(runs[number])
            if len(rows) < len(runs[number]):
                # An elder's fetch, begun just now, brings its front.
                self._wait_for(runs[number], state)
                continue
            if not self._start(rows, state, first_page, loads_s[number], keep):
                break
        return math.inf

    def ended(self, plan: LoadPlan, *, landed: bool) -> None:
        """Take the end of a fetch: its pages are in the engine's tree, or nowhere."""
        del self._fetching[plan.plan_id]
        for row in plan.pages.tolist():
            if self._row_plans.get(row) == plan.plan_id:
                del self._row_plans[row]
        self.num_landed += landed
        self._cache.promoter.fetches.finish(plan)

    def cancel_all(self) -> None:
        """Cancel every fetch; none is under way afterwards."""
        for plan_id in list(self._fetching):
            self._cancel(plan_id)

    # -- Private ---------------------------------------------------------------

    def _runs(
        self, waiting: Sequence[tuple[Waiting, int]], sizes: Sequence[int], room: int
    ) -> list[Int32s]:
        """Return what to fetch for each, as far as the device has room for it.

        What those ahead of a request will hold comes first, wherever it is now: then
        a page that is evicted for a fetch is one that the very request would evict.
        Pages in use are counted as if they had to be found again; so it is less rather
        than more.
        """
        fetches = self._cache.promoter.fetches
        page = self._cache.config.layout.page_tokens
        paths = fetches.paths([(state.digest, state.tokens) for state, _ in waiting])
        seen: set[int] = set()
        num_needed = 0
        runs = []
        for number, (state, first_page) in enumerate(waiting):
            path = paths[number]
            num_known = sum(len(node.rows) for node in path)
            size = -(-len(state.tokens) // page)
            size = max(size, sizes[number]) if sizes else size
            num_needed += max(size - num_known, 0)
            for node in path:
                if id(node) not in seen:
                    seen.add(id(node))
                    num_needed += len(node.rows)
            rows = fetches.run(path, first_page, state.max_pages)
            if num_needed > room or not _may_use(state):
                rows = rows[:0]
            self._wait_for(rows, state)
            runs.append(rows if len(self._not_coming(rows)) == len(rows) else rows[:0])
        return runs

    def _not_coming(self, rows: Int32s) -> Int32s:
        """Return the leading rows that no fetch under way brings."""
        if self._row_plans:
            for place, row in enumerate(rows.tolist()):
                if row in self._row_plans:
                    return rows[:place]
        return rows

    def _wait_for(self, rows: Int32s, state: Waiting) -> None:
        if self._row_plans:
            for number in {self._row_plans.get(row) for row in rows.tolist()}:
                if number is not None:
                    self._fetching[number].waiters.add(state)

    def _load_s(self, rows: Int32s, first_page: int) -> float:
        """Return the time of a fetch; 0 where there is none, or its rival is faster."""
        if not len(rows):
            return 0.0
        planner = self._cache.planner
        tiers = self._cache.promoter.fetches.tiers_of(rows)
        load_s = sum(planner.load_s(tier, num) for tier, num in tiers.items())
        if planner.may_leave and load_s >= self._rival_s(first_page, len(rows)):
            return 0.0
        return load_s

    def _start(
        self,
        rows: Int32s,
        state: Waiting,
        first_page: int,
        load_s: float,
        keep: Sequence[Waiting],
    ) -> bool:
        """Fetch pages; False where the device takes nothing more now."""
        assert self.room is not None
        fetches = self._cache.promoter.fetches
        plan = fetches.plan(rows, first_page, load_s)
        self._fetching[plan.plan_id] = _Fetching(plan, {state})
        self._row_plans.update(dict.fromkeys(rows.tolist(), plan.plan_id))
        if self.room.submit(plan, state, keep):
            self.num_started += 1
            return True
        self.ended(plan, landed=False)
        return False

    def _cancel_unwanted(self, everybody: Sequence[Waiting]) -> None:
        if not self._fetching:
            return
        fetches = self._cache.promoter.fetches
        alive = {state for state in everybody if _may_use(state)}
        for plan_id, fetching in list(self._fetching.items()):
            fetching.waiters &= alive
            if not fetching.waiters or fetches.is_loading(fetching.plan):
                self._cancel(plan_id)

    def _cancel(self, plan_id: int) -> None:
        assert self.room is not None
        self.num_cancelled += 1
        self.room.cancel(plan_id)


def _may_use(state: Waiting) -> bool:
    """Return whether a request may still find what is fetched for it."""
    return not state.has_plan
