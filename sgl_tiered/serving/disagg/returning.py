"""KV of answers on its way back to the instances that computed the prompts.

PD-Caching-3 of MemServe (section 5.1): after a request, the decode instance sends what
the prefill instance lacks, so that the next turn finds the answer there. It goes from
host rows to host rows by ``transfer_with_insert``, behind the offload that a request's
end begins: no decode step waits for it. A few run at a time, and a poll begins few.
What fails, or whose receiver is gone, is dropped: the next turn computes it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.transfer import Transfer
from sgl_tiered.transport.base import TransferStatus

__all__ = ["AnswerReturns", "Ended", "ReturningPool"]

_MOST_RUNNING = 4
_MOST_WAITING = 256
"""Older ones are dropped: their next turn has probably been asked by then."""
_PER_POLL = 1
"""Each costs a walk over its tokens, 50 us for 4,096 of them."""
_TIMEOUT_S = 10.0


class ReturningPool(Protocol):
    """What is used of ``MemPool``; its docstrings say how."""

    def match(self, tokenList: Int32s, *, namespace: bytes = b"") -> UInt64s:  # noqa: N803
        """Return the blocks of a prompt's first pages that this instance has."""
        ...

    def transfer_with_insert(
        self,
        id: int,
        tokenList: Int32s,  # noqa: N803
        srcAddrList: UInt64s,  # noqa: N803
        *,
        namespace: bytes = b"",
        type: BlockType = BlockType.DEVICE,
        timeout_s: float | None = None,
        only_missing: bool = False,
        checked: bool = False,
    ) -> Transfer:
        """Send a prompt's blocks to another instance, which enters them."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A request that has ended.

    Attributes:
        receiver: instance and incarnation that computed its prompt.
        namespace: digest of its ``Namespace``.
        tokens: int32, prompt and answer, whole pages.
    """

    receiver: tuple[int, int]
    namespace: bytes
    tokens: Int32s


class AnswerReturns:
    """Returns under way; called by the thread that owns the pool.

    Args:
        pool: sends.
        is_there: whether an incarnation is a member.
        count: takes what has come of them: ``returns``, ``pages_returned``,
            ``returns_dropped`` and ``returns_failed``.
    """

    def __init__(
        self,
        pool: ReturningPool,
        is_there: Callable[[int, int], bool],
        count: Callable[[str, int], None],
    ) -> None:
        self._pool = pool
        self._is_there = is_there
        self._count = count
        self._waiting: deque[Ended] = deque()
        self._running: list[Transfer] = []

    @property
    def num_under_way(self) -> int:
        """Returns that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(self, ended: Ended) -> None:
        """Note a request whose pages are in the host tier now."""
        self._waiting.append(ended)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._count("returns_dropped", 1)

    def poll(self) -> None:
        """Take note of ends, and begin what may begin."""
        for transfer in [t for t in self._running if t.status is not _RUNNING]:
            self._running.remove(transfer)
            if transfer.status is TransferStatus.DONE:
                self._count("returns", 1)
                self._count("pages_returned", transfer.num_inserted)
            else:
                self._count("returns_failed", 1)
        for _ in range(_PER_POLL):
            if not self._waiting or len(self._running) >= _MOST_RUNNING:
                return
            self._begin(self._waiting.popleft())

    def clear(self) -> None:
        """Forget what waits: its pages are to be found no more."""
        self._waiting.clear()

    def _begin(self, ended: Ended) -> None:
        instance, incarnation = ended.receiver
        if not self._is_there(instance, incarnation):
            self._count("returns_dropped", 1)
            return
        blocks = self._pool.match(ended.tokens, namespace=ended.namespace)
        if not len(blocks):
            # Evicted, or its offload found no room.
            self._count("returns_dropped", 1)
            return
        transfer = self._pool.transfer_with_insert(
            instance,
            ended.tokens,
            blocks,
            namespace=ended.namespace,
            type=BlockType.HOST,
            timeout_s=_TIMEOUT_S,
            only_missing=True,
            checked=True,
        )
        self._running.append(transfer)


_RUNNING = TransferStatus.RUNNING
