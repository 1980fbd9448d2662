"""A transport library whose pieces end when a test says so; nothing is moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.transport.base import PeerAddress, Region, TransferStatus

__all__ = ["ADDRESS", "ScriptedLibrary", "Ticket"]

Int64s = npt.NDArray[np.int64]

ADDRESS = PeerAddress("scripted", "peer", (Region(0, 1 << 40, 1 << 30),))
"""What a ``BatchedTransport`` over this library connects to: one region of 1 GiB."""


@dataclass(eq=False)
class Ticket:
    """Pieces that were submitted together.

    Attributes:
        is_push: local to remote.
        local, remote: int64 [n], addresses, as submitted.
        lengths: int64 [n], bytes.
        status: what ``check`` says; RUNNING until a test changes it.
        is_seen: ``check`` has told the end.
    """

    is_push: bool
    local: Int64s
    remote: Int64s
    lengths: Int64s
    status: TransferStatus = TransferStatus.RUNNING
    is_seen: bool = False


@dataclass
class ScriptedLibrary:
    """Notes what it is asked to do.

    Attributes:
        max_in_flight: pieces under way at once; more of them is a defect.
        pieces_per_ticket: how many end together.
        refuses, raises: what ``submit`` does instead; ``raises`` also ``check``.
        why_unreachable, why_gone: answers of ``reach`` and ``gone``.
        tickets: all that were ever given, oldest first.
        disconnected: the links that were let go.
        num_closed: calls of ``close``.
    """

    kind: str = "scripted"
    max_in_flight: int = 4
    pieces_per_ticket: int = 1
    refuses: bool = False
    raises: bool = False
    why_unreachable: str = ""
    why_gone: str = ""
    tickets: list[Ticket] = field(default_factory=list)
    disconnected: list[Any] = field(default_factory=list)
    num_closed: int = 0

    def endpoint(self) -> tuple[str, bytes]:
        """Return constants."""
        return "me", b"metadata"

    def register(self, address: int, num_bytes: int) -> None:
        """Nothing to do."""

    def connect(self, address: PeerAddress) -> str:
        """Return the endpoint."""
        return address.endpoint

    def reach(self, link: str) -> str:
        """Return what the test has set."""
        return self.why_unreachable

    def gone(self, link: str) -> str:
        """Return what the test has set."""
        return self.why_gone

    def submit(
        self,
        link: str,
        is_push: bool,
        local: Int64s,
        remote: Int64s,
        lengths: Int64s,
    ) -> list[tuple[int, Any]]:
        """Note tickets of ``pieces_per_ticket`` pieces, or do as the test has set."""
        if self.raises:
            raise RuntimeError("on purpose")
        if self.refuses:
            return [(len(lengths), None)]
        given = []
        for start in range(0, len(lengths), self.pieces_per_ticket):
            part = slice(start, start + self.pieces_per_ticket)
            ticket = Ticket(is_push, local[part], remote[part], lengths[part])
            self.tickets.append(ticket)
            given.append((len(ticket.lengths), ticket))
        running = sum(len(ticket.lengths) for ticket in self.unseen())
        assert running <= self.max_in_flight, f"{running} pieces under way"
        return given

    def check(self, ticket: Ticket) -> TransferStatus:
        """Return what the test has set; nobody may ask again after an end."""
        if self.raises:
            raise RuntimeError("on purpose")
        assert not ticket.is_seen, "asked again after a final answer"
        ticket.is_seen = ticket.status is not TransferStatus.RUNNING
        return ticket.status

    def disconnect(self, link: str) -> None:
        """Note it; nothing may run."""
        assert not [t for t in self.tickets if t.status is TransferStatus.RUNNING]
        self.disconnected.append(link)

    def close(self) -> None:
        """Count it."""
        self.num_closed += 1

    def unseen(self) -> list[Ticket]:
        """Return the tickets of which ``check`` has told no end yet."""
        return [ticket for ticket in self.tickets if not ticket.is_seen]

    def running(self) -> list[Ticket]:
        """Return the tickets that no test has ended."""
        return [t for t in self.tickets if t.status is TransferStatus.RUNNING]

    def settle(self, status: TransferStatus, count: int | None = None) -> None:
        """End the oldest running tickets."""
        for ticket in self.running()[:count]:
            ticket.status = status
