"""When a decode instance may use the memory of a failed transfer again.

Who asked for KV and does not get it cannot know by itself whether the prefill instance
still writes. Three things make it safe: the prefill instance says so; or its process is
over (its port refuses) and what it had handed to the network has had time to arrive; or
nobody has heard of its machine for longer than its system keeps sending. A process that
is only stopped does none of it: its port still takes connections, and when it goes on,
so may its writes. Then the memory is held on, and that is counted and logged.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sgl_tiered.core.clock import Clock

__all__ = ["Reach", "ReleaseWatch", "knock"]

logger = logging.getLogger(__name__)

Endpoint = tuple[str, int]

_LOOK_S = 1.0
_KNOCK_S = 2.0
_AFTER_WORD_S = 1.0
"""After the prefill's word: bytes that wait in this machine's own buffers, because this
process was stopped, are written when it goes on, beside the word's arrival."""
_AFTER_DEATH_S = 10.0
"""After its process is over: what its system still sends for it."""
_AFTER_SILENCE_S = 1200.0
"""After its machine fell silent: Linux repeats unanswered TCP data for 15 minutes."""
_TELL_S = 60.0


class Reach(Enum):
    """What a port says of its process."""

    THERE = 0
    OVER = 1
    SILENT = 2


@dataclass(slots=True)
class _Hold:
    """Memory of one failed transfer.

    Attributes:
        endpoints: ports of the prefill ranks that may write to it.
        since_s: when it began.
        reach: what the ports said last, and since when all of them have.
        word_s: when the prefill instance said that it is done; None before.
    """

    endpoints: tuple[Endpoint, ...]
    since_s: float
    reach: Reach = Reach.THERE
    reach_s: float = 0.0
    word_s: float | None = None
    told_s: float = field(default=0.0)


def knock(endpoint: Endpoint) -> Reach:
    """Ask a port whether its process is there; waits up to two seconds."""
    try:
        with contextlib.closing(socket.create_connection(endpoint, _KNOCK_S)):
            return Reach.THERE
    except ConnectionRefusedError:
        return Reach.OVER
    except OSError:
        return Reach.SILENT


class ReleaseWatch:
    """Holds of failed transfers, by room; ``poll`` may be called by any thread.

    Args:
        clock: the time.
        knock: asks a port.
        threaded: False for tests, which call ``look`` themselves.
    """

    def __init__(
        self,
        clock: Clock,
        knock: Callable[[Endpoint], Reach] = knock,
        *,
        threaded: bool = True,
    ) -> None:
        self._clock = clock
        self._knock = knock
        self._threaded = threaded
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._holds: dict[int, _Hold] = {}
        self._thread: threading.Thread | None = None

    @property
    def num_held(self) -> int:
        """Transfers whose memory is held now."""
        with self._lock:
            return len(self._holds)

    def hold(self, room: int, endpoints: Sequence[Endpoint]) -> None:
        """Begin to hold a room's memory."""
        now_s = self._clock.now()
        with self._work:
            self._holds[room] = _Hold(tuple(endpoints), now_s, told_s=now_s)
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tiered-pd-release", daemon=True
                )
                self._thread.start()
            self._work.notify()

    def forget(self, room: int) -> None:
        """End a hold: its memory was given back."""
        with self._lock:
            self._holds.pop(room, None)

    def is_safe(self, room: int, *, has_word: bool) -> bool:
        """Return whether a room's memory may be used again.

        Args:
            room: one that is held; any other is not safe by what is known here.
            has_word: whether the prefill instance has said that it is done.
        """
        now_s = self._clock.now()
        with self._lock:
            hold = self._holds.get(room)
            if hold is None:
                return has_word
            if has_word:
                if hold.word_s is None:
                    hold.word_s = now_s
                return now_s - hold.word_s >= _AFTER_WORD_S
            if hold.reach is Reach.THERE:
                return False
            is_over = hold.reach is Reach.OVER
            limit_s = _AFTER_DEATH_S if is_over else _AFTER_SILENCE_S
            return now_s - hold.reach_s >= limit_s

    def look(self) -> None:
        """Knock at the ports of all holds once."""
        with self._lock:
            wanted = {e for hold in self._holds.values() for e in hold.endpoints}
        found = {endpoint: self._knock(endpoint) for endpoint in wanted}
        now_s = self._clock.now()
        with self._lock:
            for room, hold in self._holds.items():
                seen = [found[e] for e in hold.endpoints if e in found]
                if len(seen) < len(hold.endpoints) or not seen:
                    continue
                reach = _worst(seen)
                if reach is not hold.reach:
                    hold.reach, hold.reach_s = reach, now_s
                if now_s - hold.told_s >= _TELL_S:
                    hold.told_s = now_s
                    logger.warning(
                        "sgl-tiered: memory of transfer %d is held since %.0f s, as "
                        "its prefill instance may still write to it",
                        room,
                        now_s - hold.since_s,
                    )

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._holds:
                    self._work.wait()
            self.look()
            threading.Event().wait(_LOOK_S)


def _worst(seen: Sequence[Reach]) -> Reach:
    for reach in (Reach.THERE, Reach.SILENT):
        if reach in seen:
            return reach
    return Reach.OVER
