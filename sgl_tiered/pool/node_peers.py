"""The other members of a pool, as `pulls.py` asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.pool.fetch import Fetch
from sgl_tiered.pool.fetch import Search as NodeSearch
from sgl_tiered.pool.membership import View
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.peers import Fetching, Hint, Holder, Search
from sgl_tiered.transport.base import TransferStatus

__all__ = ["InPool", "NodePeers"]


class InPool(Protocol):
    """An instance in a pool; ``PoolNode`` is one."""

    @property
    def instance(self) -> int:
        """Its id."""
        ...

    @property
    def view(self) -> View:
        """The members."""
        ...

    @property
    def pool(self) -> MemPool:
        """Its calls."""
        ...


class NodePeers:
    """``Peers`` over a node's pool.

    Args:
        node: of this instance.
    """

    def __init__(self, node: InPool) -> None:
        self._node = node

    @property
    def num_others(self) -> int:
        """How many other members there are."""
        return sum(
            member.instance != self._node.instance for member in self._node.view.members
        )

    def instance_of(self, hint: Hint) -> int | None:
        """Return the member of this name, else the one that serves at this URL."""
        named = at_url = None
        for member in self._node.view.members:
            if member.instance == self._node.instance:
                continue
            if member.name == hint.name:
                named = member.instance
            if hint.url and member.endpoints.get("http") == hint.url:
                at_url = member.instance
        # Routers have names of their own: a URL says more than a name.
        return named if at_url is None else at_url

    def name_of(self, instance: int) -> str:
        """Return a member's name; its number where it is gone."""
        member = self._node.view.member(instance)
        return f"instance {instance}" if member is None else member.name

    def search(
        self, digest: bytes, tokens: Int32s, first_page: int, timeout_s: float
    ) -> Search:
        """Ask members who holds a prompt's first pages."""
        return _Answers(
            self._node.pool.locate(
                tokens, namespace=digest, first_page=first_page, timeout_s=timeout_s
            )
        )

    def fetch(
        self,
        instance: int,
        digest: bytes,
        tokens: Int32s,
        addresses: UInt64s,
        first_page: int,
        timeout_s: float,
    ) -> Fetching:
        """Have pages written to blocks of ours, and checked."""
        return _Flight(
            self._node.pool.fetch(
                instance,
                tokens,
                addresses,
                namespace=digest,
                first_page=first_page,
                timeout_s=timeout_s,
            )
        )


class _Answers:
    """A search as ``PeerPulls`` reads it."""

    def __init__(self, search: NodeSearch) -> None:
        self._search = search

    @property
    def done(self) -> bool:
        """Whether all have answered, or the time is over."""
        return self._search.is_over

    @property
    def holders(self) -> Sequence[Holder]:
        """Who holds how many pages."""
        return [
            Holder(i, held.num_pages, held.media.get(TierId.DISK, 0), held.read_s)
            for i, held in self._search.held.items()
        ]


class _Flight:
    """A fetch as ``PeerPulls`` reads it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    @property
    def status(self) -> TransferStatus:
        """RUNNING until it has ended."""
        return self._fetch.status

    @property
    def error(self) -> str:
        """Why it failed."""
        return self._fetch.error

    @property
    def refused(self) -> bool:
        """Whether the holder has said no."""
        request = self._fetch.request
        if self._fetch.status is not TransferStatus.FAILED or request is None:
            return False
        return request.answer is not None and bool(request.answer.refusal)

    @property
    def num_blocks(self) -> int:
        """First blocks that have arrived and passed their checks."""
        return self._fetch.num_blocks

    @property
    def num_read(self) -> int:
        """Those that the holder has read from its disk first."""
        return min(self._fetch.num_read, self._fetch.num_blocks)

    @property
    def read_s(self) -> float:
        """How long the holder has spent on its disk."""
        return self._fetch.read_s
