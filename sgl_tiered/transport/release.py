"""When memory that a peer was to write to may be used again, after a failure.

Who lent memory to a peer cannot know by itself whether the peer still writes. Three
things make it safe: the peer says that it does not; or its process is over and what it
had handed to the network has had time to arrive; or nobody has heard of its machine for
longer than its system keeps sending. A process that is only stopped, or cut off from
others, does none of it: when it goes on, so may its writes. Then the memory is held on,
and that is counted and logged; it is never given back by the clock alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sgl_tiered.core.clock import Clock
from sgl_tiered.transport.incidents import Incidents
from sgl_tiered.transport.knocking import Knocker, Place, Reach

__all__ = ["ReleaseWatch"]

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_AFTER_WORD_S = 1.0
"""After the peer's word: bytes that wait in this machine's own buffers, because this
process was stopped, are written when it goes on, beside the word's arrival."""
_AFTER_DEATH_S = 10.0
"""After its process is over: what its system still sends for it."""
_AFTER_SILENCE_S = 1200.0
"""After its machine fell silent: Linux repeats unanswered TCP data for 15 minutes."""
_TELL_S = 60.0
_REMIND_S = 5.0


def _nothing() -> None:
    """Remind nobody."""


@dataclass(slots=True)
class _Hold:
    """Memory that a peer may write to.

    Attributes:
        places: of the processes that may; empty where none can be looked for.
        since_s: when it began.
        remind: asks the peer for its word again.
        reach: what was found last, and since when.
        word_s: when the peer said that it is done; None before.
    """

    places: tuple[Place, ...]
    since_s: float
    remind: Callable[[], None]
    reach: Reach = Reach.THERE
    reach_s: float = 0.0
    word_s: float | None = None
    told_s: float = field(default=0.0)
    reminded_s: float = field(default=0.0)


class ReleaseWatch:
    """Holds by key; any thread may ask.

    Args:
        clock: the time.
        look_for: says whether a process is there; None for one that looks.
        after_death_s: how long memory is held after the port of the last process that
            may write to it began to refuse; at most 10 s after the end of one of this
            machine's.
        threaded: False for tests, which call ``look`` themselves.
        incidents: counts what fails here: it ends neither the thread nor other holds.

    Attributes:
        incidents: as given, or its own.
    """

    def __init__(
        self,
        clock: Clock,
        look_for: Callable[[Place], Reach] | None = None,
        *,
        after_death_s: float = _AFTER_DEATH_S,
        threaded: bool = True,
        incidents: Incidents | None = None,
    ) -> None:
        self.incidents = incidents or Incidents("releases")
        self._clock = clock
        self._knocker = Knocker()
        self._look_for = look_for or self._knocker
        self._threaded = threaded
        self._limits_s = {
            Reach.THERE: float("inf"),
            Reach.OVER: after_death_s,
            Reach.ENDED: min(after_death_s, _AFTER_DEATH_S),
            Reach.SILENT: _AFTER_SILENCE_S,
        }
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._holds: dict[Hashable, _Hold] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_held(self) -> int:
        """Keys that are held now."""
        with self._lock:
            return len(self._holds)

    def hold(
        self,
        key: Hashable,
        places: Sequence[Place],
        remind: Callable[[], None] = _nothing,
    ) -> None:
        """Begin to hold memory.

        Args:
            key: whose, for the other calls.
            places: of the processes that may write to it.
            remind: called by the watch's thread every 5 s while one of them is there
                and has not given its word.
        """
        now_s = self._clock.now()
        hold = _Hold(tuple(places), now_s, remind, told_s=now_s, reminded_s=now_s)
        with self._work:
            self._holds[key] = hold
            if self._threaded and self._thread is None and not self._is_closed:
                self.incidents.guard("the start of a watch", self._start)
            self._work.notify()

    def forget(self, key: Hashable) -> None:
        """End a hold: its memory was given back."""
        with self._lock:
            self._holds.pop(key, None)

    def note_over(self, key: Hashable) -> None:
        """Take note that the processes of a hold are known to be over."""
        with self._lock:
            hold = self._holds.get(key)
            if hold is not None and hold.places:
                hold.places = ()
                hold.reach, hold.reach_s = Reach.OVER, self._clock.now()

    def is_safe(self, key: Hashable, *, has_word: bool) -> bool:
        """Return whether memory may be used again.

        Args:
            key: one that is held; any other is not safe by what is known here.
            has_word: whether the peer has said that it is done.
        """
        now_s = self._clock.now()
        with self._lock:
            hold = self._holds.get(key)
            if hold is None:
                return has_word
            if has_word and hold.word_s is None:
                hold.word_s = now_s
            if hold.word_s is not None:
                return now_s - hold.word_s >= _AFTER_WORD_S
            return now_s - hold.reach_s >= self._limits_s[hold.reach]

    def look(self) -> None:
        """Look for the processes of all holds once."""
        with self._lock:
            wanted = {place for hold in self._holds.values() for place in hold.places}
        found = {place: self._found(place) for place in wanted}
        self._keep(wanted)
        now_s = self._clock.now()
        reminders = []
        with self._lock:
            for key, hold in self._holds.items():
                seen = [found[place] for place in hold.places if place in found]
                if len(seen) == len(hold.places) and seen:
                    reach = _worst(seen)
                    if reach is not hold.reach:
                        hold.reach, hold.reach_s = reach, now_s
                if hold.word_s is None and now_s - hold.reminded_s >= _REMIND_S:
                    hold.reminded_s = now_s
                    reminders.append(hold.remind)
                if now_s - hold.told_s >= _TELL_S:
                    hold.told_s = now_s
                    logger.warning(
                        "sgl-tiered: memory lent for %s is held since %.0f s, as its "
                        "peer may still write to it",
                        key,
                        now_s - hold.since_s,
                    )
        for remind in reminders:
            self.incidents.guard("a reminder", remind)

    def close(self) -> None:
        """End the thread; nothing is looked for any more."""
        with self._work:
            self._is_closed = True
            self._work.notify()

    def _start(self) -> None:
        """Start the thread; one that cannot be is started by the next hold."""
        thread = threading.Thread(target=self._run, name="tiered-release", daemon=True)
        thread.start()
        self._thread = thread

    def _found(self, place: Place) -> Reach:
        """Look for one process; what fails here says nothing of it."""
        found = [Reach.THERE]
        self.incidents.guard(
            "a look for a process", lambda: found.append(self._look_for(place))
        )
        return found[-1]

    def _keep(self, places: Collection[Place]) -> None:
        self.incidents.guard("an end of a look", partial(self._knocker.keep, places))

    def _run(self) -> None:
        while True:
            self.incidents.guard("a look for processes", self.look)
            with self._work:
                if not self._is_closed:
                    self._work.wait(_LOOK_S if self._holds else None)
                if self._is_closed:
                    self._keep(())
                    return


def _worst(seen: Sequence[Reach]) -> Reach:
    for reach in (Reach.THERE, Reach.SILENT, Reach.OVER):
        if reach in seen:
            return reach
    return Reach.ENDED
