"""The ranks of one instance as one member of the pool: what they hear, and when.

Rank 0 has the lease, the place in the registry and the control endpoint. What comes
there (messages, views, the end of the lease) it hands to all at a meeting of the ranks,
and there they tell each other their facts (`facts.py`, with the argument why they never
differ). Then each rank moves its own pool along, at the same point of its scheduler's
turn: ``advance``. Every rank says the same to other instances; rank 0 sends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from sgl_tiered.core.clock import Clock
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.pool.facts import Facts
from sgl_tiered.pool.membership import Lease, View
from sgl_tiered.pool.messages import Channel, Envelope, RankInfo

__all__ = ["Crew", "Leading", "Together"]

_NUM_EXCHANGES = 3
"""At the start: the processes, the lease, then how each rank is built."""


class Together(Clock, Protocol):
    """How the ranks of an instance meet; their common clock as well."""

    @property
    def rank(self) -> int:
        """Number of this one, from 0."""
        ...

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        ...

    def tell(
        self,
        name: str,
        tell: Callable[[], Any],
        hear: Callable[[list[Any]], None],
    ) -> None:
        """Let something be told at every meeting: JSON values, None for nothing."""
        ...

    def gathered(self, value: Any) -> list[Any]:
        """Return everybody's value, by rank; blocks until all have called."""
        ...


class Leading(Protocol):
    """What rank 0 has of the pool, for all."""

    def take(self) -> list[Envelope]:
        """Return the messages that have come since the last call."""
        ...

    def take_view(self) -> View | None:
        """Return who is there, if that has changed since the last call."""
        ...

    def lease(self) -> tuple[int, float]:
        """Return the incarnation, and the end of the lease on the common clock."""
        ...


class Advanced(Protocol):
    """A pool, as far as the crew moves it along; ``MemPool`` is one."""

    lease_ends_s: float

    @property
    def incarnation(self) -> int:
        """Number of this instance's start."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether ``poll`` has nothing to do until a message comes."""
        ...

    def begin_anew(self, incarnation: int) -> None:
        """Go on as a new incarnation."""
        ...

    def poll(self) -> None:
        """Move everything along."""
        ...


class Crew:
    """One rank's part in an instance of several.

    Args:
        ranks: how they meet.

    Attributes:
        facts: for this rank's pool.
        clock: for it and for all that decides.
        leading: what rank 0 has; None on the others, and before it has it.
    """

    def __init__(self, ranks: Together) -> None:
        self._ranks = ranks
        self.facts = Facts(ranks.num_ranks)
        self.clock: Clock = ranks
        self.leading: Leading | None = None
        self._num_exchanges = 0
        self._inbox: list[Envelope] = []
        self._view: View | None = None
        self._lease: tuple[int, float] | None = None
        self._told_lease: tuple[int, float] | None = None
        ranks.tell("pool", self._tell, self._hear)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._ranks.rank

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return self._ranks.num_ranks

    # The start: all ranks call these once, in this order.

    def introduce(self, process: str) -> tuple[str, ...]:
        """Return the names of all ranks' processes, by rank.

        Raises:
            TransportUnavailableError: another rank is not in the pool; says why.
        """
        return tuple(str(name) for name in self._exchange(process))

    def open(self, lease: Lease | None) -> Lease:
        """Return rank 0's lease, which it gives.

        Raises:
            TransportUnavailableError: another rank is not in the pool; says why.
        """
        mine = None if lease is None else msgspec.to_builtins(lease)
        return msgspec.convert(self._exchange(mine)[0], Lease)

    def muster(self, info: RankInfo) -> tuple[RankInfo, ...]:
        """Return how all ranks are built, by rank.

        Raises:
            TransportUnavailableError: another rank is not in the pool; says why.
        """
        told = self._exchange(msgspec.json.encode(info).decode())
        return tuple(msgspec.json.decode(one, type=RankInfo) for one in told)

    def give_up(self, error: BaseException) -> None:
        """Let the others know that this rank cannot enter the pool, if they wait."""
        if self._num_exchanges < _NUM_EXCHANGES:
            self._num_exchanges = _NUM_EXCHANGES
            self._ranks.gathered({"error": str(error) or type(error).__name__})

    # Afterwards.

    def channel(self, channel: Channel | None) -> Channel:
        """Return the channel of this rank's pool.

        Args:
            channel: of rank 0; None on the others.
        """
        return _Common(self, channel)

    def take(self) -> list[Envelope]:
        """Return the messages that all ranks have heard since the last call."""
        found, self._inbox = self._inbox, []
        return found

    def advance(self, pool: Advanced, see: Callable[[View], None]) -> None:
        """Act on what was heard at meetings since the last call.

        All ranks call it as often, at the same point.

        Args:
            pool: of this rank.
            see: takes a new view.
        """
        lease, self._lease = self._lease, None
        if lease is not None:
            if lease[0] != pool.incarnation:
                pool.begin_anew(lease[0])
            pool.lease_ends_s = lease[1]
        view, self._view = self._view, None
        if view is not None:
            see(view)
        if self._inbox or not pool.is_idle:
            pool.poll()

    def _exchange(self, value: Any) -> list[Any]:
        told = self._ranks.gathered({"value": value})
        self._num_exchanges += 1
        for rank, one in enumerate(told):
            if "error" in one:
                # All have heard it: nobody waits any more.
                self._num_exchanges = _NUM_EXCHANGES
                raise TransportUnavailableError(
                    f"rank {rank} cannot enter the pool: {one['error']}"
                )
        return [one["value"] for one in told]

    def _tell(self) -> dict[str, Any] | None:
        told: dict[str, Any] = {}
        found = self.facts.tell()
        if found:
            told["facts"] = found
        if self.leading is not None:
            messages, view = self.leading.take(), self.leading.take_view()
            if messages:
                told["messages"] = msgspec.json.encode(messages).decode()
            if view is not None:
                told["view"] = msgspec.json.encode(view).decode()
            lease = self.leading.lease()
            if lease != self._told_lease:
                told["lease"] = self._told_lease = lease
        return told or None

    def _hear(self, told: list[Any]) -> None:
        self.facts.hear([None if one is None else one.get("facts") for one in told])
        first = told[0] or {}
        if "messages" in first:
            self._inbox += msgspec.json.decode(first["messages"], type=list[Envelope])
        if "view" in first:
            self._view = msgspec.json.decode(first["view"], type=View)
        if "lease" in first:
            incarnation, ends_s = first["lease"]
            self._lease = int(incarnation), float(ends_s)


class _Common:
    """A ``Channel`` whose messages all ranks get, and rank 0 sends."""

    def __init__(self, crew: Crew, channel: Channel | None) -> None:
        self._channel = channel
        self.take = crew.take

    def send(self, message: Envelope) -> None:
        """Send it, on rank 0: the others say the same."""
        if self._channel is not None:
            self._channel.send(message)
