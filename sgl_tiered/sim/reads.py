"""Reads from disk in simulated time: for one request, or ahead of need into the host.

As in the product a read comes in parts, in the order of its pages, and can be turned
round or left out part by part. A promotion's parts come one after the other with those
of other promotions; a request's own read shares the link with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from sgl_tiered.core.plans import Int32s, LoadPlan, PromotePlan
from sgl_tiered.sim.links import Link

__all__ = ["SimPromotions", "SimRead", "SimStaging"]

_UNBOUNDED = 1 << 40


class SimRead:
    """A read from disk in simulated time; ``subject`` is the request that waits.

    Parts of ``part_pages`` come one after the other, the next one asked for when one
    has arrived; as in the product they can be turned round or left out.
    """

    def __init__(
        self,
        plan: LoadPlan | PromotePlan,
        positions: Int32s,
        part_pages: int,
        ask: Callable[[int, Callable[[], None]], None],
        on_end: Callable[[SimRead], None],
        now: Callable[[], float],
    ) -> None:
        self.plan = plan
        self.positions = positions
        self.done = False
        self.subject = -1
        self.started_s: float | None = now()
        self._part_pages = part_pages
        self._ask = ask
        self._on_end = on_end
        self._first, self._last = 0, len(positions)
        self._is_turned = False
        self._has_come = np.zeros(len(positions), np.bool_)
        self._next()

    @property
    def arrived(self) -> Int32s:
        """Positions of the plan that have come."""
        return self.positions[self._has_come]

    @property
    def num_left(self) -> int:
        """Pages still to come."""
        return 0 if self.done else len(self.positions) - int(self._has_come.sum())

    @property
    def num_unbegun(self) -> int:
        """Pages that were not asked for."""
        return max(self._last - self._first, 0)

    def turn_round(self) -> None:
        """Let what was not asked for come from its end on."""
        self._is_turned = True

    def cancel(self) -> None:
        """Leave out what was not asked for."""
        self._last = self._first

    def _next(self) -> None:
        num = min(self._part_pages, self._last - self._first)
        if num <= 0:
            self.done = True
            self._on_end(self)
            return
        if self._is_turned:
            self._last -= num
            part = slice(self._last, self._last + num)
        else:
            self._first += num
            part = slice(self._first - num, self._first)

        def come() -> None:
            self._has_come[part] = True
            self._next()

        self._ask(num, come)


class SimStaging:
    """Rows of memory for reads from disk, and the link over which they come.

    Args:
        link: from the disk.
        num_rows: pages that can be staged; 0 for no bound.
        page_bytes: of a page.
        part_pages: pages that are asked for at a time.
        now: tells the time.
        on_end: called at the end of each read.
    """

    def __init__(
        self,
        link: Link,
        num_rows: int,
        page_bytes: int,
        part_pages: int,
        now: Callable[[], float],
        on_end: Callable[[SimRead], None],
    ) -> None:
        self._link = link
        self._page_bytes = page_bytes
        self._part_pages = part_pages
        self._now = now
        self._on_end = on_end
        self.largest_read_pages = num_rows or _UNBOUNDED
        self.num_free_rows = self.largest_read_pages

    def try_submit(self, plan: LoadPlan, positions: Int32s) -> SimRead | None:
        """Start reading; None if rows are short."""
        if len(positions) > self.num_free_rows:
            return None
        self.num_free_rows -= len(positions)
        return SimRead(
            plan, positions, self._part_pages, self._ask, self._on_end, self._now
        )

    def release(self, staged: SimRead) -> None:
        """Give the rows back.

        Of a read that is given up only the part under way goes on, and its memory
        counts as free: as in the product its rows are freed when it has come.
        """
        staged.cancel()
        self.num_free_rows += len(staged.positions)

    def _ask(self, num_pages: int, on_end: Callable[[], None]) -> None:
        self._link.submit(num_pages * self._page_bytes, on_end)


class SimPromotions:
    """Reads of promotions, one after the other, over the same link.

    Args:
        link: from the disk.
        page_bytes: of a page.
        part_pages: pages that are asked for at a time.
        now: tells the time.
        on_end: called with the plan and the positions that have come, at each end.
    """

    def __init__(
        self,
        link: Link,
        page_bytes: int,
        part_pages: int,
        now: Callable[[], float],
        on_end: Callable[[PromotePlan, Int32s], None],
    ) -> None:
        self._link = link
        self._page_bytes = page_bytes
        self._part_pages = part_pages
        self._now = now
        self._on_end = on_end
        self._queue: deque[_Promotion] = deque()

    def submit(self, plan: PromotePlan) -> _Promotion:
        """Read it when those before have ended."""
        promotion = _Promotion(plan)
        self._queue.append(promotion)
        if len(self._queue) == 1:
            self._begin()
        return promotion

    def _begin(self) -> None:
        promotion = self._queue[0]
        plan = promotion.plan
        num_pages = 0 if promotion.is_cancelled else plan.num_pages
        promotion.read = SimRead(
            plan,
            np.arange(num_pages, dtype=np.int32),
            self._part_pages,
            self._ask,
            self._end,
            self._now,
        )

    def _end(self, read: SimRead) -> None:
        read.done = True
        promotion = self._queue.popleft()
        self._on_end(promotion.plan, read.arrived)
        if self._queue:
            self._begin()

    def _ask(self, num_pages: int, on_end: Callable[[], None]) -> None:
        self._link.submit(num_pages * self._page_bytes, on_end)


class _Promotion:
    """One of them; it may be cancelled before it begins."""

    def __init__(self, plan: PromotePlan) -> None:
        self.plan = plan
        self.read: SimRead | None = None
        self.is_cancelled = False

    @property
    def num_left(self) -> int:
        """Pages still to come."""
        if self.is_cancelled:
            return 0
        return self.plan.num_pages if self.read is None else self.read.num_left

    def hurry(self) -> None:
        """Nothing: the link is shared fairly."""

    def cancel(self) -> None:
        """Leave out what was not asked for."""
        self.is_cancelled = True
        if self.read is not None:
            self.read.cancel()
