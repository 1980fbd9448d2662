"""What became of each request: its waits by reason, its times, where its tokens were.

A request is ``queued``, ``admitted`` into a pass, gives its ``first_token`` and is
``finished``; a retracted one is queued again. Between, its time in the queue belongs to
reasons, and these times add up to the time in the queue, whatever is noted when.

Nothing here grows with the queue. A scheduling pass says once why its search ended
(``pass_ended``); that is what everybody waits for who was not looked at, until the next
pass ends, and it is worked out for a request when that is admitted or asked about. Only
a request that is passed over for a reason of its own is noted (``waits``). Who was
overtaken in a pass by one that came later waits for the order of the queue.

Times in seconds of the clock that is handed in. One thread: the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from sgl_tiered.core.clock import Clock

__all__ = ["RequestLedger", "WaitReason"]

_MAX_LIVE = 65_536
"""Requests that are followed at a time. An engine refuses more long before; this bounds
what a request leaves behind whose end nobody told."""
_MAX_SEGMENTS = 4_096
"""Passes that are remembered for requests that wait. When there are more, what they say
is worked out for all that wait, once in so many passes."""
_NOT_PREDICTED = ("room in the pool", "targets of others", "decode steps")
_NOT_YET = -1.0
_MICRO = 6


class WaitReason(IntEnum):
    """Why a request is not in the pass that was just put together."""

    BUDGET = 0
    """The pool has no room for it, or for one before it."""
    ORDER = 1
    """One that came later was put before it."""
    SLO = 2
    """It is held so that those that decode keep their targets."""
    LOAD = 3
    """Its pages are on their way."""
    SLOT = 4
    """As many requests run as may."""
    PASS = 5
    """The pass was full, or is running."""
    LAYERS = 6
    """The device has no room for its layers, or for those of one before it."""

    @property
    def label(self) -> str:
        """The word used in reports."""
        return self.name.lower()


@dataclass(slots=True, eq=False)
class _Entry:
    """One request; times are clock values, ``_NOT_YET`` where there is none."""

    rid: str
    number: int
    num_prompt_tokens: int
    queued_s: float
    service_s: float
    predicted_ttft_s: float
    settled_s: float
    note_pass: int
    note: WaitReason | None = WaitReason.PASS
    is_waiting: bool = True
    is_prefilling: bool = False
    waited_s: list[float] = field(default_factory=lambda: [0.0] * len(WaitReason))
    admitted_s: float = _NOT_YET
    first_token_s: float = _NOT_YET
    finished_s: float = _NOT_YET
    is_aborted: bool = False
    num_retractions: int = 0
    details: dict[str, Any] = field(default_factory=dict)


class RequestLedger:
    """Follows the requests that are there, and keeps the last that have ended.

    Args:
        keep: ended requests to keep; 0 switches everything off.
        clock: time of every note.
    """

    def __init__(self, keep: int, clock: Clock) -> None:
        self._keep = keep
        self._clock = clock
        self._live: OrderedDict[str, _Entry] = OrderedDict()
        self._ended: OrderedDict[str, _Entry] = OrderedDict()
        self._num_queued = 0
        # Start, reason and newest request admitted of the passes that somebody waits
        # through; each lasts until the next.
        self._segments: deque[tuple[float, WaitReason, int]] = deque()
        self._pass = 0
        self._newest = -1
        self._num_waiting = 0
        # With a note of their own from this pass, and from the one before it.
        self._noted: list[_Entry] = []
        self._holding: list[_Entry] = []
        # Predicted seconds of those that wait, and of those whose prompts are computed.
        self._waiting_work_s = 0.0
        self._running_work_s = 0.0
        self._num_prefilling = 0
        self._running_since_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._keep > 0

    @property
    def live(self) -> Collection[str]:
        """Names of the requests that have not ended."""
        return self._live.keys()

    @property
    def num_ended(self) -> int:
        """Ended requests that are kept."""
        return len(self._ended)

    # -- What happens ----------------------------------------------------------

    def queued(
        self, rid: str, num_prompt_tokens: int, *, service_s: float = 0.0
    ) -> None:
        """Note a request that has come, or that was retracted and waits again.

        Args:
            rid: its name; one that is known and has not ended was retracted.
            num_prompt_tokens: length of its prompt.
            service_s: predicted time of a pass for it alone; adds up to the predicted
                time to first token with that of the requests before it.
        """
        if not self._keep:
            return
        now_s = self._clock.now()
        self._num_queued += 1
        entry = self._live.get(rid)
        if entry is None:
            predicted_s = self._work_ahead_s(now_s) + service_s
            entry = _Entry(
                rid,
                self._num_queued,
                num_prompt_tokens,
                now_s,
                service_s,
                predicted_s,
                now_s,
                self._pass - 1,
            )
            self._live[rid] = entry
            if len(self._live) > _MAX_LIVE:
                self._leave(self._live.popitem(last=False)[1])
        elif entry.is_waiting:
            return
        else:
            self._end_prefill(entry)
            entry.number = self._num_queued
            entry.num_retractions += 1
            entry.is_waiting = True
            entry.settled_s, entry.service_s = now_s, service_s
            entry.note, entry.note_pass = WaitReason.PASS, self._pass - 1
        self._num_waiting += 1
        self._waiting_work_s += service_s
        # Nobody has looked at it: that is what the next pass is waited for.
        self._holding.append(entry)

    def waits(self, rid: str, reason: WaitReason) -> None:
        """Note why this pass passes a request over, where the reason is its own."""
        entry = self._live.get(rid)
        if entry is None or not entry.is_waiting:
            return
        self._settle(entry, self._clock.now())
        entry.note = reason
        if entry.note_pass != self._pass:
            entry.note_pass = self._pass
            self._noted.append(entry)

    def pass_ended(self, reason: WaitReason) -> None:
        """Note why the search of a pass went no further; what follows is its time."""
        if not self._keep:
            return
        now_s = self._clock.now()
        for entry in self._holding:
            if entry.note_pass != self._pass and entry.note is not None:
                if entry.is_waiting:
                    self._settle(entry, now_s)
                entry.note = None
        self._holding, self._noted = self._noted, []
        self._pass += 1
        newest, self._newest = self._newest, -1
        if not self._num_waiting:
            self._segments.clear()
        elif self._segments and self._segments[-1][1:] == (reason, newest):
            return
        elif len(self._segments) >= _MAX_SEGMENTS:
            for entry in self._live.values():
                if entry.is_waiting:
                    self._settle(entry, now_s)
            self._segments.clear()
        self._segments.append((now_s, reason, newest))

    def admitted(self, rid: str) -> None:
        """Note that a request joins the pass that is being put together."""
        entry = self._live.get(rid)
        if entry is None or not entry.is_waiting:
            return
        now_s = self._clock.now()
        self._newest = max(self._newest, entry.number)
        self._leave_queue(entry, now_s)
        if entry.admitted_s < 0:
            entry.admitted_s = now_s
        if entry.first_token_s < 0:
            if not self._num_prefilling:
                self._running_since_s = now_s
            entry.is_prefilling = True
            self._num_prefilling += 1
            self._running_work_s += entry.service_s

    def first_token(self, rid: str, at_s: float | None = None) -> None:
        """Note the end of the first pass over the whole prompt; later calls change
        nothing."""
        entry = self._live.get(rid)
        if entry is None or entry.first_token_s >= 0:
            return
        self._end_prefill(entry)
        entry.first_token_s = self._clock.now() if at_s is None else at_s

    def note(self, rid: str, **details: Any) -> None:
        """Keep facts of a request beside its times; JSON must be able to write them.

        For ended requests as well, as long as they are kept.
        """
        entry = self._live.get(rid) or self._ended.get(rid)
        if entry is not None:
            entry.details.update(details)

    def finished(
        self,
        rid: str,
        details: Mapping[str, Any] | None = None,
        *,
        is_aborted: bool = False,
    ) -> None:
        """Note the end of a request; one that is not known is left alone."""
        entry = self._live.pop(rid, None)
        if entry is None:
            return
        now_s = self._clock.now()
        self._leave(entry)
        entry.finished_s = now_s
        entry.is_aborted = is_aborted
        entry.details.update(details or {})
        self._ended.pop(rid, None)
        self._ended[rid] = entry
        if len(self._ended) > self._keep:
            self._ended.popitem(last=False)

    # -- What is asked ---------------------------------------------------------

    def details(self, rid: str) -> Mapping[str, Any]:
        """Return what was noted beside the times; empty where nothing is known."""
        entry = self._live.get(rid) or self._ended.get(rid)
        return {} if entry is None else entry.details

    def get(self, rid: str) -> dict[str, Any] | None:
        """Return what is known of a request, as JSON can write it; None if unknown."""
        entry = self._live.get(rid) or self._ended.get(rid)
        return None if entry is None else self._as_dict(entry)

    def recent(self, num: int) -> list[dict[str, Any]]:
        """Return the last requests that have ended, the latest first."""
        last = list(self._ended.values())[-num:] if num > 0 else []
        return [self._as_dict(entry) for entry in reversed(last)]

    def slowest(self, num: int) -> list[dict[str, Any]]:
        """Return of those that are kept the ones with the latest first tokens."""

        def ttft_s(entry: _Entry) -> float:
            return entry.first_token_s - entry.queued_s

        timed = [entry for entry in self._ended.values() if entry.first_token_s >= 0]
        timed.sort(key=ttft_s, reverse=True)
        return [self._as_dict(entry) for entry in timed[: max(num, 0)]]

    # -- Private ---------------------------------------------------------------

    def _work_ahead_s(self, now_s: float) -> float:
        """Return the predicted time until all that is there has its first token."""
        running_s = 0.0
        if self._num_prefilling:
            passed_s = now_s - self._running_since_s
            running_s = max(0.0, self._running_work_s - passed_s)
        return self._waiting_work_s + running_s

    def _settle(self, entry: _Entry, now_s: float) -> None:
        """Give the time since the last look to its reasons."""
        start_s, entry.settled_s = entry.settled_s, now_s
        if entry.note is not None:
            entry.waited_s[entry.note] += now_s - start_s
            return
        end_s = now_s
        for begun_s, reason, newest in reversed(self._segments):
            begin_s = max(begun_s, start_s)
            if begin_s < end_s:
                is_overtaken = newest > entry.number
                why = WaitReason.ORDER if is_overtaken else reason
                entry.waited_s[why] += end_s - begin_s
                end_s = begin_s
            if begun_s <= start_s:
                return
        # Before the first pass that is remembered.
        entry.waited_s[WaitReason.PASS] += end_s - start_s

    def _leave_queue(self, entry: _Entry, now_s: float) -> None:
        self._settle(entry, now_s)
        entry.is_waiting, entry.note = False, None
        self._num_waiting -= 1
        self._waiting_work_s -= entry.service_s
        if not self._num_waiting:
            # Sums of differences drift; nobody waits, so nothing does.
            self._waiting_work_s = 0.0

    def _end_prefill(self, entry: _Entry) -> None:
        if not entry.is_prefilling:
            return
        entry.is_prefilling = False
        self._num_prefilling -= 1
        self._running_work_s -= entry.service_s
        if not self._num_prefilling:
            self._running_work_s = 0.0

    def _leave(self, entry: _Entry) -> None:
        """Take a request out of every sum: it has ended, wherever it was."""
        if entry.is_waiting:
            self._leave_queue(entry, self._clock.now())
        self._end_prefill(entry)

    def _as_dict(self, entry: _Entry) -> dict[str, Any]:
        now_s = self._clock.now()
        if entry.is_waiting:
            self._settle(entry, now_s)
        waited = {
            reason.label: round(entry.waited_s[reason], _MICRO)
            for reason in WaitReason
            if entry.waited_s[reason] > 0
        }
        return {
            "rid": entry.rid,
            "state": _state(entry),
            "queued_s_ago": round(now_s - entry.queued_s, _MICRO),
            "prompt_tokens": entry.num_prompt_tokens,
            "ttft": {
                "predicted_s": round(entry.predicted_ttft_s, _MICRO),
                "predicted_without": list(_NOT_PREDICTED),
                "real_s": _since(entry.queued_s, entry.first_token_s),
            },
            "total_s": _since(entry.queued_s, entry.finished_s),
            "wait": {
                "total_s": round(sum(entry.waited_s), _MICRO),
                "by_reason_s": waited,
            },
            "retractions": entry.num_retractions,
            **entry.details,
        }


def _state(entry: _Entry) -> str:
    if entry.finished_s >= 0:
        return "aborted" if entry.is_aborted else "finished"
    return "waiting" if entry.is_waiting else "running"


def _since(start_s: float, end_s: float) -> float | None:
    return None if end_s < 0 else round(end_s - start_s, _MICRO)
