"""What the ranks of a tensor-parallel server agree on: rank 0's clock and decisions.

Each rank runs a scheduler of its own over the same requests. A decision that reads a
clock, or anything measured, would differ between them, and ranks that build different
batches hang in the next collective call. So rank 0 decides, once per scheduling pass,
and sends the time together with what was decided in one small message; the others take
it. With one rank there is no message. All ranks must call alike: as often, in the same
order, with the same ``num_values``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock

__all__ = ["Broadcast", "SharedClock", "group_broadcast"]

Float64s = npt.NDArray[np.float64]


class Broadcast(Protocol):
    """Sends a vector from rank 0 to all ranks."""

    @property
    def is_source(self) -> bool:
        """Whether this is rank 0."""
        ...

    def send(self, values: Float64s) -> None:
        """Fill ``values`` on every rank with rank 0's; blocks until it has them."""
        ...


class SharedClock:
    """Rank 0's clock, and what rank 0 decides by it.

    Args:
        clock: of this rank.
        broadcast: to the other ranks; None where there are none.
    """

    def __init__(self, clock: Clock, broadcast: Broadcast | None = None) -> None:
        self._clock = clock
        self._broadcast = broadcast
        self._shared_s = 0.0

    def now(self) -> float:
        """Return rank 0's time of its last decision; of a single rank, the time."""
        return self._clock.now() if self._broadcast is None else self._shared_s

    def tick(self) -> float:
        """Agree on the time, once per pass; return it."""
        self.decide(0, lambda _: ())
        return self.now()

    def decide(
        self, num_values: int, make: Callable[[float], Sequence[int]]
    ) -> list[int]:
        """Return whole numbers that rank 0 chose at a time that all ranks now know.

        Args:
            num_values: of the numbers; the same on every rank.
            make: called with the time, on rank 0 only; whole numbers below 2**53.
        """
        if self._broadcast is None:
            return list(make(self._clock.now()))
        message = np.zeros(1 + num_values)
        if self._broadcast.is_source:
            self._shared_s = self._clock.now()
            message[0] = self._shared_s
            message[1:] = make(self._shared_s)
        self._broadcast.send(message)
        self._shared_s = float(message[0])
        return [int(value) for value in message[1:]]


class _GroupBroadcast:
    """Over a process group of torch.distributed, on the CPU."""

    def __init__(self, group: Any, source: int) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self._source = source

    @property
    def is_source(self) -> bool:
        """Whether this is the group's first rank."""
        return bool(self._dist.get_rank() == self._source)

    def send(self, values: Float64s) -> None:
        """Broadcast in place."""
        import torch

        self._dist.broadcast(torch.from_numpy(values), self._source, group=self._group)


def group_broadcast(group: Any) -> Broadcast | None:
    """Return a broadcast over a process group; None for a group of one.

    Args:
        group: of torch.distributed, with a backend that sends from the CPU's memory
            (gloo); its first rank decides.
    """
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return None
    return _GroupBroadcast(group, dist.get_global_rank(group, 0))
