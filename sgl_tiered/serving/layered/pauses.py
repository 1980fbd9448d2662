"""Which requests wait between two of their tokens, how often and for how long.

A pause lasts from the step that a request was left out of to the next forward that it
takes part in, prefill passes of others between them included. Used on one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgl_tiered.core.clock import Clock

__all__ = ["PauseLog", "Paused"]

_MAX_KEPT = 4096
"""Requests whose pauses are kept until somebody asks; beyond, the oldest go."""
_RUNNING = -1.0


@dataclass(slots=True)
class Paused:
    """What one request has waited between its tokens.

    Attributes:
        steps: that it was left out of.
        seconds: of pauses that have ended.
        since_s: begin of the one it is in; negative while it is in none.
    """

    steps: int = 0
    seconds: float = 0.0
    since_s: float = _RUNNING


class PauseLog:
    """Counts the pauses of one scheduler's requests.

    Attributes:
        num_steps: steps that requests were left out of, all together.
        seconds: of all pauses that have ended.

    Args:
        clock: of the runtime.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of: dict[str, Paused] = {}
        self._waiting: set[str] = set()
        self.num_steps = 0
        self.seconds = 0.0

    def left_out(self, rids: Sequence[str]) -> None:
        """Note who takes no part in the step that comes; O(of them)."""
        self.num_steps += len(rids)
        if not rids:
            return
        now_s = self._clock.now()
        for rid in rids:
            one = self._of.get(rid)
            if one is None:
                one = self._of[rid] = Paused()
                self._bound()
            one.steps += 1
            if one.since_s < 0.0:
                one.since_s = now_s
                self._waiting.add(rid)

    def takes_part(self, rids: Iterable[str]) -> None:
        """Note who is in the forward that begins: their pauses have ended."""
        if not self._waiting:
            return
        for rid in rids:
            if rid in self._waiting:
                self.ended(rid)

    def ended(self, rid: str) -> None:
        """Note the end of a request, or of its pause; nothing for others."""
        if rid not in self._waiting:
            return
        self._waiting.discard(rid)
        one = self._of[rid]
        waited_s = max(self._clock.now() - one.since_s, 0.0)
        one.seconds += waited_s
        one.since_s = _RUNNING
        self.seconds += waited_s

    def is_waiting(self, rid: str) -> bool:
        """Return whether a request is in a pause."""
        return rid in self._waiting

    def of(self, rid: str) -> tuple[int, float]:
        """Return the steps and seconds of a request's pauses, the one it is in too."""
        one = self._of.get(rid)
        if one is None:
            return 0, 0.0
        if one.since_s < 0.0:
            return one.steps, one.seconds
        return one.steps, one.seconds + max(self._clock.now() - one.since_s, 0.0)

    def forget(self, rid: str) -> None:
        """Forget a request that was reported."""
        self.ended(rid)
        self._of.pop(rid, None)

    def _bound(self) -> None:
        if len(self._of) <= _MAX_KEPT:
            return
        for rid in self._of:
            if rid not in self._waiting:
                del self._of[rid]
                return
