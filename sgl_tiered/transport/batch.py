"""A transfer in batches, the peer it is with, and what the library was given of it.

Neighbouring pieces that touch on both sides are joined into *runs* of up to
``_JOINED_BYTES``; small pieces cost these libraries as much as large ones. All fields
are changed under the lock of the transport.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.transport.base import PeerAddress, Pieces, TransferStatus
from sgl_tiered.transport.quarantine import Quarantine

__all__ = ["ARRIVED", "FAILED", "RUNNING", "BatchedTransfer", "Part", "PeerLink"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

_JOINED_BYTES = 1 << 20
"""Larger pieces are not faster, neither in Mooncake nor in NIXL over TCP."""

RUNNING, ARRIVED, FAILED = 1, 2, 3
"""States of a run: in the library's hands, and its two ends; 0 before it is begun."""


@dataclass(slots=True, eq=False)
class Part:
    """Runs ``start`` to ``stop - 1`` of a transfer, as the library was given them."""

    transfer: BatchedTransfer
    start: int
    stop: int
    ticket: Any


class _Owner(Protocol):
    """The transport, as its transfers see it."""

    @property
    def quarantine(self) -> Quarantine: ...

    def expire(self, transfer: BatchedTransfer) -> None: ...

    def has_ended(self) -> None: ...

    def wait_for(
        self, transfer: BatchedTransfer, ended: threading.Event, timeout_s: float | None
    ) -> None: ...


class PeerLink:
    """A peer and what runs with it. Made by ``BatchedTransport.connect``."""

    def __init__(self, address: PeerAddress, link: Any, quarantine: Quarantine) -> None:
        self._address = address
        self._quarantine = quarantine
        self.link = link
        self.why_lost = ""
        self.is_reached = False
        self.is_asking = False
        self.is_forgotten = False
        self.running: list[BatchedTransfer] = []
        self.waiting: list[BatchedTransfer] = []
        self.parts: list[Part] = []
        self.num_in_flight = 0

    @property
    def address(self) -> PeerAddress:
        """What it was connected by."""
        return self._address

    @property
    def lost(self) -> str:
        """Why it is lost, in one clause; empty while it is not known to be."""
        return self.why_lost

    @property
    def quarantine(self) -> Quarantine:
        """What is held of its memory, as far as this instance knows."""
        return self._quarantine


class BatchedTransfer:
    """A transfer of a ``BatchedTransport``, in runs of joined pieces."""

    def __init__(
        self,
        transport: _Owner,
        peer: PeerLink,
        pieces: Pieces,
        is_push: bool,
        deadline_s: float,
    ) -> None:
        self._transport = transport
        self._pieces = pieces
        self._ended = threading.Event()
        self.peer = peer
        self.is_push = is_push
        self.deadline_s = deadline_s
        self.first = _joined(pieces)
        self.states = np.zeros(len(self.first), np.uint8)
        self.lengths = np.add.reduceat(pieces.lengths, self.first)[: len(self.first)]
        self.num_begun = 0
        self.num_running = 0
        self.num_arrived = 0
        self.status = TransferStatus.RUNNING
        self.why = ""
        self.holds: tuple[int, int] | None = None

    @property
    def pieces(self) -> Pieces:
        """What it moves."""
        return self._pieces

    @property
    def arrived(self) -> Bools:
        """bool [n]: the pieces known to have arrived."""
        return self._spread(self.states == ARRIVED)

    @property
    def error(self) -> str:
        """One clause: why it is FAILED or TIMED_OUT; else empty."""
        return self.why

    def poll(self) -> TransferStatus:
        """Look at the clock, and return the status."""
        self._transport.expire(self)
        return self.status

    def wait(self, timeout_s: float | None = None) -> TransferStatus:
        """Wait until it ends, for at most ``timeout_s`` seconds."""
        self._transport.wait_for(self, self._ended, timeout_s)
        return self.poll()

    def end(self, status: TransferStatus, why: str) -> None:
        """Settle the status; the transport's lock is held."""
        if self.status is not TransferStatus.RUNNING:
            return
        if status is not TransferStatus.DONE:
            self.why = why
            self._hold()
        self.status = status
        self._ended.set()
        self._transport.has_ended()

    def pass_fence(self) -> None:
        """Begin the grace of what is held, if the library has nothing left of it."""
        if self.holds is not None and self.num_running == 0:
            here, there = self.holds
            self._transport.quarantine.pass_fence(here)
            self.peer.quarantine.pass_fence(there)

    def _hold(self) -> None:
        """Quarantine, on both sides, what was begun and has not arrived."""
        begun = (self.states == RUNNING) | (self.states == FAILED)
        if not begun.any():
            return
        pieces, touched = self._pieces, self._spread(begun)
        lengths = pieces.lengths[touched]
        self.holds = (
            self._transport.quarantine.hold(
                pieces.local_region, pieces.local[touched], lengths
            ),
            self.peer.quarantine.hold(
                pieces.remote_region, pieces.remote[touched], lengths
            ),
        )
        self.pass_fence()

    def _spread(self, of_runs: Bools) -> Bools:
        """Return for each piece what holds for its run."""
        sizes = np.diff(np.append(self.first, len(self._pieces)))
        return np.repeat(of_runs, sizes)


def _joined(pieces: Pieces) -> Int64s:
    """Return where runs of pieces begin that touch on both sides, int64 [num runs]."""
    if not len(pieces):
        return np.zeros(0, np.int64)
    lengths = pieces.lengths
    apart = (pieces.local[1:] != pieces.local[:-1] + lengths[:-1]) | (
        pieces.remote[1:] != pieces.remote[:-1] + lengths[:-1]
    )
    begins = np.concatenate(([True], apart))
    before = np.cumsum(lengths) - lengths
    of_run = np.maximum.accumulate(np.where(begins, before, 0))
    share = (before - of_run) // _JOINED_BYTES
    begins[1:] |= share[1:] != share[:-1]
    return np.flatnonzero(begins).astype(np.int64)
