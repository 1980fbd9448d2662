"""A store of blocks in a cache that is in use: its own table, index, slots and tiers.

No second cache: a block that is inserted is an ordinary copy, which lookups find, edges
take to the next tier and the tier's policy evicts; a copy of the cache's is a block
that ``match`` finds. Active blocks are slots of a tier that no copy has, set aside by
the cache's own allocator, with room made as for an offload; a hold is a pin. Addresses
die with whatever frees a slot, the cache's own evictions included.

Blocks are in the tiers that are memory. What is inserted goes on to a disk by the
cache's edges, with its record and its checksum; a copy that only the disk has is no
block until it is brought up (`disk_reads.py`). In memory a copy carries no checksum, as
those of offloads: who brings bytes from outside checks them before he inserts.

The cache's own calls may come between any two of these; all come from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.index import Node, concat_rows
from sgl_tiered.cache.table import FREE, LOADING, READY
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.tombstones import Cause
from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.core.keys import KEY_BYTES, as_tokens
from sgl_tiered.core.plans import Int32s, Int64s, UInt64s
from sgl_tiered.pool.base import Inserted
from sgl_tiered.pool.block_slots import NO_ADDRESSES, BlockSlots
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["CacheStore"]

_Part = tuple[int, Int64s | slice, Int64s]
"""Blocks of one medium: its number, their positions in the list, their slots."""
_ONLY_KV = "pages are kept as activations here, and blocks hold KV only"


class CacheSlots(BlockSlots):
    """The slots of a tier, handed out as ever, each with a generation.

    Without the open run of ``BlockSlots``: prompts of a cache are better off in the
    shortest run that holds them.
    """

    num_bound = 0
    """Slots that a copy has."""

    @property
    def num_active(self) -> int:
        """Slots in use that no copy has."""
        return self.used_slots - self.num_bound

    def bind(self, slots: Int64s, entries: Int64s) -> None:
        """Note which entries of the table have these slots."""
        self.entry_at[slots] = entries
        self.num_bound += len(slots)

    def free(self, slots: Int64s) -> None:
        """Give slots back; their addresses are dead from now on."""
        self.num_bound -= int(np.count_nonzero(self.entry_at[slots] >= 0))
        super().free(slots)

    def _open_run(self, num_slots: int) -> bool:
        return False


class CacheStore(TableStore):
    """A ``BlockStore`` over a ``TieredCache``.

    Args:
        cache: decides about everything that is in its index.
        instance: id of the instance.
        memory: the tiers that hold blocks: the cache's first ones.
        incarnation: number of this start of the instance.
        max_active_share: of the slots that a tier has by now, between 0 and 1: so
            many may be active blocks, which nothing evicts. Blocks of others are among
            them.
    """

    def __init__(
        self,
        cache: TieredCache,
        instance: int,
        memory: Mapping[TierId, MemoryTier],
        incarnation: int = 1,
        max_active_share: float = 1.0,
    ) -> None:
        # Not the parent's constructor, which makes a table of its own.
        config = cache.config
        self._pages, self._chain = cache.share(self)
        self._instance = instance
        self._layout = config.layout
        self._page_bytes = self._pages.page_bytes
        self._refuses = _ONLY_KV if config.act_page_bytes else ""
        self._table, self._index = self._pages.table, self._pages.index
        self._evictors = self._pages.evictors
        self._media = tuple(sorted(memory))
        assert self._media == self._pages.tiers[: len(memory)], "not the first tiers"
        self._number = {medium: i for i, medium in enumerate(self._media)}
        self._mask = np.uint8((1 << len(memory)) - 1)
        self._tiers = dict(memory)
        self._kept = [
            self._take_over(number, incarnation) for number in range(len(memory))
        ]
        self._slots = list(self._kept)
        self._by_medium = [self._slots[0]] * len(TierId)
        for medium, blocks in zip(self._media, self._slots, strict=True):
            self._by_medium[medium] = blocks
        self._max_active_share = max_active_share

    # What the laws of the cache ask.

    def num_active(self, tier: int) -> int:
        """Return how many of a tier's slots in use hold no copy."""
        if tier >= len(self._kept):
            return 0
        table, slots = self._table, self._kept[tier]
        bound = np.flatnonzero(slots.entry_at >= 0)
        entries = slots.entry_at[bound]
        assert len(bound) == slots.num_bound, (len(bound), slots.num_bound)
        assert (table.tier[entries] == tier).all(), "an entry of another tier"
        assert (table.address[entries] == bound).all(), "an entry of another slot"
        return slots.num_active

    def held(self) -> Int64s:
        """Return the entries that are held, each as often as it is."""
        found = [
            np.repeat(slots.entry_at, slots.holds)[
                np.repeat(slots.entry_at >= 0, slots.holds)
            ]
            for slots in self._slots
        ]
        return np.concatenate(found).astype(np.int64)

    # Memory blocks.

    def num_allowed(self, medium: TierId) -> int:
        """Return how many more blocks of a medium may be active."""
        number = self._number[medium]
        slots = self._kept[number]
        return int(self._max_active_share * slots.capacity) - slots.num_active

    def alloc(self, medium: TierId, num_blocks: int) -> UInt64s | None:
        """Return new active blocks, or None and change nothing."""
        if num_blocks > self.num_allowed(medium):
            return None
        return super().alloc(medium, num_blocks)

    # Index.

    def insert(
        self,
        namespace: bytes,
        tokens: npt.ArrayLike,
        addresses: UInt64s,
        first_page: int = 0,
    ) -> Inserted:
        """Make active blocks historical: the index maps tokens to them."""
        refusal = self._refuses
        if len(namespace) != KEY_BYTES:
            # Keys of pages are derived from it.
            refusal = f"a namespace of {len(namespace)} bytes is none"
        if refusal:
            return Inserted(0, addresses, refusal)
        return super().insert(namespace, tokens, addresses, first_page)

    def insert_behind(
        self,
        namespace: bytes,
        tokens: npt.ArrayLike,
        addresses: UInt64s,
        first_page: int,
    ) -> Inserted:
        """Insert blocks of pages whose predecessors need not be in the index.

        For a prompt whose first pages the device has, and perhaps no tier.
        """
        raw = as_tokens(tokens).tobytes()[: first_page * self._page_bytes]
        root = self._index.root(namespace)
        path = self._index.walk(root, raw)
        known = sum(len(node.raw) for node in path)
        if known < len(raw):
            # Pages without a copy, which stay as long as those after them do.
            self._pages.add_pages(path[-1] if path else root, raw[known:])
        done = self.insert(namespace, tokens, addresses, first_page)
        self._pages.settle()
        return done

    def match(self, namespace: bytes, tokens: npt.ArrayLike) -> UInt64s:
        """Return the blocks of a prompt's first pages, from the fastest medium each."""
        return self.match_from(namespace, tokens, 0)

    def match_from(
        self, namespace: bytes, tokens: npt.ArrayLike, first_page: int
    ) -> UInt64s:
        """Return the blocks of pages from ``first_page`` on, whoever has those before.

        Without a gap, from the fastest medium each.
        """
        rows, flags = self._ready(namespace, tokens, first_page)
        if not len(rows):
            return NO_ADDRESSES
        self._touch_from(self._table.node[rows[-1]])
        found = np.zeros(len(rows), np.uint64)
        for number in reversed(range(len(self._media))):
            here = (flags >> number & 1) != 0
            entries = self._table.entry_of[number][rows[here]]
            slots = self._table.address[entries]
            found[here] = self._slots[number].addresses_of(slots)
        return found

    def num_matching(self, namespace: bytes, tokens: npt.ArrayLike) -> int:
        """Return how many blocks ``match`` would find; changes nothing."""
        return len(self._ready(namespace, tokens)[0])

    def tiers_of(
        self, namespace: bytes, tokens: npt.ArrayLike, first_page: int
    ) -> Int32s:
        """Return the fastest tier of each page from ``first_page`` on, int32 [n].

        A disk below the media counts; until the first page that nobody could read now,
        as it is in no tier, or is being read from the disk for a request. Changes
        nothing.
        """
        rows = self._index.rows_of(namespace, as_tokens(tokens).tobytes())[first_page:]
        flags = self._table.flags[rows]
        in_memory = (flags & self._mask) != 0
        stops = ~in_memory & ((flags == 0) | ((flags & LOADING) != 0))
        if stops.any():
            num = int(stops.argmax())
            rows, flags, in_memory = rows[:num], flags[:num], in_memory[:num]
        found = np.full(len(rows), TierId.DISK, np.int32)
        for number in reversed(range(len(self._media))):
            found[(flags >> number & 1) != 0] = self._media[number]
        return found

    def num_present(
        self, namespace: bytes, tokens: npt.ArrayLike, first_page: int
    ) -> int:
        """Return how many pages from ``first_page`` on are in a tier, without a gap.

        Those on their way to the device count: they need not come from elsewhere.
        """
        rows = self._index.rows_of(namespace, as_tokens(tokens).tobytes())
        flags = self._table.flags[rows[first_page:]]
        missing = np.flatnonzero(flags == 0)
        return int(missing[0]) if len(missing) else len(flags)

    def delete(self, namespace: bytes, tokens: npt.ArrayLike) -> int:
        """Drop a prompt's pages from its end on, in every tier; return how many."""
        path = self._index.walk(
            self._index.root(namespace), as_tokens(tokens).tobytes()
        )
        doomed: list[Node] = []
        below: Node | None = None
        for node in reversed(path):
            if any(child is not below for child in node.children.values()):
                break
            doomed.append(node)
            below = node
        rows = concat_rows(doomed)
        for number, column in enumerate(self._table.entry_of):
            entries = column[rows]
            live = entries[entries >= 0].astype(np.int64)
            self._pages.discard(number, live, Cause.DROPPED)
        self._pages.settle()
        return len(rows)

    def coldest(self, medium: TierId, num_blocks: int) -> UInt64s:
        """Return up to so many historical blocks that the medium would evict first."""
        if medium not in self._number:
            # The device is the engine's: it evicts there itself.
            return NO_ADDRESSES
        return super().coldest(medium, num_blocks)

    # Below: where the parent works on a table of its own.

    def _take_over(self, number: int, incarnation: int) -> CacheSlots:
        """Put slots with generations in the place of a tier's."""
        table = self._table
        former = table.slots[number]
        medium = self._media[number]
        slots = CacheSlots(
            former.capacity, self._instance, medium, incarnation, former.most
        )
        everywhere = np.arange(former.capacity)
        slots.reserve(everywhere[~former.is_free(everywhere)])
        entries = np.flatnonzero((table.tier == number) & (table.state != FREE))
        slots.bind(table.address[entries], entries)
        table.slots[number] = slots
        return slots

    def _parts(self, addresses: UInt64s) -> list[_Part] | str:
        """Sort addresses of blocks in use by medium; a text says why one is refused."""
        parts = super()._parts(addresses)
        if isinstance(parts, str):
            return parts
        for number, _, slots in parts:
            entries = self._slots[number].entry_at[slots]
            entries = entries[entries >= 0]
            gone = self._table.doomed[entries] | (self._table.state[entries] != READY)
            if gone.any():
                return f"{int(np.count_nonzero(gone))} blocks are no longer in use"
        return parts

    def _ready(
        self, namespace: bytes, tokens: npt.ArrayLike, first_page: int = 0
    ) -> tuple[Int32s, npt.NDArray[np.uint8]]:
        """Return the rows of the first pages that memory has, and where it has them."""
        table = self._table
        rows = self._index.rows_of(namespace, as_tokens(tokens).tobytes())[first_page:]
        flags = table.flags[rows] & self._mask
        stops = flags == 0
        if table.act_page_bytes:
            for number in range(len(self._media)):
                entries = table.entry_of[number][rows]
                kinds = table.representation[entries]
                stops |= (entries >= 0) & (kinds != Representation.KV)
        if stops.any():
            num_ready = int(stops.argmax())
            rows, flags = rows[:num_ready], flags[:num_ready]
        return rows, flags

    def _alloc_evicting(self, medium: TierId, num_blocks: int) -> UInt64s | None:
        number = self._number[medium]
        slots = self._slots[number]
        self._pages.give_back(number, num_blocks)
        missing = num_blocks - slots.free_slots
        victims = self._evictors[number].select(missing)
        if sum(len(victim.rows) for victim in victims) < missing:
            return None
        self._pages.make_room(number, num_blocks)
        self._pages.settle()
        return slots.alloc_addresses(num_blocks)

    def _add_copies(
        self,
        number: int,
        positions: Int64s | slice,
        slots: Int64s,
        rows: Int32s,
        node: Node | None,
    ) -> Int64s:
        duplicates = super()._add_copies(number, positions, slots, rows, node)
        is_new = np.ones(len(rows), np.bool_)
        is_new[duplicates] = False
        arrived = rows[positions][is_new[positions]]
        self._pages.counters.stored[self._media[number]] += len(arrived)
        self._chain.arrived(number, arrived)
        return duplicates

    def _hand_over(
        self, source: int, slots: Int64s, target: int, new_slots: Int64s
    ) -> None:
        entries = self._slots[source].entry_at[slots]
        rows = self._table.entry_row[entries[entries >= 0]]
        super()._hand_over(source, slots, target, new_slots)
        self._chain.arrived(target, rows)

    def _forget(self, number: int, rows: Int32s) -> None:
        self._pages.note_gone(number, rows)
        self._pages.settle()

    def _touch(self, path: list[Node]) -> None:
        self._pages.touch(path)
