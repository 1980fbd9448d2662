"""What goes wrong and ends nothing: counted by kind, and told now and then.

For what others send or an outage repeats: every case is counted, and the log gets one
line of a kind in half a minute, with how many there were since the last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sgl_tiered.core.clock import Clock, SystemClock

__all__ = ["Incidents"]

_LOG = logging.getLogger(__name__)
_QUIET_S = 30.0
_MAX_DETAIL = 500


class Incidents:
    """Counts by kind; any thread may call it.

    Args:
        where: what a log line begins with.
        tell: takes the kind of each, for metrics.
        clock: of the pauses between log lines.
    """

    def __init__(
        self,
        where: str = "pool",
        tell: Callable[[str], None] = lambda kind: None,
        clock: Clock | None = None,
    ) -> None:
        self._where = where
        self._tell = tell
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        # By kind: when it was logged last, and how many there were by then.
        self._logged: dict[str, tuple[float, int]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """How many there were, by kind."""
        with self._lock:
            return dict(self._counts)

    def guard(self, what: str, step: Callable[[], object]) -> bool:
        """Carry out a step; what it raises is counted as ``failed``, and told.

        Args:
            what: what is done, in a few words.
            step: the step.

        Returns:
            Whether it came to its end.
        """
        try:
            step()
        except Exception as error:  # noqa: BLE001 - who calls it has to live on
            self.note("failed", f"{type(error).__name__} in {what}", error)
            return False
        return True

    def note(self, kind: str, detail: str, error: BaseException | None = None) -> None:
        """Count one.

        Args:
            kind: a word; there must not be many.
            detail: one clause; what others sent may be part of it.
            error: its traceback goes to the log.
        """
        now_s = self._clock.now()
        with self._lock:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            last = self._logged.get(kind)
            is_due = last is None or now_s - last[0] >= _QUIET_S
            if is_due:
                self._logged[kind] = (now_s, number)
        self._tell(kind)
        if is_due:
            since = number - (0 if last is None else last[1])
            # repr: what others sent must not look like lines of ours.
            text = repr(detail[:_MAX_DETAIL])[1:-1]
            more = f" ({since} since the last such line)" if since > 1 else ""
            _LOG.warning("%s: %s: %s%s", self._where, kind, text, more, exc_info=error)
