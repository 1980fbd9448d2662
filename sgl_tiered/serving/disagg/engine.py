"""The calls that SGLang makes of a transfer engine, over our ``Transport``.

SGLang's prefill side names what it writes by raw addresses of both processes, and waits
for each batch. Here an address becomes a region and an offset in it, and a batch one
push for each pair of regions, all under one deadline of ours.

A batch that fails or comes late may still be under way. What it may yet write to is
then held (``transport.quarantine`` and that of the peer), nothing is pushed there, and
``is_settled`` says when nothing of it can arrive any more.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.transport.base import (
    Peer,
    PeerAddress,
    Pieces,
    Region,
    TransferStatus,
    Transport,
)
from sgl_tiered.transport.incidents import Incidents

__all__ = ["FIRST_BYTES_PER_S", "RawEngine", "as_memory"]

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

logger = logging.getLogger(__name__)

_BASE_TIMEOUT_S = 10.0
_SLOWEST_BYTES_PER_S = 50e6
"""A link slower than this counts as stuck: a twentieth of TCP on one machine."""
_FIRST_LATENCY_S = 1e-3
FIRST_BYTES_PER_S = 1e9
"""Of a link before its first push: a tenth of what a network card or a memory does."""


_MOST_SESSIONS = 1024
"""Each start of a decode instance is one, and none says that it is over. Beyond so many
some are forgotten, first those to which no push has ever arrived: whoever reaches a
port may register, and one that is forgotten registers again."""


@dataclass(frozen=True, slots=True)
class _Regions:
    """Regions of one side, ordered by where they begin.

    Attributes:
        starts, stops: int64 [n], addresses.
        numbers: int64 [n], the transport's numbers.
    """

    starts: Int64s
    stops: Int64s
    numbers: Int64s

    @classmethod
    def of(cls, regions: Sequence[Region]) -> _Regions:
        """Sort the regions of one side."""
        ordered = sorted(regions, key=lambda region: region.address)
        starts = np.array([r.address for r in ordered], np.int64)
        sizes = np.array([r.num_bytes for r in ordered], np.int64)
        numbers = np.array([r.number for r in ordered], np.int64)
        return cls(starts, starts + sizes, numbers)

    def find(self, addresses: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s] | None:
        """Return region numbers and offsets, int64 [n]; None if any lies outside."""
        if not len(self.starts):
            return None
        place = np.searchsorted(self.starts, addresses, "right") - 1
        # Not begin + length <= end: that could overflow.
        room = self.stops[place] - lengths
        if (place < 0).any() or (lengths < 1).any() or (addresses > room).any():
            return None
        return self.numbers[place], addresses - self.starts[place]


def _first_link() -> LinkCost:
    return LinkCost(_FIRST_LATENCY_S, FIRST_BYTES_PER_S)


@dataclass(slots=True)
class _Session:
    """A decode instance, as the prefill instance knows it.

    Attributes:
        address: what it registered.
        peer: of the transport; made anew after a loss.
        regions: what it lends.
        link: what pushes to it took that had it for themselves.
        num_pushing, num_begun: batches under way, and so far.
        has_arrived: whether one has.
    """

    address: PeerAddress
    peer: Peer
    regions: _Regions
    link: LinkCost = field(default_factory=_first_link)
    num_pushing: int = 0
    num_begun: int = 0
    has_arrived: bool = False


class RawEngine:
    """Registers and pushes by raw addresses; any thread may call it.

    Args:
        transport: moves the bytes; closed with the process.
        clock: for deadlines.
        timeout_s: of a batch, and what its bytes, and those of batches under way when
            it begins, take at the slowest.
        incidents: counts what fails here.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        timeout_s: float = _BASE_TIMEOUT_S,
        incidents: Incidents | None = None,
    ) -> None:
        self._incidents = incidents or Incidents("prefill and decode")
        self._transport = transport
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        # Held while a peer is connected to anew, which may take long.
        self._probing = threading.Lock()
        self._num_bytes_under_way = 0
        self._known: set[tuple[int, int]] = set()
        self._local = _Regions.of(())
        # The one that was pushed to last stands last.
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        # SGLang takes what follows the last colon for a port, and shares work by it.
        self._session_id = f"{secrets.token_hex(8)}:{secrets.randbelow(1 << 16)}"
        self.num_bytes_pushed = 0
        self.num_failed = 0

    @property
    def kind(self) -> str:
        """Which transport it is."""
        return self._transport.address.kind

    def get_session_id(self) -> str:
        """Return the name of this start of this process."""
        return self._session_id

    def address_bytes(self) -> bytes:
        """Return what a peer must be told to reach this process's memory."""
        return msgspec.msgpack.encode(self._transport.address)

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        """Make memory known; what is known already is left alone.

        Raises:
            TransportUnavailableError: the transport refuses it.
        """
        for address, length in zip(addresses, lengths, strict=True):
            if (address, length) not in self._known:
                self._transport.register(as_memory(address, length))
                self._known.add((address, length))
        self._local = _Regions.of(self._transport.address.regions)
        return 0

    def batch_deregister(self, addresses: list[int]) -> int:
        """Nothing: memory stays registered until the process ends."""
        del addresses
        return 0

    def connect(self, session_id: str, told: bytes) -> str:
        """Take note of a peer by what ``address_bytes`` gave it.

        Returns:
            Why it cannot be reached, in one clause; empty where it may be.
        """
        try:
            return self._take(session_id, told)
        except (ValueError, TypeError, RecursionError) as error:
            return str(error) or "the address is malformed"
        except Exception as error:  # noqa: BLE001 - SGLang's thread has to live on
            self._incidents.note("failed", "an address could not be taken", error)
            return f"{type(error).__name__}: {error}"

    def _take(self, session_id: str, told: bytes) -> str:
        address = msgspec.msgpack.decode(told, type=PeerAddress)
        with self._lock:
            former = self._sessions.get(session_id)
        if former is not None and former.address == address:
            # If it is lost, ``send_probe`` finds it again.
            return ""
        regions = _Regions.of(address.regions)
        session = _Session(address, self._transport.connect(address), regions)
        with self._lock:
            self._sessions[session_id] = session
            self._sessions.move_to_end(session_id)
            self._forget_oldest()
        return ""

    def _forget_oldest(self) -> None:
        """Forget sessions that are too many, but for those with something under way."""
        num_surplus = len(self._sessions) - _MOST_SESSIONS
        if num_surplus <= 0:
            return
        older = list(self._sessions.items())[:-1]
        for session_id, session in sorted(older, key=lambda each: each[1].has_arrived):
            if num_surplus == 0:
                break
            if not (session.num_pushing or session.peer.quarantine.num_held_bytes):
                del self._sessions[session_id]
                self._transport.disconnect(session.peer)
                num_surplus -= 1

    def batch_transfer_sync(
        self,
        session_id: str,
        buffers: list[int],
        peer_addresses: list[int],
        lengths: list[int],
    ) -> int:
        """Write ranges to a peer and wait for them.

        Args:
            session_id: of the peer.
            buffers, peer_addresses: where each range begins, here and there.
            lengths: bytes.

        Returns:
            0 when all of it has arrived; else -1, and some may still be under way.
            Whatever the peer has named, nothing is raised: the thread is SGLang's.
        """
        try:
            error = self._transfer(session_id, buffers, peer_addresses, lengths)
        except Exception as unknown:  # noqa: BLE001 - SGLang's thread has to live on
            self._incidents.note("failed", "a push could not be made", unknown)
            error = type(unknown).__name__
        return self._failed(error) if error else 0

    def _transfer(
        self,
        session_id: str,
        buffers: list[int],
        peer_addresses: list[int],
        lengths: list[int],
    ) -> str:
        """Write ranges to a peer and wait for them; return why not all have arrived."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                self._sessions.move_to_end(session_id)
        if session is None:
            return f"session {session_id!r} is not known"
        try:
            here = np.asarray(buffers, np.int64)
            there = np.asarray(peer_addresses, np.int64)
            sizes = np.asarray(lengths, np.int64)
        except OverflowError:
            return "an address has more than 63 bits"
        if not _are_pairs(here, there, sizes):
            return "there are more ranges on one side than on the other"
        local = self._local.find(here, sizes)
        remote = session.regions.find(there, sizes)
        if local is None or remote is None:
            side = "this" if local is None else "the decode"
            return f"a range lies outside {side} instance's memory"
        num_bytes = int(sizes.sum())
        with self._lock:
            self._num_bytes_under_way += num_bytes
            due_s = self._num_bytes_under_way / _SLOWEST_BYTES_PER_S
            is_alone = session.num_pushing == 0
            session.num_pushing += 1
            session.num_begun += 1
            number = session.num_begun
        try:
            started_s = self._clock.now()
            error = self._push(session, local, remote, sizes, self._timeout_s + due_s)
            seconds = self._clock.now() - started_s
        finally:
            with self._lock:
                self._num_bytes_under_way -= num_bytes
                session.num_pushing -= 1
        if error:
            return error
        with self._lock:
            self.num_bytes_pushed += num_bytes
            session.has_arrived |= num_bytes > 0
            if is_alone and session.num_begun == number:
                session.link.observe(num_bytes, seconds)
        return ""

    def link_bytes_per_s(self, session_ids: Sequence[str]) -> float:
        """Return what the link to the first of these peers carries.

        Args:
            session_ids: of peers; one that is not known has the first guess.
        """
        with self._lock:
            known = [self._sessions[s] for s in session_ids if s in self._sessions]
            link = known[0].link if known else _first_link()
            return link.snapshot().bandwidth_bytes_per_s

    def _push(
        self,
        session: _Session,
        local: tuple[Int64s, Int64s],
        remote: tuple[Int64s, Int64s],
        sizes: Int64s,
        timeout_s: float,
    ) -> str:
        """Write ranges and wait for them; return why not all of them have arrived."""
        pairs = local[0] * (int(remote[0].max(initial=0)) + 1) + remote[0]
        transfers, why = [], ""
        for pair in np.unique(pairs):
            of_pair = np.flatnonzero(pairs == pair)
            pieces = Pieces(
                local[1][of_pair],
                remote[1][of_pair],
                sizes[of_pair],
                int(local[0][of_pair[0]]),
                int(remote[0][of_pair[0]]),
            )
            try:
                push = self._transport.push(session.peer, pieces, timeout_s=timeout_s)
            except ValueError as error:
                # Those that were begun have to end first.
                why = str(error)
                break
            transfers.append(push)
        ends = [transfer.wait() for transfer in transfers]
        for transfer, end in zip(transfers, ends, strict=True):
            if end is not TransferStatus.DONE:
                return f"{end.name}: {transfer.error}"
        return why

    def is_settled(self, session_id: str) -> bool:
        """Return whether nothing can arrive any more of what failed before."""
        with self._lock:
            session = self._sessions.get(session_id)
        return session is None or session.peer.quarantine.num_held_bytes == 0

    def send_probe(self, session_id: str) -> int:
        """Return 0 if pushing to a peer that failed may be tried again, else -1."""
        with self._probing:
            with self._lock:
                session = self._sessions.get(session_id)
            if session is None or session.peer.quarantine.num_held_bytes:
                return -1
            if not session.peer.lost:
                return 0
            try:
                peer = self._transport.connect(session.address)
            except ValueError:
                return -1
            with self._lock:
                if self._sessions.get(session_id) is session:
                    session.peer, peer = peer, session.peer
                    code = 0
                else:
                    # It was forgotten meanwhile.
                    code = -1
            self._transport.disconnect(peer)
        return code

    def _failed(self, why: str) -> int:
        with self._lock:
            self.num_failed += 1
        logger.warning("sgl-tiered: KV could not be sent: %s", why)
        return -1


def _are_pairs(*lists: Int64s) -> bool:
    """Return whether lists are of one length."""
    return all(each.ndim == 1 and len(each) == len(lists[0]) for each in lists)


def as_memory(address: int, length: int) -> UInt8s:
    """Return the bytes at an address, uint8 [length], without touching them.

    The caller's memory has to outlive the array; it may be a device's.
    """
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
