"""Byte ranges that must not be used again yet, since a peer may still touch them.

A range is held until two things have happened, in this order:

1. its *fence* has passed: somebody who knows has said that nothing new will touch it.
   For the side that began a transfer that is the library's own word that the batch has
   ended; for the other side it is the word of the first one, or what ``release.py``
   knows of its process;
2. ``grace_s`` have gone by since. The libraries let single pieces of a failed batch run
   on for a moment, and a dead sender's last bytes may still be under way.

A fence that never passes holds its range for ever: that loses memory, which is counted
and shown, and never gives wrong KV.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock

__all__ = ["Quarantine"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Hold:
    """Ranges of one failure.

    Attributes:
        region: number of the region.
        starts, stops: int64 [n], sorted, apart from each other.
        free_at_s: when grace ends; infinite until the fence has passed.
    """

    region: int
    starts: Int64s
    stops: Int64s
    free_at_s: float = math.inf


class Quarantine:
    """Ranges held in the regions of one instance; any thread may ask.

    Args:
        clock: the time.
        grace_s: how long a range is held after its fence, in seconds.
    """

    def __init__(self, clock: Clock, grace_s: float) -> None:
        if grace_s < 0:
            raise ValueError(f"a grace of {grace_s} s")
        self._clock = clock
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._holds: dict[int, _Hold] = {}
        self._next_ticket = 0

    @property
    def grace_s(self) -> float:
        """How long a range is held after its fence, in seconds."""
        return self._grace_s

    def hold(self, region: int, offsets: Int64s, lengths: Int64s) -> int:
        """Hold ranges until their fence and grace; returns a ticket for the fence.

        Args:
            region: number of the region.
            offsets: int64 [n], where the ranges begin.
            lengths: int64 [n], bytes; ranges may touch and overlap.
        """
        starts, stops = _merged(offsets, lengths)
        with self._lock:
            ticket = self._next_ticket
            self._next_ticket += 1
            if len(starts):
                self._holds[ticket] = _Hold(region, starts, stops)
        return ticket

    def pass_fence(self, ticket: int) -> None:
        """Say that nothing new will touch a hold's ranges; grace begins now.

        A second time changes nothing, and neither does a hold that is over.
        """
        with self._lock:
            hold = self._holds.get(ticket)
            if hold is not None and math.isinf(hold.free_at_s):
                hold.free_at_s = self._clock.now() + self._grace_s

    def held(self, region: int, offsets: Int64s, lengths: Int64s) -> Bools:
        """Return for each range whether any byte of it is held, bool [n].

        Costs next to nothing while nothing is held, and O(n log m) for m held ranges.
        """
        found = np.zeros(len(offsets), np.bool_)
        with self._lock:
            self._forget_what_is_over()
            for hold in self._holds.values():
                if hold.region == region:
                    # Only the last that begins before the end can overlap.
                    last = np.searchsorted(hold.starts, offsets + lengths) - 1
                    ends = np.where(last >= 0, hold.stops[np.maximum(last, 0)], 0)
                    found |= (last >= 0) & (ends > offsets) & (lengths > 0)
        return found

    @property
    def num_held_bytes(self) -> int:
        """Bytes held now; what two failures share counts twice."""
        with self._lock:
            self._forget_what_is_over()
            return sum(
                int((hold.stops - hold.starts).sum()) for hold in self._holds.values()
            )

    def _forget_what_is_over(self) -> None:
        if not self._holds:
            return
        now_s = self._clock.now()
        over = [key for key, hold in self._holds.items() if hold.free_at_s <= now_s]
        for ticket in over:
            del self._holds[ticket]


def _merged(offsets: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Return the same bytes as sorted ranges that neither touch nor overlap."""
    some = np.asarray(lengths) > 0
    starts = np.asarray(offsets, np.int64)[some]
    stops = starts + np.asarray(lengths, np.int64)[some]
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    if not len(starts):
        return starts, stops
    apart = np.flatnonzero(starts[1:] > stops[:-1]) + 1
    first = np.concatenate(([0], apart))
    last = np.concatenate((apart, [len(starts)])) - 1
    return starts[first], stops[last]
