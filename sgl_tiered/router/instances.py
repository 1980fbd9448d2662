"""One server behind the router: whether it can serve, and how much it has to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sgl_tiered.router.config import InstanceConfig
from sgl_tiered.router.feed import EventFeed
from sgl_tiered.router.tree import Holder

__all__ = ["Instance", "LoadReport", "Ticket"]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a server says of itself (``/v1/loads``), summed over its ranks.

    Attributes:
        asked_s: when it was asked; what was sent later is not in it.
        num_requests: running or waiting.
        waiting_tokens: prompt tokens that are still to be computed.
    """

    asked_s: float
    num_requests: int
    waiting_tokens: int


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's share of an instance's load.

    Attributes:
        sent_s: when it was sent.
        num_tokens: prompt tokens that were to be computed for it.
        is_waiting: no byte of the answer has come yet.
        give_up: ends the wait for that byte at once; None where nobody waits.
    """

    sent_s: float
    num_tokens: int
    is_waiting: bool = True
    give_up: Callable[[], None] | None = None


@dataclass(eq=False)
class Instance:
    """What the router knows of a server. The loop's own; nothing locks.

    Attributes:
        config: what it was added with.
        is_up: it answers.
        is_draining: it is to get no further requests.
        num_failures: probes that failed in a row.
        holders: its publishers of events in the tree of its kind, one at least.
        feeds: that follow them; none for a server without events.
        tasks: that probe and follow it.
        report: the last load that it told, if it tells.
        tells_load: False once it said that it does not.
        probed: set once it was asked for the first time.
        on_load: called with the requests under way as they change.
        on_change: called when ``load`` changed for the sake of a request of ours.
    """

    config: InstanceConfig
    is_up: bool = False
    is_draining: bool = False
    num_failures: int = 0
    holders: list[Holder] = field(default_factory=list)
    feeds: list[EventFeed] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    report: LoadReport | None = None
    tells_load: bool = True
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    on_load: Callable[[int], None] | None = None
    on_change: Callable[[Instance], None] | None = None
    _tickets: set[Ticket] = field(default_factory=set)
    _told_s: float = 0.0
    _num_ended: int = 0
    _num_ended_unasked: int = 0

    @property
    def name(self) -> str:
        """The name of the configuration."""
        return self.config.name

    @property
    def is_available(self) -> bool:
        """Whether a request may be sent to it."""
        return self.is_up and not self.is_draining

    @property
    def num_under_way(self) -> int:
        """Requests of this router that have not ended."""
        return len(self._tickets)

    def open(self, now_s: float, num_tokens: int) -> Ticket:
        """Count a request that is sent now; ``close`` it whatever becomes of it."""
        ticket = Ticket(now_s, num_tokens)
        self._tickets.add(ticket)
        self._tell()
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Count a request as ended; a second time changes nothing."""
        ticket.is_waiting = False
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._num_ended_unasked += 1
            if self.report is not None and ticket.sent_s <= self._told_s:
                self._num_ended += 1
        self._tell()

    def answered(self, ticket: Ticket) -> None:
        """Count a request's prompt as computed: its answer's first byte came."""
        ticket.is_waiting = False
        if self.on_change is not None:
            self.on_change(self)

    def give_up(self) -> None:
        """End the waits for an instance that is down: another one can serve them."""
        for ticket in list(self._tickets):
            if ticket.is_waiting and ticket.give_up is not None:
                ticket.give_up()

    def ask(self) -> None:
        """Note that it is asked for its load now: ``take_report`` has the answer."""
        self._num_ended_unasked = 0

    def take_report(self, report: LoadReport | None, now_s: float) -> None:
        """Take what it told of its load; None where it told nothing.

        Requests of ours that ended while it was asked may still be counted in it.
        """
        self.report = report
        self._told_s = now_s
        self._num_ended = self._num_ended_unasked

    def load(self, now_s: float, max_age_s: float) -> tuple[int, int]:
        """Return (prompt tokens that wait, requests under way).

        A report that is young enough counts all that was sent before it, by whichever
        replica; ours of later are added, and ours that have ended since are taken off.
        Else a request would count against the holder of its prefix until the next
        report, and the one that follows it in a chat would be sent elsewhere. Where it
        is not certain that a request is in the report, it is taken off: too low a load
        lasts until the next report as well, and costs less. Without a report, only our
        own are known.
        """
        report = self.report
        if report is None or now_s - report.asked_s > max_age_s:
            waiting = sum(t.num_tokens for t in self._tickets if t.is_waiting)
            return waiting, len(self._tickets)
        later = [t for t in self._tickets if t.sent_s >= report.asked_s]
        waiting = sum(t.num_tokens for t in later if t.is_waiting)
        num_left = max(report.num_requests - self._num_ended, 0)
        # Where ours were all there was, nobody is left who waits.
        if num_left or not self._num_ended:
            waiting += report.waiting_tokens
        return waiting, num_left + len(later)

    def state(self, waiting_tokens: int, num_running: int) -> dict[str, Any]:
        """Return what ``/router/state`` shows, as plain numbers and words."""
        return {
            "url": self.config.url,
            "kind": self.config.kind,
            "up": self.is_up,
            "draining": self.is_draining,
            "under_way": self.num_under_way,
            "waiting_tokens": waiting_tokens,
            "running": num_running,
            "tells_load": self.report is not None,
            "feeds": [feed.state() for feed in self.feeds],
        }

    def _tell(self) -> None:
        if self.on_load is not None:
            self.on_load(len(self._tickets))
        if self.on_change is not None:
            self.on_change(self)
