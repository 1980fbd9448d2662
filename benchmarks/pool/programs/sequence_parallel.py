"""Sequence parallelism: a long prompt's KV is computed in parts and exchanged.

Member r of a group has part r of the prompt's pages. Attention is causal, so that it
needs, layer by layer, the parts before its own: as soon as a member has computed keys
and values of a layer, they are sent on (``transfer``, one layer, to blocks that were
allocated at the receiver beforehand). Two patterns:

- ``ALL_GATHER``: every member sends its part to all after it, over links of its own;
- ``RING``: every member sends to the next one only, its own part and what it got: each
  link carries every part once, and nobody needs more than one neighbour.

A push tells the receiver nothing, so each is followed by a transfer of no blocks whose
``private`` says what has arrived; the last layer's hands the blocks over. The last
member then has the KV of the whole prompt, goes on with it, and may ``insert`` it.

    exchange = SequenceExchange(pool, members, rank, own_blocks, num_pages, num_layers)
    for layer in range(num_layers):
        ...                                    # keys and values into own_blocks
        exchange.publish(layer)
        while not exchange.has(layer): pool.poll(); exchange.poll(arrivals)
        ...                                    # attention over exchange.blocks

Blocks that a member sends to belong to it until they are handed over, so nothing stays
at a receiver when it fails: ``error`` says why, and the prompt is computed elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from programs.notes import read_note, write_note

from sgl_tiered.core.plans import UInt64s
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.messages import from_wire, to_wire
from sgl_tiered.pool.receiver import Arrival
from sgl_tiered.pool.transfer import Transfer
from sgl_tiered.transport.base import TransferStatus

__all__ = ["Pattern", "SequenceExchange"]

_KIND = "sequence"
_NO_BLOCKS = np.zeros(0, np.uint64)


class Pattern(Enum):
    """Who sends to whom."""

    ALL_GATHER = "all-gather"
    RING = "ring"


@dataclass(slots=True, eq=False)
class _Lane:
    """One part's way to one member: its layers go one after the other.

    Attributes:
        to: the receiver.
        part: whose KV.
        sources, targets: blocks here and there.
        waiting: layers to be sent.
        layer: the one under way, -1 for none.
        push, notice: its bytes, and the message that follows them.
    """

    to: int
    part: int
    sources: UInt64s
    targets: UInt64s
    waiting: deque[int]
    layer: int = -1
    push: Transfer | None = None
    notice: Transfer | None = None
    is_over: bool = False


class SequenceExchange:
    """One member's side of the exchange for one prompt. One thread calls it.

    Args:
        pool: this instance's.
        members: instances, in the order of their parts.
        rank: which of them this one is.
        own: uint64, active blocks of this member's part.
        num_pages: of every part.
        num_layers: of the model.
        pattern: who sends to whom.
        name: of this exchange, of no other that a member may be in at that time, as
            when one member has begun the next while another ends the last; arrivals
            of others are left alone.
        type: where the receivers keep what they get.
        timeout_s: of each transfer; None for the pool's.

    Attributes:
        error: why it failed, in one clause; else empty.
    """

    def __init__(
        self,
        pool: MemPool,
        members: Sequence[int],
        rank: int,
        own: UInt64s,
        num_pages: Sequence[int],
        num_layers: int,
        *,
        pattern: Pattern = Pattern.RING,
        name: str = "",
        type: BlockType = BlockType.DEVICE,
        timeout_s: float | None = None,
    ) -> None:
        assert len(members) == len(num_pages), (members, num_pages)
        assert len(own) == num_pages[rank], (len(own), num_pages[rank])
        self._pool = pool
        self._rank = rank
        self._num_pages = tuple(num_pages)
        self._num_layers = num_layers
        self._name = name
        self._type = type
        self._timeout_s = timeout_s
        # Of each part: its blocks here, and how many of its layers are complete.
        self._blocks: dict[int, UInt64s] = {rank: own}
        self._num_complete = dict.fromkeys(range(rank + 1), 0)
        self._lanes: list[_Lane] = []
        self.error = ""
        for to, part in self._ways(members, pattern):
            targets = pool.alloc_mem(num_pages[part], type, id=to)
            if targets is None:
                self._fail(f"instance {to} has no room for {num_pages[part]} blocks")
                return
            self._lanes.append(_Lane(to, part, own, targets, deque()))

    @property
    def is_over(self) -> bool:
        """Whether all that this member sends has been handed over."""
        return all(lane.is_over for lane in self._lanes)

    def has(self, layer: int) -> bool:
        """Return whether this layer of all parts before this one has arrived."""
        return all(self._num_complete[part] > layer for part in range(self._rank))

    def blocks(self) -> UInt64s:
        """Return the blocks here of the prompt's pages up to this part's end."""
        return np.concatenate([self._blocks[part] for part in range(self._rank + 1)])

    def publish(self, layer: int) -> None:
        """Send this member's keys and values of a layer, which are complete now.

        Layers come in order.
        """
        done = self._num_complete[self._rank]
        assert layer == done, f"layer {layer} after {done} layers"
        self._complete(self._rank, layer)

    def poll(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        """Take what has arrived and send what is due; return what is not of this.

        Args:
            arrivals: of the pool's ``take_arrivals``.
        """
        others = [arrival for arrival in arrivals if not self._take(arrival)]
        for lane in self._lanes:
            if not self.error and not lane.is_over:
                self._advance(lane)
        return others

    def close(self) -> None:
        """Give up what has not been handed over; parts that arrived stay this one's."""
        self._fail(self.error or "it was closed")

    def _ways(self, members: Sequence[int], pattern: Pattern) -> list[tuple[int, int]]:
        """Return (receiver, part) of all that this member sends."""
        after = members[self._rank + 1 :]
        if pattern is Pattern.ALL_GATHER:
            return [(member, self._rank) for member in after]
        return [(after[0], part) for part in range(self._rank + 1)] if after else []

    def _complete(self, part: int, layer: int) -> None:
        self._num_complete[part] = layer + 1
        for lane in self._lanes:
            if lane.part == part:
                lane.sources = self._blocks[part]
                lane.waiting.append(layer)

    def _take(self, arrival: Arrival) -> bool:
        note = read_note(_KIND, arrival.private)
        if note is None or note[0].get("name") != self._name:
            return False
        head, raw = note
        part, layer = int(head["part"]), int(head["layer"])
        if layer != self._num_complete.get(part):
            # One before it went elsewhere: what is there of it nobody has told.
            self._fail(f"layer {layer} of part {part} came out of its order")
            return True
        # At the end the blocks are ours, and may have got other addresses.
        handed_over = len(arrival.addresses) > 0
        self._blocks[part] = arrival.addresses if handed_over else from_wire(raw)
        self._complete(part, layer)
        return True

    def _advance(self, lane: _Lane) -> None:
        """Move one lane along: push a layer, tell of it, go on with the next."""
        if lane.layer < 0:
            if not lane.waiting:
                return
            lane.layer = lane.waiting.popleft()
            lane.push = self._push(lane)
        is_last = lane.layer == self._num_layers - 1
        under_way = lane.notice or lane.push
        assert under_way is not None
        if under_way.status is TransferStatus.RUNNING:
            return
        if under_way.error:
            self._fail(under_way.error)
        elif lane.notice is None and not is_last:
            lane.notice = self._pool.transfer(
                lane.to,
                _NO_BLOCKS,
                _NO_BLOCKS,
                private=self._note(lane, to_wire(lane.targets)),
                timeout_s=self._timeout_s,
            )
        else:
            lane.is_over = is_last
            lane.layer, lane.push, lane.notice = -1, None, None

    def _push(self, lane: _Lane) -> Transfer:
        """Send a layer; the last one's transfer hands the blocks over as well."""
        is_last = lane.layer == self._num_layers - 1
        return self._pool.transfer(
            lane.to,
            lane.sources,
            lane.targets,
            type=self._type,
            private=self._note(lane, b"") if is_last else b"",
            way=Way.BY_LAYER,
            layers=(lane.layer, lane.layer + 1),
            more=not is_last,
            timeout_s=self._timeout_s,
        )

    def _note(self, lane: _Lane, body: bytes) -> bytes:
        head = {"name": self._name, "part": lane.part, "layer": lane.layer}
        return write_note(_KIND, head, body)

    def _fail(self, error: str) -> None:
        self.error = error
        for lane in self._lanes:
            if not lane.is_over:
                lane.is_over = True
                self._pool.free_mem(lane.targets)
