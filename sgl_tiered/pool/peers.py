"""What the tier ``peer`` asks of other instances and of this one; a request's wish.

`pulls.py` decides; an engine says who the peers are, and a store keeps what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.pool.base import Inserted
from sgl_tiered.transport.base import TransferStatus

__all__ = ["Fetching", "Hint", "Holder", "Peers", "PullStore", "Search", "Wanted"]


class Search(Protocol):
    """A question to peers under way: who holds how much of a prompt."""

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        ...

    @property
    def holders(self) -> Sequence[Holder]:
        """Who can send how much of the prompt."""
        ...


class Fetching(Protocol):
    """Pages on their way from a peer."""

    @property
    def status(self) -> TransferStatus:
        """RUNNING until it has ended."""
        ...

    @property
    def error(self) -> str:
        """One clause: why it failed; else empty."""
        ...

    @property
    def refused(self) -> bool:
        """Whether the holder has said no, as where it has none of the pages."""
        ...

    @property
    def num_blocks(self) -> int:
        """First blocks that have arrived and passed their checks; final at the end."""
        ...

    @property
    def num_read(self) -> int:
        """Those of them that the holder has read from its disk first."""
        ...

    @property
    def read_s(self) -> float:
        """How long it has spent on its disk."""
        ...


class Peers(Protocol):
    """The other instances."""

    def instance_of(self, hint: Hint) -> int | None:
        """Return who a hint names; None for nobody that is there."""
        ...

    def name_of(self, instance: int) -> str:
        """Return an instance's name, for reports."""
        ...

    @property
    def num_others(self) -> int:
        """How many there are."""
        ...

    def search(
        self, digest: bytes, tokens: Int32s, first_page: int, timeout_s: float
    ) -> Search:
        """Ask who holds a prompt's first pages, of which those before are here."""
        ...

    def fetch(
        self,
        instance: int,
        digest: bytes,
        tokens: Int32s,
        addresses: UInt64s,
        first_page: int,
        timeout_s: float,
    ) -> Fetching:
        """Have pages from ``first_page`` on written to blocks of ours, and checked."""
        ...


class PullStore(Protocol):
    """Where pulled pages go; ``pool/cache_store.py``."""

    def num_present(self, namespace: bytes, tokens: Int32s, first_page: int) -> int:
        """Return how many pages from ``first_page`` on are here or on their way."""
        ...

    def alloc(self, medium: TierId, num_blocks: int) -> UInt64s | None:
        """See ``BlockStore``."""
        ...

    def free(self, addresses: UInt64s) -> str:
        """See ``BlockStore``."""
        ...

    def insert_behind(
        self, namespace: bytes, tokens: Int32s, addresses: UInt64s, first_page: int
    ) -> Inserted:
        """Insert blocks of pages whose predecessors need not be in the index."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """Who holds more of a prompt, as somebody else says.

    Attributes:
        name: of the instance, in the pool or to a router.
        url: of its HTTP server; empty where that is not known.
        num_tokens: of the prefix that it holds.
        on_disk: parts of that lie on its disk.
    """

    name: str
    url: str
    num_tokens: int
    on_disk: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """What an instance can send of a prompt.

    Attributes:
        instance: its id.
        num_pages: the first so many pages.
        num_disk: of those that are wanted, how many only its disk has.
        read_s: how long it says that its disk takes for them; 0 where nobody said.
    """

    instance: int
    num_pages: int
    num_disk: int = 0
    read_s: float = 0.0


@dataclass(slots=True)
class Wanted:
    """What is known of one request's wish for a peer's pages.

    Attributes:
        reason: one clause: why nothing was, or is, pulled; empty where it was.
        holder: name of the instance asked for pages; empty for none.
        first_page, num_pages: what has come for it, and is in the cache.
        num_bytes: of those pages.
        seconds: from the decision to pull until the pages were there.
        search_s: how long peers were asked who holds anything.
        predicted_s, saved_s: of the pull, and of computing those pages instead.
        disk_pages, disk_s: of those pages, what the holder read from its disk first,
            and how long that took.
        joined: somebody else had begun the pull.
    """

    reason: str = ""
    holder: str = ""
    first_page: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    search_s: float = 0.0
    predicted_s: float = 0.0
    saved_s: float = 0.0
    disk_pages: int = 0
    disk_s: float = 0.0
    joined: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able value; times in seconds."""
        return {
            "holder": self.holder,
            "reason": self.reason,
            "joined": self.joined,
            "first_page": self.first_page,
            "pages": self.num_pages,
            "bytes": self.num_bytes,
            "seconds": round(self.seconds, 6),
            "search_s": round(self.search_s, 6),
            "predicted_s": round(self.predicted_s, 6),
            "saved_s": round(self.saved_s, 6),
            "disk_pages": self.disk_pages,
            "disk_s": round(self.disk_s, 6),
        }
