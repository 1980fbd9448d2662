"""Who may use the links: transfers that a request waits for before all others.

Three classes. A load is waited for; a promotion is likely to be, later; a demotion or
an offload is not. While a transfer of a better class is active, one of a worse class
goes only in turns: after a chunk that took ``t`` seconds it pauses for
``t * (1 / share - 1)``, so that it has ``share`` of the time, whatever the link's speed
is. That share is guaranteed: what never ends keeps its sources pinned and its queue
full. Alone, a transfer never waits.

Any thread. Times in seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import IntEnum

from sgl_tiered.core.clock import Clock

__all__ = ["BandwidthShares", "Share"]

MAX_PAUSE_S = 0.05
"""A chunk is not held longer, however long the one before it took."""
POLL_S = 0.001
"""How soon a pause ends once the better class is done; a chunk takes about 2 ms."""


class Share(IntEnum):
    """Classes of transfers, best first."""

    LOAD = 0
    PROMOTE = 1
    DEMOTE = 2


GUARANTEED: Mapping[Share, float] = {
    Share.LOAD: 1.0,
    Share.PROMOTE: 0.1,
    Share.DEMOTE: 0.1,
}
"""Share of the time that a class has while a better one is active. A tenth lengthens a
load by a ninth where both use all of a link, and at 10 GB/s drains a queue of 64
offloads of 100 MB in 7 s."""


class BandwidthShares:
    """Lets chunks go or pause; one per rank, asked by all workers.

    Args:
        clock: times pauses.
        guaranteed: per class, its share while a better class is active, above 0.
        max_pause_s: the longest pause before one chunk.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        guaranteed: Mapping[Share, float] = GUARANTEED,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        if not all(0.0 < guaranteed[share] <= 1.0 for share in Share):
            raise ValueError(f"shares must be above 0 and at most 1: {guaranteed}")
        self._clock = clock
        self._guaranteed = dict(guaranteed)
        self._max_pause_s = max_pause_s
        self._watched: list[tuple[Share, Callable[[], bool]]] = []
        self._lock = threading.Lock()
        self._not_before_s = dict.fromkeys(Share, float("-inf"))
        self._paused_s = dict.fromkeys(Share, 0.0)

    @property
    def paused_s(self) -> Mapping[Share, float]:
        """Seconds that each class has waited for better ones."""
        return dict(self._paused_s)

    def watch(self, share: Share, is_active: Callable[[], bool]) -> None:
        """Ask ``is_active`` whether transfers of a class run; before any ``wait``."""
        self._watched.append((share, is_active))

    def delay_s(self, share: Share) -> float:
        """Return for how long a chunk of this class should wait; 0 to go now."""
        if not any(
            better < share and is_active() for better, is_active in self._watched
        ):
            return 0.0
        with self._lock:
            return max(0.0, self._not_before_s[share] - self._clock.now())

    def used(self, share: Share, seconds: float) -> None:
        """Note that a chunk took so long, which the next one is to make up for."""
        pause_s = seconds * (1.0 / self._guaranteed[share] - 1.0)
        with self._lock:
            now_s = self._clock.now()
            self._not_before_s[share] = now_s + min(pause_s, self._max_pause_s)

    def wait(self, share: Share, stop: threading.Event) -> bool:
        """Block until a chunk of this class may go; False if ``stop`` was set."""
        started_s = self._clock.now()
        while self.delay_s(share) > 0.0:
            if stop.wait(POLL_S):
                return False
        with self._lock:
            self._paused_s[share] += self._clock.now() - started_s
        return not stop.is_set()
