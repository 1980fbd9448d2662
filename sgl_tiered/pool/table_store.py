"""A store of blocks on the cache's table and index, of its own: without an engine.

The table's first tier may be the device here. Every medium has a ``BlockSlots``; the
table frees slots by it (when it evicts, when the last pin ends), so that addresses die
with whatever ends their use. All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.evictor import Evictor
from sgl_tiered.cache.index import Node, RadixIndex, concat_rows
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.addresses import places_of, slots_of
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import as_tokens
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int32s, Int64s, UInt8s, UInt64s
from sgl_tiered.policies.eviction.base import EvictionPolicy
from sgl_tiered.pool.base import Inserted, MediumUsage
from sgl_tiered.pool.block_slots import NO_ADDRESSES, BlockSlots, RunSlots
from sgl_tiered.tiers.base import MemoryTier, Tier, TierIO

__all__ = ["TableStore"]

_TOKEN_BYTES = 4
_NO_POSITIONS: Int64s = np.zeros(0, np.int64)
_ALL = slice(None)
_Part = tuple[int, Int64s | slice, Int64s]
"""Blocks of one medium: its number, their positions in the list, their slots."""


class TableStore:
    """A ``BlockStore`` over a ``CacheTable`` and a ``RadixIndex``.

    Args:
        instance: id of the instance.
        layout: shape of one block.
        num_blocks: capacity of each medium.
        eviction: one policy object per medium.
        clock: time of accesses.
        tiers: what holds the bytes of a medium; a medium without one has no bytes,
            and moving blocks there copies nothing.
        incarnation: number of this start of the instance.
    """

    def __init__(
        self,
        instance: int,
        layout: PageLayout,
        num_blocks: Mapping[TierId, int],
        eviction: Mapping[TierId, EvictionPolicy],
        clock: Clock,
        tiers: Mapping[TierId, Tier] | None = None,
        incarnation: int = 1,
    ) -> None:
        self._instance = instance
        self._layout = layout
        self._media = tuple(sorted(num_blocks))
        self._number = {medium: i for i, medium in enumerate(self._media)}
        self._tiers = dict(tiers or {})
        self._clock = clock
        self._sequence = 0
        self._page_bytes = layout.page_tokens * _TOKEN_BYTES
        capacities = tuple(num_blocks[medium] for medium in self._media)
        self._table = CacheTable(
            self._media,
            capacities,
            layout.num_layers,
            layout.page_bytes,
            layout.encoding,
        )
        self._slots = [
            BlockSlots(capacity, instance, medium, incarnation)
            for medium, capacity in zip(self._media, capacities, strict=True)
        ]
        self._table.slots = list(self._slots)
        # Rows and entries come by the prompt: cut from a run, they cost a tenth.
        self._table.rows = RunSlots(self._table.rows.capacity)
        self._table.entries = RunSlots(self._table.entries.capacity)
        # By the number of the medium: a dictionary would hash the name of an enum.
        self._by_medium: list[BlockSlots] = [self._slots[0]] * len(TierId)
        for medium, blocks in zip(self._media, self._slots, strict=True):
            self._by_medium[medium] = blocks
        self._index = RadixIndex(self._table, self._page_bytes, self._push_leaf)
        self._evictors = [
            Evictor(self._table, number, eviction[medium])
            for number, medium in enumerate(self._media)
        ]

    @property
    def instance(self) -> int:
        """Id of the instance; part of every address."""
        return self._instance

    @property
    def layout(self) -> PageLayout:
        """Shape of one block."""
        return self._layout

    @property
    def media(self) -> tuple[TierId, ...]:
        """The media, fastest first."""
        return self._media

    @property
    def num_blocks(self) -> int:
        """Blocks of all media by now."""
        return sum(slots.capacity for slots in self._slots)

    def usage(self, medium: TierId) -> MediumUsage:
        """Return who has the blocks of a medium: O(capacity)."""
        slots = self._by_medium[medium]
        historical = int(np.count_nonzero(slots.entry_at >= 0))
        return MediumUsage(
            capacity=slots.capacity,
            free=slots.free_slots,
            historical=historical,
            active=slots.used_slots - historical,
            held=int(np.count_nonzero(slots.holds)),
        )

    # Memory blocks.

    def num_free(self, medium: TierId) -> int:
        """Return how many blocks can be allocated without evicting."""
        return self._slots[self._number[medium]].free_slots

    def alloc(self, medium: TierId, num_blocks: int) -> UInt64s | None:
        """Return new active blocks, or None and change nothing."""
        blocks = self._by_medium[medium]
        # What ``alloc_addresses`` begins with; a call less for each decode step.
        start = blocks._next
        stop = start + num_blocks
        if stop <= blocks._num_open:
            blocks._next = stop
            return blocks._open_addresses[start:stop]
        found = blocks.alloc_addresses(num_blocks)
        return self._alloc_evicting(medium, num_blocks) if found is None else found

    def free(self, addresses: UInt64s) -> str:
        """Free active blocks; return why nothing was freed, else an empty text."""
        parts = self._parts(addresses)
        if isinstance(parts, str):
            return parts
        for number, _, slots in parts:
            if (self._slots[number].entry_at[slots] >= 0).any():
                return "a block is in the index: delete its prompt instead"
            if _has_twice(slots):
                return "a block is named twice"
        for number, _, slots in parts:
            self._give_back(number, slots)
        return ""

    def refusal(self, addresses: UInt64s) -> str:
        """Return why these are not all blocks in use, in one clause; else empty."""
        parts = self._parts(addresses)
        return parts if isinstance(parts, str) else ""

    def hold(self, addresses: UInt64s) -> None:
        """Keep blocks in use, and their bytes in place, until as many ``release``."""
        parts = self._parts(addresses)
        assert not isinstance(parts, str), parts
        for number, _, slots in parts:
            blocks = self._slots[number]
            blocks.holds[slots] += np.uint16(1)
            blocks.num_holds += len(slots)
            entries = blocks.entry_at.take(slots)
            if int(entries.max()) >= 0:
                self._table.pin(entries[entries >= 0].astype(np.int64))

    def release(self, addresses: UInt64s) -> None:
        """Undo one ``hold``; blocks that were freed meanwhile are free now."""
        for number, _, slots in self._groups(addresses):
            blocks = self._slots[number]
            holds = blocks.holds.take(slots)
            assert holds.all(), "released more often than held"
            holds -= np.uint16(1)
            blocks.holds[slots] = holds
            blocks.num_holds -= len(slots)
            entries = blocks.entry_at.take(slots)
            if blocks.num_dying:
                over = slots[blocks.dying[slots] & (holds == 0)]
                blocks.dying[over] = False
                blocks.num_dying -= len(over)
                blocks.free(over)
            if int(entries.max()) >= 0:
                unpinned = entries[entries >= 0].astype(np.int64)
                self._forget(number, self._table.unpin(unpinned))

    # Index.

    def insert(
        self,
        namespace: bytes,
        tokens: npt.ArrayLike,
        addresses: UInt64s,
        first_page: int = 0,
    ) -> Inserted:
        """Make active blocks historical: the index maps tokens to them."""
        parts = self._parts(addresses)
        if isinstance(parts, str):
            return Inserted(0, addresses, parts)
        for number, _, slots in parts:
            if int(self._slots[number].entry_at.take(slots).max()) >= 0:
                return Inserted(0, addresses, "a block is in the index already")
            if _has_twice(slots):
                return Inserted(0, addresses, "a block is named twice")
        last_page = first_page + len(addresses)
        raw = as_tokens(tokens).tobytes()[: last_page * self._page_bytes]
        if len(raw) < last_page * self._page_bytes:
            return Inserted(0, addresses, "there are more blocks than whole pages")
        root = self._index.root(namespace)
        path = self._index.walk(root, raw)
        known = concat_rows(path)
        if len(known) < first_page:
            return Inserted(0, addresses, f"pages before page {first_page} are missing")
        rows = known[first_page:]
        node = None
        if len(known) < last_page:
            new = self._table.alloc_rows(last_page - len(known))
            parent = path[-1] if path else root
            node = self._index.add(parent, raw[len(known) * self._page_bytes :], new)
            path.append(node)
            rows = np.concatenate([rows, new]) if len(rows) else new
        self._touch(path)
        if node is not None:
            node.insert_sequence = node.access_sequence
            node.inserted_s = node.last_access_s
        if len(parts) > 1 or len(known) > first_page:
            # No part is just the new node's pages.
            node = None
        left = [
            addresses[self._add_copies(number, positions, slots, rows, node)]
            for number, positions, slots in parts
        ]
        duplicates = np.concatenate(left) if left else NO_ADDRESSES
        return Inserted(len(addresses) - len(duplicates), duplicates)

    def match(self, namespace: bytes, tokens: npt.ArrayLike) -> UInt64s:
        """Return the blocks of a prompt's first pages, from the fastest medium each."""
        table = self._table
        rows = self._index.rows_of(namespace, as_tokens(tokens).tobytes())
        flags = table.flags[rows]
        if not flags.all():
            num_ready = int((flags == 0).argmax())
            rows, flags = rows[:num_ready], flags[:num_ready]
        if not len(rows):
            return NO_ADDRESSES
        self._touch_from(table.node[rows[-1]])
        found: UInt64s | None = None
        for number in range(len(self._media)):
            here = (flags & np.uint8(1 << number)) != 0
            whole = bool(here.all())
            if whole or here.any():
                slots = table.address[
                    table.entry_of[number][rows if whole else rows[here]]
                ]
                addresses = self._slots[number].addresses_of(slots)
                if whole:
                    return addresses
                if found is None:
                    found = np.zeros(len(rows), np.uint64)
                found[here] = addresses
                flags = np.where(here, 0, flags)
                if not flags.any():
                    break
        assert found is not None, "a ready copy is in some medium"
        return found

    def num_matching(self, namespace: bytes, tokens: npt.ArrayLike) -> int:
        """Return how many of a prompt's first pages are here; only asks, no use."""
        rows = self._index.rows_of(namespace, as_tokens(tokens).tobytes())
        is_missing = self._table.flags[rows] == 0
        return int(is_missing.argmax()) if is_missing.any() else len(rows)

    def delete(self, namespace: bytes, tokens: npt.ArrayLike) -> int:
        """Drop a prompt's pages from its end on; return how many."""
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
        for number in range(len(self._media)):
            self._drop_entries(number, self._table.entry_of[number][rows])
        return len(rows)

    # Media.

    def coldest(self, medium: TierId, num_blocks: int) -> UInt64s:
        """Return up to so many historical blocks that the medium would evict first."""
        number = self._number[medium]
        victims = self._evictors[number].select(num_blocks)
        if not victims:
            return NO_ADDRESSES
        rows = np.concatenate([victim.rows for victim in victims])
        entries = self._table.entry_of[number][rows]
        return self._slots[number].addresses_of(self._table.address[entries])

    def move(self, addresses: UInt64s, medium: TierId) -> UInt64s | None:
        """Copy blocks to another medium and free them here; None: nothing changed."""
        parts = self._parts(addresses)
        if isinstance(parts, str) or medium not in self._number:
            return None
        if any(_has_twice(slots) for _, _, slots in parts):
            return None
        target = self._number[medium]
        if self._is_arriving(target, parts):
            return None
        arrived = addresses.copy()
        moving: list[tuple[int, Int64s, Int64s]] = []
        known_slots: list[tuple[int, Int64s]] = []
        for number, positions, slots in parts:
            if number == target:
                continue
            where = np.arange(len(addresses))[positions]
            copies = self._copies_in(target, number, slots)
            known = copies >= 0
            there = self._slots[target].addresses_of(copies[known])
            arrived[where[known]] = there
            known_slots.append((number, slots[known]))
            moving.append((number, where[~known], slots[~known]))
        # Held, so that making room evicts nothing that this is about.
        for some in (addresses, arrived):
            self.hold(some)
        new = self.alloc(medium, sum(len(slots) for _, _, slots in moving))
        for some in (addresses, arrived):
            self.release(some)
        if new is None:
            return None
        new_slots = slots_of(new)
        if not self._copy_all(moving, target, new_slots):
            self.free(new)
            return None
        start = 0
        for number, where, slots in moving:
            stop = start + len(slots)
            arrived[where] = new[start:stop]
            self._hand_over(number, slots, target, new_slots[start:stop])
            start = stop
        for number, slots in known_slots:
            self._drop_entries(number, self._slots[number].entry_at[slots])
        return arrived

    def duplicate(self, addresses: UInt64s, medium: TierId) -> UInt64s | None:
        """Return new active blocks with the same bytes in a medium, or None."""
        parts = self._parts(addresses)
        if isinstance(parts, str) or medium not in self._number:
            return None
        self.hold(addresses)
        new = self.alloc(medium, len(addresses))
        self.release(addresses)
        if new is None:
            return None
        target, targets = self._number[medium], slots_of(new)
        if all(
            self._copy_bytes(number, slots, target, targets[positions])
            for number, positions, slots in parts
        ):
            return new
        self.free(new)
        return None

    def memory(self, medium: TierId) -> UInt8s | None:
        """Return the memory of a medium, uint8 [num_blocks, row_bytes], or None."""
        tier = self._tiers.get(medium)
        return tier.region if isinstance(tier, MemoryTier) else None

    # Below: one medium at a time.

    def _groups(self, addresses: UInt64s) -> list[_Part]:
        """Sort addresses of this instance by medium."""
        return self._by_place(addresses, _one_or_all(places_of(addresses)))

    def _by_place(self, addresses: UInt64s, places: UInt64s) -> list[_Part]:
        """Sort addresses by their places; one place stands for all of them."""
        if len(places) == 1:
            number = self._number[TierId(int(places[0]) & 15)]
            return [(number, _ALL, slots_of(addresses))]
        parts: list[_Part] = []
        for place in np.unique(places).tolist():
            positions = np.flatnonzero(places == place)
            number = self._number[TierId(place & 15)]
            parts.append((number, positions, slots_of(addresses[positions])))
        return parts

    def _parts(self, addresses: UInt64s) -> list[_Part] | str:
        """Sort addresses of blocks in use by medium; a text says why one is refused."""
        if len(addresses):
            # Nearly always: one medium of ours, and nothing wrong.
            medium = int(places_of(addresses[:1])[0]) & 15
            slots = slots_of(addresses)
            if medium < len(self._by_medium):
                blocks = self._by_medium[medium]
                if blocks.are_in_use(slots, addresses):
                    return [(self._slots.index(blocks), _ALL, slots)]
        places = _one_or_all(places_of(addresses))
        for place in set(places.tolist()):
            if place >> 4 != self._instance:
                return f"a block is of instance {place >> 4}, not {self._instance}"
            if place & 15 not in self._number:
                return f"there is no medium {place & 15} here"
        parts = self._by_place(addresses, places)
        for number, positions, slots in parts:
            blocks = self._slots[number]
            if int(slots.max()) >= blocks.capacity:
                return f"there is no slot {int(slots.max())}"
            stale = blocks.names[slots] != addresses[positions]
            stale |= blocks.dying[slots]
            stale |= blocks.is_free(slots)
            if stale.any():
                return f"{int(np.count_nonzero(stale))} blocks are no longer in use"
        return parts

    def _alloc_evicting(self, medium: TierId, num_blocks: int) -> UInt64s | None:
        number = self._number[medium]
        slots = self._slots[number]
        missing = num_blocks - slots.free_slots
        victims = self._evictors[number].select(missing)
        if sum(len(victim.rows) for victim in victims) < missing:
            return None
        column = self._table.entry_of[number]
        for victim in victims:
            self._drop_entries(number, column[victim.rows])
        return slots.alloc_addresses(num_blocks)

    def _add_copies(
        self,
        number: int,
        positions: Int64s | slice,
        slots: Int64s,
        rows: Int32s,
        node: Node | None,
    ) -> Int64s:
        """Enter blocks of one medium as copies; return positions of duplicates.

        Args:
            number: of the medium.
            positions: of the blocks in the list.
            slots: theirs.
            rows: of all pages of the list.
            node: the new node that has just these pages, if there is one.
        """
        table, blocks = self._table, self._slots[number]
        mine = rows[positions]
        duplicates = _NO_POSITIONS
        # The pages of a new node have no copies.
        has = None if node is not None else table.entry_of[number][mine] >= 0
        if has is not None and has.any():
            duplicates = np.arange(len(rows))[positions][has]
            mine, slots = mine[~has], slots[~has]
            if not len(mine):
                return duplicates
        entries = table.add_copies(number, mine, slots)
        blocks.entry_at[slots] = entries
        if blocks.num_holds:
            table.pin(entries, blocks.holds[slots])
        if node is not None:
            self._index.change_node(number, node, len(mine))
        else:
            self._index.change(number, mine, 1)
        table.mark_ready(entries)
        return duplicates

    def _is_arriving(self, target: int, parts: list[_Part]) -> bool:
        """Return whether a page would get a second copy in ``target``.

        One whose copy is on its way there, or in use there though it was dropped (both
        by the cache), or one that is named in two other media.
        """
        named = [np.zeros(0, np.int32)]
        for number, _, slots in parts:
            if number == target:
                continue
            entries = self._slots[number].entry_at[slots]
            rows = self._table.entry_row[entries[entries >= 0]]
            is_ready = (self._table.flags[rows] & np.uint8(1 << target)) != 0
            missing = rows[~is_ready]
            if (self._table.entry_of[target][missing] >= 0).any():
                return True
            named.append(missing)
        rows = np.concatenate(named)
        return len(np.unique(rows)) < len(rows)

    def _copies_in(self, target: int, number: int, slots: Int64s) -> Int64s:
        """Return the slots in ``target`` that hold the same pages, -1 for none."""
        entries = self._slots[number].entry_at[slots]
        copies = np.full(len(slots), -1, np.int64)
        rows = self._table.entry_row[entries[entries >= 0]]
        ready = (self._table.flags[rows] & np.uint8(1 << target)) != 0
        other = self._table.entry_of[target][rows]
        copies[entries >= 0] = np.where(ready, self._table.address[other], -1)
        return copies

    def _copy_all(
        self, moving: list[tuple[int, Int64s, Int64s]], target: int, new: Int64s
    ) -> bool:
        start = 0
        for number, _, slots in moving:
            stop = start + len(slots)
            if not self._copy_bytes(number, slots, target, new[start:stop]):
                return False
            start = stop
        return True

    def _copy_bytes(
        self, source: int, slots: Int64s, target: int, new_slots: Int64s
    ) -> bool:
        """Copy blocks between media; return whether all of them arrived."""
        from_tier = self._tiers.get(self._media[source])
        to_tier = self._tiers.get(self._media[target])
        if from_tier is None or to_tier is None or not len(slots):
            return True
        if isinstance(from_tier, MemoryTier):
            buffer, rows = from_tier.read_view(slots)
            result = to_tier.store(TierIO(new_slots, buffer, rows))
        elif isinstance(to_tier, MemoryTier):
            result = from_tier.load(TierIO(slots, to_tier.region, new_slots))
        else:
            return False
        return bool(result.ok.all())

    def _hand_over(
        self, source: int, slots: Int64s, target: int, new_slots: Int64s
    ) -> None:
        """Let blocks of ``target`` take the place of others, which are freed."""
        table = self._table
        entries = self._slots[source].entry_at[slots]
        in_index = entries >= 0
        if in_index.any():
            rows = table.entry_row[entries[in_index]]
            made = table.add_copies(target, rows, new_slots[in_index])
            self._slots[target].entry_at[new_slots[in_index]] = made
            self._index.change(target, rows, 1)
            table.mark_ready(made)
            self._drop_entries(source, entries[in_index])
        self._give_back(source, slots[~in_index])

    def _give_back(self, number: int, slots: Int64s) -> None:
        """Free active blocks, those that are held when the last hold ends."""
        blocks = self._slots[number]
        held = blocks.holds[slots] > 0
        blocks.dying[slots[held]] = True
        blocks.num_dying += int(np.count_nonzero(held))
        blocks.free(slots[~held])

    def _drop_entries(self, number: int, entries: Int32s) -> None:
        """Drop copies, those in use when they no longer are; -1 stands for none."""
        live = entries[entries >= 0].astype(np.int64)
        # Out of sight at once, and freed by the last release where it is held.
        self._forget(number, self._table.discard(live))

    def _forget(self, number: int, rows: Int32s) -> None:
        """Account for copies that the table has dropped; pages without any go."""
        if len(rows):
            self._index.prune(self._index.change(number, rows, -1))

    def _touch(self, path: list[Node]) -> None:
        self._sequence += 1
        now_s = self._clock.now()
        for node in path:
            node.access_sequence = self._sequence
            node.last_access_s = now_s

    def _touch_from(self, node: Node) -> None:
        """Note an access to a node and all above it."""
        self._touch(self._index.path_to(node))

    def _push_leaf(self, number: int, node: Node) -> None:
        self._evictors[number].push(node)


def _has_twice(slots: Int64s) -> bool:
    """Return whether a slot is named twice; lists are ascending more often than not."""
    if (slots[1:] > slots[:-1]).all():
        return False
    return len(np.unique(slots)) < len(slots)


def _one_or_all(places: UInt64s) -> UInt64s:
    """Return the first place where all are equal, else all of them."""
    if len(places) and (places == places[0]).all():
        return places[:1]
    return places
