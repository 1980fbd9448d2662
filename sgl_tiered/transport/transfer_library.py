"""What ``BatchedTransport`` wants of a library that moves bytes.

All methods but ``reach`` and ``gone`` are called by one thread at a time. Those two may
wait for an answer of the peer; each runs on a thread of its own, next to the others.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.transport.base import PeerAddress, TransferStatus

__all__ = ["Library"]

Int64s = npt.NDArray[np.int64]


class Library(Protocol):
    """Moves ranges between addresses; knows no deadline and no quarantine."""

    kind: str
    """What ``PeerAddress.kind`` says."""
    max_in_flight: int
    """Pieces under way with one peer at once: within the library's own queue."""

    def endpoint(self) -> tuple[str, bytes]:
        """Return endpoint and metadata for this instance's ``PeerAddress``."""
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory known.

        Raises:
            TransportUnavailableError: the library refuses it.
        """
        ...

    def connect(self, address: PeerAddress) -> Any:
        """Return a link for the other methods; does not wait for the peer.

        Raises:
            ValueError: the address is malformed.
        """
        ...

    def reach(self, link: Any) -> str:
        """Wait until the peer has answered once; else return in one clause why not."""
        ...

    def gone(self, link: Any) -> str:
        """Return why the peer is surely gone; empty while it may be there.

        Asked after a failure. A peer that hangs is not gone.
        """
        ...

    def submit(
        self, link: Any, is_push: bool, local: Int64s, remote: Int64s, lengths: Int64s
    ) -> list[tuple[int, Any]]:
        """Begin to move pieces, at most ``max_in_flight``, and do not wait.

        Args:
            link: a result of ``connect``, after ``reach`` was content.
            is_push: local to remote, or the other way.
            local, remote: int64 [n], addresses in either process.
            lengths: int64 [n], bytes.

        Returns:
            A list of (number of pieces, ticket) in the order of the pieces. A ticket
            None means that these were refused, and that nothing of them runs.
        """
        ...

    def check(self, ticket: Any) -> TransferStatus:
        """Return RUNNING, or once DONE or FAILED: then no byte of it moves any more.

        The ticket is used up by a final answer.
        """
        ...

    def disconnect(self, link: Any) -> None:
        """Forget a peer with which nothing runs."""
        ...

    def close(self) -> None:
        """Leave the network."""
        ...
