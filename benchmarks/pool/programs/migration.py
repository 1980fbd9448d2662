"""Request migration: a running request goes on at another instance (``transfer``).

The active KV of a request in decode is moved while it runs, as far as its pages are
full and so do not change any more; then it stops here, the rest follows with what the
other instance has to know, and it goes on there. The stop is as long as the last page's
way, not as long as the prompt's:

    migration = Migration(pool, to, num_blocks)     # room there, also for what comes
    migration.copy(blocks, num_tokens)              # now and then, while it decodes
    migration.hand_over(request)                    # it does not decode here any more
    while migration.poll() is RUNNING: pool.poll()

Blocks at the receiver belong to the sender until the last step; so a migration that
fails leaves nothing there, and the request goes on here with the KV that it has. One
case is open, as with any handover over a network: the last answer is lost
(``may_have_arrived``). The request goes on here then too, and whoever streams its
answer takes tokens from one owner only; greedy decoding gives both the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from programs.notes import read_note, write_note

from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.receiver import Arrival
from sgl_tiered.pool.transfer import Transfer
from sgl_tiered.transport.base import TransferStatus

__all__ = ["Migration", "RunningRequest", "take_migrated"]

_KIND = "migration"
_NO_LAYERS = (0, 0)
"""A transfer of no layers moves no bytes: it hands blocks over."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningRequest:
    """A request in decode.

    Attributes:
        rid: its name.
        tokens: int32 [n], prompt and answer so far.
        num_prompt: how many of them are the prompt.
        num_computed: tokens whose KV exists; the next step computes the others.
        blocks: uint64, active blocks with that KV, the last one filled in part.
        settings: what else goes with it (sampling, stop words), in its engine's form.
    """

    rid: str
    tokens: Int32s
    num_prompt: int
    num_computed: int
    blocks: UInt64s
    settings: bytes = b""


class Migration:
    """One request on its way from this instance to another. One thread calls it.

    Args:
        pool: this instance's.
        to: the receiver.
        num_blocks: room to be made there: for the KV so far and what decoding adds
            until it is handed over. What is not needed is freed there in the end.
        type: where.
        way: in how many batches.
        page_tokens: tokens of a block.
        timeout_s: of each transfer; None for the pool's.

    Attributes:
        error: why it failed, in one clause; else empty.
        may_have_arrived: it failed in its last step, without an answer.
    """

    def __init__(
        self,
        pool: MemPool,
        to: int,
        num_blocks: int,
        *,
        page_tokens: int,
        type: BlockType = BlockType.DEVICE,
        way: Way = Way.BY_REQUEST_AGG,
        timeout_s: float | None = None,
    ) -> None:
        self._pool = pool
        self._to = to
        self._type = type
        self._way = way
        self._page_tokens = page_tokens
        self._timeout_s = timeout_s
        self._copies: list[Transfer] = []
        self._last: Transfer | None = None
        self._request: RunningRequest | None = None
        self._num_sent = 0
        self.error = ""
        self.may_have_arrived = False
        self._is_over = False
        targets = pool.alloc_mem(num_blocks, type, id=to)
        self._targets = np.zeros(0, np.uint64) if targets is None else targets
        if targets is None:
            self._fail(f"instance {to} has no room for {num_blocks} blocks")

    @property
    def num_sent(self) -> int:
        """Pages that have been sent, or are on their way."""
        return self._num_sent

    def copy(self, blocks: UInt64s, num_computed: int) -> None:
        """Send the pages that are full by now and were not sent before.

        Args:
            blocks: all of the request's, in order.
            num_computed: tokens whose KV is in them.
        """
        self._send(blocks, num_computed // self._page_tokens)

    def hand_over(self, request: RunningRequest) -> None:
        """Send the rest and let the receiver go on; it must not decode here meanwhile.

        Its blocks are freed here when it has arrived.
        """
        assert self._request is None, f"{request.rid} is handed over already"
        self._request = request
        num_pages = -(-request.num_computed // self._page_tokens)
        assert num_pages <= len(request.blocks), (num_pages, len(request.blocks))
        self._send(request.blocks, num_pages)

    def poll(self) -> TransferStatus:
        """Do what can be done after the pool's ``poll``; never raises for a fault."""
        if self._is_over:
            return TransferStatus.FAILED if self.error else TransferStatus.DONE
        left = []
        for transfer in self._copies:
            if transfer.status is TransferStatus.RUNNING:
                left.append(transfer)
            elif transfer.error:
                self._fail(transfer.error)
                return TransferStatus.FAILED
        self._copies = left
        if self._request is not None and self._last is None and not left:
            self._last = self._begin_last(self._request)
        if self._last is not None:
            return self._end(self._last)
        return TransferStatus.RUNNING

    def abort(self) -> None:
        """Give it up: what was sent is freed there, and the request stays here."""
        if not self._is_over:
            self.may_have_arrived = self._last is not None
            self._fail("it was given up")

    def _send(self, blocks: UInt64s, num_pages: int) -> None:
        if self._is_over or num_pages <= self._num_sent:
            return
        if num_pages > len(self._targets):
            self._fail(f"{num_pages} pages do not fit into {len(self._targets)} blocks")
            return
        first, self._num_sent = self._num_sent, num_pages
        self._copies.append(
            self._pool.transfer(
                self._to,
                blocks[first:num_pages],
                self._targets[first:num_pages],
                way=self._way,
                more=True,
                timeout_s=self._timeout_s,
            )
        )

    def _begin_last(self, request: RunningRequest) -> Transfer:
        num = self._num_sent
        head = {
            "rid": request.rid,
            "num_prompt": request.num_prompt,
            "num_computed": request.num_computed,
            "num_tokens": len(request.tokens),
        }
        body = request.tokens.astype("<i4").tobytes() + request.settings
        return self._pool.transfer(
            self._to,
            request.blocks[:num],
            self._targets[:num],
            type=self._type,
            private=write_note(_KIND, head, body),
            layers=_NO_LAYERS,
            timeout_s=self._timeout_s,
        )

    def _end(self, last: Transfer) -> TransferStatus:
        status = last.status
        if status is TransferStatus.RUNNING:
            return status
        if last.error:
            self.may_have_arrived = status is TransferStatus.TIMED_OUT
            self._fail(last.error)
            return TransferStatus.FAILED
        assert self._request is not None
        self._is_over = True
        self._free(self._targets[self._num_sent :])
        self._free(self._request.blocks)
        return TransferStatus.DONE

    def _fail(self, error: str) -> None:
        self._is_over = True
        self.error = error
        self._free(self._targets)

    def _free(self, blocks: UInt64s) -> None:
        # Blocks at a receiver that is gone are refused, and are nobody's any more.
        if len(blocks):
            self._pool.free_mem(blocks)


def take_migrated(arrival: Arrival) -> RunningRequest | None:
    """Return the request that has arrived; None if the arrival is something else."""
    note = read_note(_KIND, arrival.private)
    if note is None:
        return None
    head, body = note
    try:
        num_bytes = 4 * int(head["num_tokens"])
        return RunningRequest(
            rid=str(head["rid"]),
            tokens=np.frombuffer(body[:num_bytes], "<i4").astype(np.int32),
            num_prompt=int(head["num_prompt"]),
            num_computed=int(head["num_computed"]),
            blocks=arrival.addresses,
            settings=body[num_bytes:],
        )
    except (KeyError, TypeError, ValueError):
        # A sender of another version.
        return None
