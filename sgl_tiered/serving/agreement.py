"""What the ranks of a tensor-parallel server agree on: the facts that decisions read.

Each rank runs a scheduler of its own over the same requests, and ranks that build
different batches hang in the next collective call. The decisions of this product read
nothing but what they are handed: a clock, measured times, the ends of transfers, and
their own past. So the ranks agree on these facts, not on each decision, and then decide
alike. Once per pass of the scheduler each sends one small message and gets everybody's
(``meet``). What is taken from them, and what each decision reads, is in TP.md.

Each message also names what was decided so far, as a checksum (``note``): ranks that
have parted are told so before their caches do harm. With one rank there is no message.
All ranks must call alike: as often, in the same order. On the scheduler's thread.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import RanksPartedError

__all__ = [
    "ARRIVED",
    "Agreement",
    "Ranks",
]

ARRIVED = "arrived"
"""A moment: the request was put into the queue."""
_HEAD = struct.Struct("<dQI")

_Tell = Callable[[], Any]
_Hear = Callable[[list[Any]], None]


class Ranks(Protocol):
    """The schedulers of a tensor-parallel server."""

    @property
    def rank(self) -> int:
        """Number of this one, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """Return everybody's message, by rank; blocks until all have called."""
        ...


class Agreement:
    """One rank's view of the facts that all ranks share; also their clock.

    Args:
        clock: of this rank.
        ranks: the ranks; None where there is one.
    """

    def __init__(self, clock: Clock, ranks: Ranks | None = None) -> None:
        self.own_clock = clock
        self._ranks = ranks
        self._shared_s = clock.now()
        self._num_meetings = 0
        self._noted = 0
        self._observers: list[Callable[..., None]] = []
        self._measured: list[list[Any]] = []
        self._moments: dict[str, dict[str, float]] = {}
        self._told: dict[str, tuple[_Tell, _Hear]] = {}
        if ranks is not None:
            self._shared_s = self.first(self._shared_s)

    @property
    def is_shared(self) -> bool:
        """Whether there are others to agree with."""
        return self._ranks is not None

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return 1 if self._ranks is None else self._ranks.num_ranks

    def now(self) -> float:
        """Return rank 0's time of the last meeting; of a single rank, the time."""
        return self.own_clock.now() if self._ranks is None else self._shared_s

    def meet(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Agree on the time and on what was measured; once per pass.

        Args:
            facts: of this rank, as JSON can write them; empty for none.

        Returns:
            Everybody's, by rank. A single rank gets its own back.

        Raises:
            RanksPartedError: the ranks have noted different decisions, or rank 0 has
                measured what this one does not know.
        """
        ranks = self._ranks
        if ranks is None:
            return [facts]
        if self._measured:
            facts = {**facts, "measured": self._measured}
        self._measured = []
        for name, (tell, _) in self._told.items():
            fact = tell()
            if fact is not None:
                facts = {**facts, name: fact}
        first_s, found = self._exchange(ranks, facts, is_meeting=True)
        self._num_meetings += 1
        self._shared_s = max(self._shared_s, first_s)
        for number, *values in found[0].get("measured", ()):
            if number >= len(self._observers):
                raise RanksPartedError(0, len(found))
            self._observers[number](*values)
        for name, (_, hear) in self._told.items():
            hear([one.get(name) for one in found])
        return found

    def learned(self, observe: Callable[..., None]) -> Callable[..., None]:
        """Return what to tell measurements instead of ``observe``.

        On a single rank that is ``observe`` itself; else all ranks observe what rank 0
        has measured, at the next meeting. Register in the same order on all ranks.

        Args:
            observe: takes numbers.
        """
        if self._ranks is None:
            return observe
        number = len(self._observers)
        self._observers.append(observe)
        if self.rank:
            return lambda *values: None
        return lambda *values: self._measured.append([number, *values])

    def tell(self, name: str, tell: _Tell, hear: _Hear) -> None:
        """Let somebody tell all ranks something at every meeting; alone at none.

        Args:
            name: of the fact.
            tell: returns it, as JSON can write it; None where there is nothing to tell.
            hear: gets everybody's, by rank; None of those who told nothing. It raises
                ``RanksPartedError`` where one does not fit what was decided here.
        """
        self._told[name] = tell, hear

    def ask(self, name: str) -> None:
        """Have a fact told and heard now; a message of its own, alone none.

        Args:
            name: as given to ``tell``.

        Raises:
            RanksPartedError: another rank does not ask, or has decided differently.
        """
        tell, hear = self._told[name]
        fact = tell()
        if self._ranks is None:
            hear([fact])
            return
        facts = {} if fact is None else {name: fact}
        _, found = self._exchange(self._ranks, facts, is_meeting=False)
        hear([one.get(name) for one in found])

    def moment_s(self, rid: str, name: str, own_s: float) -> float:
        """Return when something happened to a request, alike on all ranks.

        Args:
            rid: the request.
            name: of the event.
            own_s: as this rank has measured it, which a single rank gets back; several
                get the time of the meeting before they first asked.
        """
        if self._ranks is None:
            return own_s
        return self._moments.setdefault(rid, {}).setdefault(name, self._shared_s)

    def forget(self, rid: str) -> None:
        """Forget a request's moments."""
        self._moments.pop(rid, None)

    def note(self, *decided: object) -> None:
        """Note what was decided, to be compared at the next meeting."""
        if self._ranks is not None:
            self._noted = zlib.crc32(repr(decided).encode(), self._noted)

    def all(self, fact: bool) -> bool:
        """Return whether something is so on every rank; a message of its own.

        Raises:
            RanksPartedError: another rank asks for something else.
        """
        if self._ranks is None:
            return fact
        told = self._ranks.gather(b"\1" if fact else b"\0")
        for rank, one in enumerate(told):
            if one not in (b"\0", b"\1"):
                raise RanksPartedError(rank, len(told))
        return all(one == b"\1" for one in told)

    def gathered(self, value: Any) -> list[Any]:
        """Return everybody's value, by rank; for the start, of any length.

        Raises:
            RanksPartedError: another rank asks for something else.
        """
        if self._ranks is None:
            return [value]
        told = self._ranks.gather(_packed(value))
        found = []
        for rank, one in enumerate(told):
            try:
                found.append(orjson.loads(one))
            except orjson.JSONDecodeError as error:
                raise RanksPartedError(rank, len(told)) from error
        return found

    def first(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.gathered(value)[0]

    def _exchange(
        self, ranks: Ranks, facts: dict[str, Any], *, is_meeting: bool
    ) -> tuple[float, list[dict[str, Any]]]:
        """Return rank 0's time and everybody's facts, if all are at the same point."""
        body = _packed(facts) if facts else b""
        number = 2 * self._num_meetings + is_meeting
        head = _HEAD.pack(self.own_clock.now(), number, self._noted)
        told = ranks.gather(head + body)
        first: list[Any] = []
        for rank, message in enumerate(told):
            noted: list[Any] = []
            # What is shorter comes from somebody who is elsewhere.
            if len(message) >= _HEAD.size:
                _, *noted = _HEAD.unpack_from(message)
            first = first or noted
            if not noted or noted != first:
                raise RanksPartedError(rank, len(told))
        first_s = _HEAD.unpack_from(told[0])[0]
        return first_s, [orjson.loads(m[_HEAD.size :] or b"{}") for m in told]

    def leave(self) -> None:
        """Be alone from now on: the server ends, and nobody waits for the others."""
        self._ranks = None


def _packed(value: Any) -> bytes:
    # What was measured may be numpy's floats.
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
