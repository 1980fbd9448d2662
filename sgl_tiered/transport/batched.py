"""One transport over any library: batches, deadlines, quarantine, lost peers.

One thread, the *pump*, makes all calls of the library that move bytes. It keeps at most
``max_in_flight`` pieces under way with each peer, so a batch of any length passes the
library's queue, and looks after each piece until the library says that it has ended,
also when its transfer has long timed out: that is the fence of the quarantine. Callers
wait on an event and look at the clock themselves, so a library that hangs delays nobody
beyond the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.transport.base import (
    Peer,
    PeerAddress,
    PeerLost,
    Pieces,
    Region,
    TransferStatus,
)
from sgl_tiered.transport.batch import (
    ARRIVED,
    FAILED,
    RUNNING,
    BatchedTransfer,
    Part,
    PeerLink,
)
from sgl_tiered.transport.quarantine import Quarantine
from sgl_tiered.transport.transfer_library import Library

__all__ = ["DEFAULT_GRACE_S", "DEFAULT_TIMEOUT_S", "BatchedTransport"]

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

_LOG = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_GRACE_S = 60.0
"""Twice the time after which Mooncake gives up a connection without progress."""
_MIN_PAUSE_S = 20e-6
_MAX_PAUSE_S = 500e-6
_STRAY_PAUSE_S = 20e-3
"""Between looks at pieces whose transfers have ended without them."""
_CLOSE_S = 5.0
_LOOK_AHEAD = 8
"""Running parts that are asked for at one look; they end nearly in order."""
_FULL_LOOK = 16
"""Every so many looks all parts are asked for: one that hangs must not hide others."""
_RUNNING = TransferStatus.RUNNING


class BatchedTransport:
    """A ``Transport`` over a library.

    Args:
        library: moves the bytes; closed with the transport.
        clock: the time of deadlines and graces.
        timeout_s: deadline of a transfer that names none.
        grace_s: how long pieces stay in quarantine after their fence.
        threaded: False for tests, which call ``pump`` themselves.
    """

    def __init__(
        self,
        library: Library,
        *,
        clock: Clock | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        grace_s: float = DEFAULT_GRACE_S,
        threaded: bool = True,
    ) -> None:
        self._library = library
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._quarantine = Quarantine(self._clock, grace_s)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._library_lock = threading.Lock()
        self._memories: list[tuple[Region, UInt8s]] = []
        self._peers: list[PeerLink] = []
        self._lost: list[PeerLost] = []
        self._listeners: list[Callable[[], None]] = []
        self._num_pumps = 0
        self._is_closed = False
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(
                target=self._run, name="tiered-transport", daemon=True
            )
            self._thread.start()

    @property
    def address(self) -> PeerAddress:
        """What others connect by, with all regions that are registered now."""
        with self._library_lock:
            endpoint, metadata = self._library.endpoint()
            regions = tuple(region for region, _ in self._memories)
        return PeerAddress(self._library.kind, endpoint, regions, metadata)

    @property
    def quarantine(self) -> Quarantine:
        """What is held of this instance's own memory."""
        return self._quarantine

    def register(self, memory: UInt8s) -> Region:
        """Make memory known to peers."""
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous or not memory.size:
            raise ValueError(
                f"memory must be uint8, C-contiguous and not empty, not {memory.dtype} "
                f"{memory.shape}"
            )
        with self._library_lock:
            number, address = len(self._memories), memory.ctypes.data
            region = Region(number, address, memory.nbytes)
            self._library.register(region.address, region.num_bytes)
            self._memories.append((region, memory))
        return region

    def connect(self, address: PeerAddress) -> PeerLink:
        """Make a peer known."""
        if address.kind != self._library.kind:
            raise ValueError(
                f"the peer speaks {address.kind}, this instance {self._library.kind}"
            )
        try:
            with self._library_lock:
                link = self._library.connect(address)
        except ValueError:
            raise
        except Exception as error:
            # Libraries have classes of their own for what is malformed.
            name = type(error).__name__
            raise ValueError(
                f"{address.kind} takes no such address ({name})"
            ) from error
        peer = PeerLink(address, link, Quarantine(self._clock, self._grace_s))
        with self._lock:
            self._peers.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer: what runs with it fails, and its quarantine goes on."""
        assert isinstance(peer, PeerLink)
        with self._work:
            peer.is_forgotten = True
            self._fail_all(peer, "disconnected")
            self._work.notify()

    def push(
        self, peer: Peer, pieces: Pieces, *, timeout_s: float | None = None
    ) -> BatchedTransfer:
        """Begin to write local pieces to the peer's memory."""
        return self._begin(peer, pieces, True, timeout_s)

    def pull(
        self, peer: Peer, pieces: Pieces, *, timeout_s: float | None = None
    ) -> BatchedTransfer:
        """Begin to read the peer's pieces into local memory."""
        return self._begin(peer, pieces, False, timeout_s)

    def notify(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have something called whenever a transfer has ended, by any thread."""

        def end() -> None:
            with self._lock:
                self._listeners.remove(call)

        with self._lock:
            self._listeners.append(call)
        return end

    def has_ended(self) -> None:
        """Tell those who want to know; the lock is held."""
        for call in self._listeners:
            call()

    def take_lost(self) -> list[PeerLost]:
        """Return the peers lost since the last call, each once."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Fail what runs and leave the network; may be called twice."""
        with self._work:
            if self._is_closed:
                return
            self._is_closed = True
            for peer in self._peers:
                self._fail_all(peer, "the transport was closed")
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                return  # The library hangs, and must not be torn down under it.
        with self._library_lock:
            self._library.close()

    def expire(self, transfer: BatchedTransfer) -> None:
        """End a transfer whose deadline has passed."""
        if transfer.status is not TransferStatus.RUNNING:
            return
        with self._lock:
            self._expire(transfer, self._clock.now())

    def wait_for(
        self, transfer: BatchedTransfer, ended: threading.Event, timeout_s: float | None
    ) -> None:
        """Wait until ``ended`` is set, the deadline has passed, or ``timeout_s``."""
        stop_s = transfer.deadline_s
        if timeout_s is not None:
            stop_s = min(stop_s, self._clock.now() + timeout_s)
        while not ended.is_set():
            left_s = stop_s - self._clock.now()
            if left_s <= 0:
                return
            if not ended.wait(left_s) and timeout_s is not None:
                # That time has passed, whatever a clock that is set by hand says.
                return

    def pump(self) -> bool:
        """Expire, submit and check once; returns whether anything has changed."""
        changed = False
        with self._lock:
            now_s = self._clock.now()
            peers = list(self._peers)
            for peer in peers:
                for transfer in peer.running:
                    self._expire(transfer, now_s)
                if any(transfer.status is not _RUNNING for transfer in peer.running):
                    peer.running = [t for t in peer.running if t.status is _RUNNING]
        self._num_pumps += 1
        for peer in peers:
            changed |= self._submit(peer)
            if peer.is_asking and not self._threaded:
                self._find_out(peer)
            changed |= self._check(peer)
            if peer.is_forgotten and not peer.parts and not peer.is_asking:
                with self._lock:
                    self._peers.remove(peer)
                with self._library_lock:
                    self._library.disconnect(peer.link)
        return changed

    def _begin(
        self, peer: Peer, pieces: Pieces, is_push: bool, timeout_s: float | None
    ) -> BatchedTransfer:
        assert isinstance(peer, PeerLink)
        memories = self._memories
        regions = tuple(region for region, _ in memories)
        _demand_inside(regions, pieces.local_region, pieces.local, pieces, "local")
        _demand_inside(
            peer.address.regions, pieces.remote_region, pieces.remote, pieces, "remote"
        )
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = self._clock.now() + timeout_s
        transfer = BatchedTransfer(self, peer, pieces, is_push, deadline_s)
        held = self._quarantine.held(pieces.local_region, pieces.local, pieces.lengths)
        held |= peer.quarantine.held(
            pieces.remote_region, pieces.remote, pieces.lengths
        )
        with self._work:
            if not len(pieces):
                transfer.end(TransferStatus.DONE, "")
            elif why := self._why_not(peer, held):
                transfer.end(TransferStatus.FAILED, why)
            else:
                peer.waiting.append(transfer)
                peer.running.append(transfer)
                self._work.notify()
        return transfer

    def _why_not(self, peer: PeerLink, held: Bools) -> str:
        if self._is_closed:
            return "the transport was closed"
        if peer.is_forgotten:
            return "disconnected"
        if peer.why_lost:
            return f"the peer is lost: {peer.why_lost}"
        if held.any():
            return f"{int(held.sum())} pieces are in quarantine"
        return ""

    def _expire(self, transfer: BatchedTransfer, now_s: float) -> None:
        if transfer.status is TransferStatus.RUNNING and transfer.deadline_s <= now_s:
            transfer.end(
                TransferStatus.TIMED_OUT,
                f"{transfer.num_arrived} of {len(transfer.first)} batch parts "
                "had arrived at the deadline",
            )

    def _fail_all(self, peer: PeerLink, why: str) -> None:
        for transfer in peer.running:
            transfer.end(TransferStatus.FAILED, why)
        peer.waiting.clear()

    def _submit(self, peer: PeerLink) -> bool:
        """Hand the library what fits; True if there was anything."""
        submitted = False
        while True:
            with self._lock:
                part = self._next_part(peer)
                if part is None:
                    return submitted
            transfer = part.transfer
            first = transfer.first[part.start : part.stop]
            pieces = transfer.pieces
            here, _ = self._memories[pieces.local_region]
            there = peer.address.regions[pieces.remote_region]
            tickets: list[tuple[int, Any]] = []
            try:
                with self._library_lock:
                    tickets = self._library.submit(
                        peer.link,
                        transfer.is_push,
                        pieces.local[first] + here.address,
                        pieces.remote[first] + there.address,
                        transfer.lengths[part.start : part.stop],
                    )
            except Exception as error:  # noqa: BLE001 - the pump has to live on
                _LOG.warning("a library raised in submit", exc_info=error)
            with self._lock:
                peer.parts.remove(part)
                start = part.start
                for count, ticket in tickets:
                    stop = start + count
                    piece = Part(transfer, start, stop, ticket)
                    if ticket is None:
                        self._settle(peer, piece, arrived=False)
                    else:
                        peer.parts.append(piece)
                    start = stop
                self._lose_sight(peer, transfer, part.stop - start)
            submitted = True

    def _next_part(self, peer: PeerLink) -> Part | None:
        """Mark what to submit next as running, before the library sees it."""
        while peer.waiting:
            transfer = peer.waiting[0]
            is_over = transfer.status is not TransferStatus.RUNNING
            if is_over or transfer.num_begun == len(transfer.first):
                peer.waiting.pop(0)
                continue
            room = self._library.max_in_flight - peer.num_in_flight
            if room <= 0:
                return None
            if not peer.is_reached:
                self._ask(peer)
                return None
            start = transfer.num_begun
            stop = min(start + room, len(transfer.first))
            transfer.states[start:stop] = RUNNING
            transfer.num_begun = stop
            transfer.num_running += stop - start
            peer.num_in_flight += stop - start
            part = Part(transfer, start, stop, None)
            peer.parts.append(part)
            return part
        return None

    def _check(self, peer: PeerLink) -> bool:
        """Ask the library for what has ended; True if anything has."""
        found: list[tuple[Part, TransferStatus | None]] = []
        still = []
        left = len(peer.parts) if self._num_pumps % _FULL_LOOK == 0 else _LOOK_AHEAD
        with self._library_lock:
            for position, part in enumerate(peer.parts):
                if left == 0:
                    still.extend(peer.parts[position:])
                    break
                status = self._status(part)
                if status is _RUNNING:
                    left -= 1
                    still.append(part)
                else:
                    found.append((part, status))
        if not found:
            return False
        with self._lock:
            peer.parts = still
            for part, status in found:
                if status is None:
                    self._lose_sight(peer, part.transfer, part.stop - part.start)
                else:
                    arrived = status is TransferStatus.DONE
                    self._settle(peer, part, arrived=arrived)
        return True

    def _status(self, part: Part) -> TransferStatus | None:
        """Ask for one part; None if nobody can say any more."""
        try:
            return self._library.check(part.ticket)
        except Exception as error:  # noqa: BLE001 - the pump has to live on
            _LOG.warning("a library raised in check", exc_info=error)
            return None

    def _settle(self, peer: PeerLink, part: Part, *, arrived: bool) -> None:
        """Take note that the library has nothing left of a part."""
        transfer, count = part.transfer, part.stop - part.start
        transfer.states[part.start : part.stop] = ARRIVED if arrived else FAILED
        transfer.num_running -= count
        peer.num_in_flight -= count
        if arrived:
            transfer.num_arrived += count
            if transfer.num_arrived == len(transfer.first):
                transfer.end(TransferStatus.DONE, "")
        else:
            transfer.end(TransferStatus.FAILED, "the library failed a piece")
            self._ask(peer)
        transfer.pass_fence()

    def _lose_sight(
        self, peer: PeerLink, transfer: BatchedTransfer, count: int
    ) -> None:
        """Fail pieces of which nobody can say any more when they end.

        They count as running for ever, so the fence of their quarantine never passes.
        """
        if count:
            peer.num_in_flight -= count
            transfer.end(TransferStatus.FAILED, "the library raised")

    def _ask(self, peer: PeerLink) -> None:
        """Find out, on a thread, whether a peer is there; one question at a time."""
        if peer.is_asking or peer.why_lost or self._is_closed:
            return
        peer.is_asking = True
        if self._threaded:
            threading.Thread(
                target=self._find_out, args=(peer,), name="tiered-peer", daemon=True
            ).start()

    def _find_out(self, peer: PeerLink) -> None:
        was_reached = peer.is_reached
        question = self._library.gone if was_reached else self._library.reach
        try:
            why = question(peer.link)
        except Exception as error:  # noqa: BLE001 - what is not known is no loss
            _LOG.warning("a library raised when asked for a peer", exc_info=error)
            why = ""
        with self._work:
            peer.is_asking = False
            if why:
                peer.why_lost = why
                self._lost.append(PeerLost(peer.address, why))
                self._fail_all(peer, f"the peer is lost: {why}")
            else:
                peer.is_reached = True
            self._work.notify()

    def _run(self) -> None:
        pause_s = _MIN_PAUSE_S
        while True:
            with self._work:
                while not self._is_closed and not self._has_work():
                    self._work.wait()
                if self._is_closed:
                    return
                is_urgent = self._has_urgent_work()
            if self.pump():
                pause_s = _MIN_PAUSE_S
            else:
                time.sleep(pause_s if is_urgent else _STRAY_PAUSE_S)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _has_work(self) -> bool:
        return any(
            peer.parts
            or (peer.is_forgotten and not peer.is_asking)
            or (peer.waiting and not peer.is_asking)
            for peer in self._peers
        )

    def _has_urgent_work(self) -> bool:
        return any(peer.running for peer in self._peers)


def _demand_inside(
    regions: tuple[Region, ...], number: int, offsets: Int64s, pieces: Pieces, side: str
) -> None:
    if not 0 <= number < len(regions):
        raise ValueError(f"no {side} region {number}: there are {len(regions)}")
    if not len(pieces):
        return
    num_bytes = regions[number].num_bytes
    # Not start + length <= end: that could overflow.
    inside = (offsets >= 0) & (offsets <= num_bytes - pieces.lengths)
    if not inside.all():
        row = int(np.argmin(inside))
        raise ValueError(
            f"{side} piece {row} ({int(pieces.lengths[row])} bytes at "
            f"{int(offsets[row])}) is outside its region of {num_bytes} bytes"
        )
