"""The cache table: which copies of which pages exist, where, and in what state.

Two sets of columns (numpy), which grow in place while the memory lasts that is reserved
for them. A *row* stands for a page. An *entry*
is one copy of a page's layer span: tier, address, bytes, representation, encoding,
checksum, pins and state. ``entry_of[t][row]`` finds in O(1) the copy that spans all
layers in tier number ``t`` (the position in the configuration, fastest first), be it KV
or activations; other entries exist beside it and are found by ``entries_of``. The table
owns the slots of the tiers: an entry exists exactly as long as its slot is in use.

A copy in use (pinned, or in flight) that is to go is *doomed*: out of sight at once,
and freed when its last user ends. Where all copies of a tier are to go, those that
nobody uses are doomed as well, and freed step by step (``Removal``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.slots import SlotAllocator
from sgl_tiered.core.ids import Encoding, Representation, TierId
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.plans import Bools, Int32s, Int64s, UInt8s, UInt64s

__all__ = ["FREE", "IN_FLIGHT", "LOADING", "READY", "CacheTable", "grown"]

logger = logging.getLogger(__name__)

FREE, IN_FLIGHT, READY = 0, 1, 2
"""States of an entry."""
LOADING = 0x80
"""Bit of ``flags``: a load of this page is under way. Bit t: ready copy in tier t."""

_FIRST_CAPACITY = 1024
_MOST_NEW = 1 << 17
"""Rows or entries that one growth adds, a few ms, for which a pass waits."""
_WINDOW = 1 << 16
"""Entries looked at together: what is noted of them in between stays in the cache."""


class CacheTable:
    """Columns of rows and entries, and the slots of the tiers.

    Args:
        tiers: the tiers, fastest first.
        num_slots: capacity of each, in pages, in the end.
        num_layers: layers of the model; an entry of fewer is not a whole copy.
        page_bytes: bytes of a whole page.
        encoding: how whole pages are written.
        act_page_bytes: bytes of a whole page's activations; 0 where there are none.
        num_open: capacity of each tier at first, where ``slots`` grow later.

    Attributes:
        flags: uint8 per row, see ``LOADING``.
        copies: uint8 per row, its entries in all tiers and states.
        node: object per row, the node of the radix index that holds it, or None. Where
            ``in_index`` is False it means nothing; ``nodes_of`` looks at both.
        in_index: bool per row, whether a node holds it.
        born: int64 per row, ``version`` when it was allocated.
        keys, key_known: page key per row, once derived.
        entry_of: per tier, int32 per row, -1 for none.
        num_most: rows and entries for which memory is reserved from the start, where
            the system lets it be.
        num_busy: per tier, entries that are pinned or in flight.
        version: grows with every change that can make a decision stale.
        on_rows_freed: each is called with rows that are given back.
        on_copies: called with rows of which a copy came into sight or went out of it.
    """

    def __init__(
        self,
        tiers: tuple[TierId, ...],
        num_slots: tuple[int, ...],
        num_layers: int,
        page_bytes: int,
        encoding: Encoding = Encoding.RAW,
        act_page_bytes: int = 0,
        num_open: tuple[int, ...] | None = None,
    ) -> None:
        self.tiers = tiers
        self.num_layers = num_layers
        self.page_bytes = page_bytes
        self.act_page_bytes = act_page_bytes
        self.whole_encoding = encoding
        self.version = 0
        self.on_rows_freed: list[Callable[[Int32s], None]] = []
        self.on_copies: Callable[[Int32s], None] = _ignore
        self.slots = [
            SlotAllocator(now, most)
            for now, most in zip(num_open or num_slots, num_slots, strict=True)
        ]
        # Bounded by the capacity, unlike a list that nobody may ever take.
        self._forgotten = [np.zeros(n, np.bool_) for n in num_slots]
        self._num_forgotten = [0] * len(tiers)
        self.num_busy = [0] * len(tiers)
        self.rows = SlotAllocator(_FIRST_CAPACITY)
        self.entries = SlotAllocator(_FIRST_CAPACITY)
        num_slots_in_all = sum(num_slots)
        # There are rows without copies too, of pages that are on the device alone. Of
        # more of them than this (of 16 tokens: 2 million tokens) one growth copies the
        # columns of rows, 0.1 s for a million rows, and doubles the room. Reserving for
        # the device would cost 8 bytes a page, of all of its pages, for good.
        self.num_most = num_slots_in_all + min(num_slots_in_all, _MOST_NEW)
        is_refused = False

        def column(dtype: npt.DTypeLike, fill: int = 0, width: int = 0) -> Any:
            nonlocal is_refused
            shape = (0, width) if width else (0,)
            new = grown(np.empty(shape, dtype), _FIRST_CAPACITY, fill, self.num_most)
            whole: Any = new.base
            is_refused |= len(whole) < self.num_most
            return new

        self.flags: UInt8s = column(np.uint8)
        self.copies: UInt8s = column(np.uint8)
        self.node: npt.NDArray[Any] = column(object)
        self.in_index: Bools = column(np.bool_)
        self.born: Int64s = column(np.int64)
        self.keys: UInt8s = column(np.uint8, width=KEY_BYTES)
        self.key_known: Bools = column(np.bool_)
        self.entry_of: list[Int32s] = [column(np.int32, -1) for _ in tiers]
        self.entry_row: Int32s = column(np.int32, -1)
        self.layer_start: npt.NDArray[np.uint16] = column(np.uint16)
        self.layer_stop: npt.NDArray[np.uint16] = column(np.uint16)
        self.representation: UInt8s = column(np.uint8)
        self.encoding: UInt8s = column(np.uint8)
        self.tier: UInt8s = column(np.uint8)
        self.address: Int64s = column(np.int64, -1)
        self.num_bytes: Int64s = column(np.int64)
        self.checksum: UInt64s = column(np.uint64)
        self.pins: npt.NDArray[np.int32] = column(np.int32)
        self.state: UInt8s = column(np.uint8)
        self.doomed: Bools = column(np.bool_)
        if is_refused:
            logger.warning(
                "sgl-tiered: the system refuses to reserve memory for a table of %d "
                "pages, so it is copied as it grows, for which a pass waits up to a "
                "second; let it reserve (sysctl vm.overcommit_memory=0, or a larger "
                "vm.overcommit_ratio), or give the tiers fewer pages",
                num_slots_in_all,
            )

    # Rows.

    def alloc_rows(self, num_rows: int) -> Int32s:
        """Return rows for new pages: no copies, no key, no node."""
        if num_rows > self.rows.free_slots:
            self._grow_rows(self.rows.used_slots + num_rows)
        taken = self.rows.alloc(num_rows)
        assert taken is not None, f"no {num_rows} rows after growth"
        self.version += 1
        self.born[taken] = self.version
        self.key_known[taken] = False
        return taken.astype(np.int32)

    def free_rows(self, rows: Int32s) -> None:
        """Give back rows without copies."""
        num_copies = int(self.copies[rows].sum())
        assert num_copies == 0, f"{len(rows)} rows freed with {num_copies} copies"
        self.bind(rows, None)
        self.flags[rows] = 0
        self.version += 1
        for tell in self.on_rows_freed:
            tell(rows)
        self.rows.free(rows.astype(np.int64))

    def bind(self, rows: Int32s | Int64s, node: object) -> None:
        """Note which node of the index holds the rows; None for none."""
        self.node[rows] = node
        self.in_index[rows] = node is not None

    def nodes_of(self, rows: Int32s | Int64s) -> list[Any]:
        """Return the node that holds each row; None for none."""
        nodes = self.node[rows]
        nodes[~self.in_index[rows]] = None
        found: list[Any] = nodes.tolist()
        return found

    def ends_of(self, rows: Int32s) -> list[int]:
        """Return the last of some rows in each node that holds any of them."""
        nodes = self.nodes_of(rows)
        last = {id(n): row for n, row in zip(nodes, rows.tolist(), strict=True) if n}
        return list(last.values())

    def detach(self) -> None:
        """Take all rows out of the index and out of sight, and doom all copies.

        Some nanoseconds a row. Rows and copies in use are given back by their users,
        the others by a ``Removal``.
        """
        self.version += 1
        self.flags[:] = 0
        self.in_index[:] = False
        self._doom(None)

    def let_go(self, rows: Int64s) -> None:
        """Drop what is left of rows that no node holds: their node, and idle rows."""
        self.node[rows] = None
        idle = rows[self.copies[rows] == 0]
        if len(idle):
            self.free_rows(idle.astype(np.int32))

    # Entries.

    def add_copies(
        self,
        tier: int,
        rows: Int32s,
        addresses: Int64s,
        *,
        layers: tuple[int, int] | None = None,
        representation: UInt8s | Representation = Representation.KV,
        encoding: Encoding | None = None,
        num_bytes: int | None = None,
    ) -> Int64s:
        """Make IN_FLIGHT entries for rows at allocated slots; return the entries.

        Args:
            tier: number of the tier.
            rows: the pages, each at most once.
            addresses: their slots, taken from ``slots[tier]``.
            layers: first and one past the last layer; None for all.
            representation: what the copies hold, all alike or uint8 [n].
            encoding: how they are written; None for as whole pages are.
            num_bytes: bytes of each; None for a whole page of what it holds.
        """
        start, stop = layers or (0, self.num_layers)
        encoding = self.whole_encoding if encoding is None else encoding
        assert 0 <= start < stop <= self.num_layers, (start, stop, self.num_layers)
        if len(rows) > self.entries.free_slots:
            self._grow_entries(self.entries.used_slots + len(rows))
        new = self.entries.alloc(len(rows))
        assert new is not None, f"no {len(rows)} entries after growth"
        self.entry_row[new] = rows
        self.layer_start[new] = start
        self.layer_stop[new] = stop
        self.representation[new] = representation
        self.encoding[new] = encoding
        self.tier[new] = tier
        self.address[new] = addresses
        self.num_bytes[new] = self.page_bytes if num_bytes is None else num_bytes
        if representation is not Representation.KV:
            is_act = self.representation[new] == Representation.ACT
            assert self.act_page_bytes or not is_act.any(), "no page is activations"
            if num_bytes is None:
                self.num_bytes[new[is_act]] = self.act_page_bytes
        self.checksum[new] = 0
        self.pins[new] = 0
        self.state[new] = IN_FLIGHT
        self.num_busy[tier] += len(new)
        self.doomed[new] = False
        self.copies[rows] += np.uint8(1)
        if stop - start == self.num_layers and encoding == self.whole_encoding:
            column = self.entry_of[tier]
            assert (column[rows] < 0).all(), "a second whole copy in one tier"
            column[rows] = new
        forgotten = self._forgotten[tier]
        # The new copy's record replaces the old one: nothing is left to forget.
        self._num_forgotten[tier] -= int(np.count_nonzero(forgotten[addresses]))
        forgotten[addresses] = False
        self.slots[tier].bind(addresses, new)
        self.version += 1
        return new

    def kinds(self, entries: Int64s) -> UInt8s | None:
        """Return what copies hold; None for KV, where nothing else can be."""
        return self.representation.take(entries) if self.act_page_bytes else None

    def bytes_by_kind(self, entries: Int64s) -> Int64s | None:
        """Return the bytes of copies; None where all are whole pages of KV."""
        return self.num_bytes.take(entries) if self.act_page_bytes else None

    def entries_of(self, row: int) -> Int64s:
        """Return all entries of a row, of part of the layers too; O(entries)."""
        return np.flatnonzero((self.entry_row == row) & (self.state != FREE))

    def mark_ready(self, entries: Int64s, checksums: UInt64s | None = None) -> Int32s:
        """End the flight of entries; return the rows of doomed ones, freed now."""
        assert (self.state[entries] == IN_FLIGHT).all(), "landed without a flight"
        self.state[entries] = READY
        self._count_busy(entries[self.pins[entries] == 0], -1)
        if checksums is not None:
            self.checksum[entries] = checksums
        self.version += 1
        doomed = self.doomed[entries]
        if doomed.any():
            gone = self._free_entries(entries[doomed & (self.pins[entries] == 0)])
            self._show(entries[~doomed])
            return gone
        self._show(entries)
        return np.zeros(0, np.int32)

    def fail_flight(self, entries: Int64s) -> Int32s:
        """Free entries whose bytes did not arrive; return their rows."""
        assert (self.state[entries] == IN_FLIGHT).all(), "failed without a flight"
        return self._free_entries(entries)

    def pin(self, entries: Int64s, times: npt.NDArray[np.uint16] | int = 1) -> None:
        """Keep entries where they are until as many ``unpin`` calls.

        Args:
            entries: each at most once.
            times: that each is pinned.
        """
        idle = ~self.busy(entries)
        self.pins[entries] += times
        self._count_busy(entries[idle & (self.pins[entries] > 0)], 1)

    def unpin(self, entries: Int64s) -> Int32s:
        """Undo one ``pin``; return the rows of doomed entries, freed now."""
        assert (self.pins[entries] > 0).all(), "unpinned more often than pinned"
        self.pins[entries] -= 1
        self._count_busy(entries[~self.busy(entries)], -1)
        doomed = self.doomed[entries]
        if not doomed.any():
            return np.zeros(0, np.int32)
        over = doomed & (self.pins[entries] == 0) & (self.state[entries] == READY)
        return self._free_entries(entries[over])

    def busy(self, entries: Int64s | Int32s) -> Bools:
        """Return for each entry whether it is pinned or in flight."""
        result: Bools = (self.pins[entries] > 0) | (self.state[entries] == IN_FLIGHT)
        return result

    def discard(self, entries: Int64s) -> Int32s:
        """Drop copies, those in use when they no longer are.

        Returns:
            The rows that lost a copy now (one tier each; repeated for several).
        """
        busy = self.busy(entries)
        if busy.any():
            doomed = entries[busy]
            self.doomed[doomed] = True
            self._hide(doomed)
            entries = entries[~busy]
        return self._free_entries(entries)

    def doom(self, tier: int) -> None:
        """Put all copies in a tier out of sight, and doom them, used or not.

        Some nanoseconds a row. Those in use are freed by their users, the others by a
        ``Removal``, which tells ``on_copies`` of them as well.
        """
        self.version += 1
        self.flags &= np.uint8(0xFF ^ (1 << tier))
        self._doom(tier)

    def take_forgotten(self, tier: int) -> Int64s:
        """Return the slots freed since the last call and not in use again."""
        if not self._num_forgotten[tier]:
            return np.zeros(0, np.int64)
        forgotten = self._forgotten[tier]
        addresses = np.flatnonzero(forgotten)
        forgotten[:] = False
        self._num_forgotten[tier] = 0
        return addresses

    def give_up(self, tier: int, addresses: Int64s) -> None:
        """Free slots that were reserved and hold no copy; they count as forgotten."""
        self.slots[tier].free(addresses)
        self._forget(tier, addresses)

    def array_bytes(self) -> int:
        """Return the bytes of all columns and allocators' arrays."""
        columns = [v for v in vars(self).values() if isinstance(v, np.ndarray)]
        # What is None takes memory as well.
        whole: Any = self.node.base
        columns.append(whole[len(self.node) :])
        columns += [*self.entry_of, *self._forgotten]
        allocators = [*self.slots, self.rows, self.entries]
        return sum(c.nbytes for c in columns) + sum(9 * a.capacity for a in allocators)

    def _doom(self, tier: int | None) -> None:
        for start in range(0, len(self.doomed), _WINDOW):
            part = slice(start, start + _WINDOW)
            chosen = self.state[part] != FREE
            if tier is not None:
                chosen &= self.tier[part] == tier
            self.doomed[part] |= chosen

    def _count_busy(self, entries: Int64s, delta: int) -> None:
        """Note that entries became busy (1) or idle (-1)."""
        if len(entries):
            tiers = np.bincount(self.tier[entries], minlength=len(self.tiers))
            for tier, num in enumerate(tiers.tolist()):
                self.num_busy[tier] += delta * num

    def _show(self, entries: Int64s) -> None:
        rows = self.entry_row[entries]
        for tier, column in enumerate(self.entry_of):
            whole = rows[column[rows] == entries]
            if len(whole):
                self.flags[whole] |= np.uint8(1 << tier)
                self.on_copies(whole)

    def _hide(self, entries: Int64s) -> None:
        rows = self.entry_row[entries]
        self.version += 1
        for tier, column in enumerate(self.entry_of):
            whole = rows[column[rows] == entries]
            if len(whole):
                self.flags[whole] &= np.uint8(0xFF ^ (1 << tier))
                self.on_copies(whole)

    def _free_entries(self, entries: Int64s) -> Int32s:
        if not len(entries):
            return np.zeros(0, np.int32)
        self._hide(entries)
        self._count_busy(entries[self.busy(entries)], -1)
        rows = self.entry_row[entries]
        for tier, column in enumerate(self.entry_of):
            column[rows[column[rows] == entries]] = -1
            addresses = self.address[entries[self.tier[entries] == tier]]
            if len(addresses):
                self.slots[tier].free(addresses)
                self._forget(tier, addresses)
        np.subtract.at(self.copies, rows, np.uint8(1))
        self.state[entries] = FREE
        self.entry_row[entries] = -1
        self.entries.free(entries)
        return rows

    def _forget(self, tier: int, addresses: Int64s) -> None:
        self._forgotten[tier][addresses] = True
        self._num_forgotten[tier] += len(addresses)

    def _grow_rows(self, needed: int) -> None:
        capacity = _larger(self.rows, needed)
        self.rows.grow(capacity)
        self.flags = grown(self.flags, capacity)
        self.copies = grown(self.copies, capacity)
        self.node = grown(self.node, capacity)
        self.in_index = grown(self.in_index, capacity)
        self.born = grown(self.born, capacity)
        self.keys = grown(self.keys, capacity)
        self.key_known = grown(self.key_known, capacity)
        self.entry_of = [grown(column, capacity, -1) for column in self.entry_of]

    def _grow_entries(self, needed: int) -> None:
        capacity = _larger(self.entries, needed)
        self.entries.grow(capacity)
        self.entry_row = grown(self.entry_row, capacity, -1)
        self.layer_start = grown(self.layer_start, capacity)
        self.layer_stop = grown(self.layer_stop, capacity)
        self.representation = grown(self.representation, capacity)
        self.encoding = grown(self.encoding, capacity)
        self.tier = grown(self.tier, capacity)
        self.address = grown(self.address, capacity, -1)
        self.num_bytes = grown(self.num_bytes, capacity)
        self.checksum = grown(self.checksum, capacity)
        self.pins = grown(self.pins, capacity)
        self.state = grown(self.state, capacity, FREE)
        self.doomed = grown(self.doomed, capacity)


def _ignore(rows: Int32s) -> None:
    """Take no note of rows."""


def _larger(allocator: SlotAllocator, needed: int) -> int:
    """Return a capacity of so many or more: twice as many, until that takes long."""
    now = allocator.capacity
    return max(needed, now + min(now, _MOST_NEW))


def grown(
    column: npt.NDArray[Any], capacity: int, fill: int = 0, num_most: int = 0
) -> npt.NDArray[Any]:
    """Return a column of so many rows: the same memory, as long as it lasts.

    What is reserved of numbers takes no memory before it is written; of objects it
    takes 8 bytes each. Less is reserved where the system refuses it, as one with
    ``vm.overcommit_memory=2`` does. What is new is ``fill``, or None in a column of
    objects.

    Args:
        column: [n, ...].
        capacity: rows that it is to have, at least n.
        fill: of what is new.
        num_most: rows for which memory is to last, where it does not yet.
    """
    whole = column if column.base is None else column.base
    if len(whole) < capacity:
        more = max(2 * len(whole), capacity)
        try:
            whole = _new(column, max(num_most, more))
        except MemoryError:
            try:
                whole = _new(column, more)
            except MemoryError:
                whole = _new(column, capacity)
        whole[: len(column)] = column
    longer = whole[:capacity]
    if fill:
        longer[len(column) :] = fill
    return longer


def _new(column: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """Return room for so many rows of a column, each of 0 or None."""
    make = np.empty if column.dtype == object else np.zeros
    return make((num_rows, *column.shape[1:]), column.dtype)
