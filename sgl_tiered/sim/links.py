"""One direction of a link between two tiers, shared by the transfers on it.

``fair`` (the default): all transfers under way get equal parts of the bandwidth, as
streams on one PCIe link or requests to one SSD do; a transfer's latency passes before
it takes part. ``fifo``: one after the other, each with latency and full bandwidth, as a
single copying thread does. The two directions of a link are two objects and do not
disturb each other.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.events import Event, EventQueue, Priority

__all__ = ["DISCIPLINES", "Link"]

DISCIPLINES = ("fair", "fifo")
_ROUNDING_BYTES = 1e-3


class Link:
    """Moves bytes in simulated time.

    Args:
        name: for the event log, e.g. ``host>device``.
        queue: simulated time.
        latency_s: per transfer.
        bytes_per_s: of the whole link.
        discipline: ``fair`` or ``fifo``.
    """

    def __init__(
        self,
        name: str,
        queue: EventQueue,
        latency_s: float,
        bytes_per_s: float,
        discipline: str = "fair",
    ) -> None:
        if discipline not in DISCIPLINES:
            raise ConfigError(
                "link discipline", f"{discipline!r} is not known", "fair or fifo"
            )
        if not (latency_s >= 0.0 and bytes_per_s > 0.0):
            raise ConfigError(
                f"link {name}",
                f"latency {latency_s} s, bandwidth {bytes_per_s} bytes/s",
                "give a latency that is not negative and a positive bandwidth",
            )
        self.name = name
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.num_bytes = 0
        self._queue = queue
        self._is_fair = discipline == "fair"
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        # Fair sharing in virtual time: every transfer under way advances alike.
        self._active: list[tuple[float, int, Callable[[], None]]] = []
        self._served = 0.0
        self._updated_s = 0.0
        self._sequence = 0
        self._next: Event | None = None

    def seconds(self, num_bytes: int) -> float:
        """Return the time of a transfer that is alone."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def submit(self, num_bytes: int, on_end: Callable[[], None]) -> None:
        """Start a transfer; ``on_end`` is called at its end."""
        self.num_bytes += num_bytes
        if self._is_fair:
            start_s = self._queue.now() + self.latency_s
            self._queue.at(
                start_s, Priority.TRANSFER, lambda: self._join(num_bytes, on_end)
            )
            return
        self._waiting.append((num_bytes, on_end))
        if len(self._waiting) == 1:
            self._start_first()

    def _start_first(self) -> None:
        num_bytes, _ = self._waiting[0]
        end_s = self._queue.now() + self.seconds(num_bytes)
        self._queue.at(end_s, Priority.TRANSFER, self._end_first)

    def _end_first(self) -> None:
        _, on_end = self._waiting.popleft()
        if self._waiting:
            self._start_first()
        on_end()

    def _join(self, num_bytes: int, on_end: Callable[[], None]) -> None:
        self._advance()
        self._sequence += 1
        item = (self._served + num_bytes, self._sequence, on_end)
        heapq.heappush(self._active, item)
        self._plan_next()

    def _advance(self) -> None:
        now_s = self._queue.now()
        if self._active:
            passed_s = now_s - self._updated_s
            self._served += passed_s * self.bytes_per_s / len(self._active)
        else:
            # Nobody is measured against it: start over, which keeps it exact.
            self._served = 0.0
        self._updated_s = now_s

    def _plan_next(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._active:
            left = max(0.0, self._active[0][0] - self._served)
            end_s = self._updated_s + left * len(self._active) / self.bytes_per_s
            self._next = self._queue.at(end_s, Priority.TRANSFER, self._end_next)

    def _end_next(self) -> None:
        self._next = None
        self._advance()
        ended = []
        # The first is due by construction, whatever rounding did to its bytes.
        limit = max(self._served, self._active[0][0]) + _ROUNDING_BYTES
        while self._active and self._active[0][0] <= limit:
            ended.append(heapq.heappop(self._active)[2])
        self._plan_next()
        for on_end in ended:
            on_end()
