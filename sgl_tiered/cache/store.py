"""Pages and their copies: the table, the index and the evictors kept in step.

The one place where copies come and go. It decides nothing: ``TieredCache`` does, with
the planner and the policies. Every operation that may leave pages without a copy marks
their nodes; ``settle`` lets those pages go, at the end of the public operation, so that
a path stays valid while it is worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from sgl_tiered.cache.config import CacheConfig
from sgl_tiered.cache.evictor import Evictor
from sgl_tiered.cache.index import Node, RadixIndex, concat_rows, take_apart
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.outlook import ComingUses
from sgl_tiered.cache.removal import Removal
from sgl_tiered.cache.reuse import ReuseHistory
from sgl_tiered.cache.stats import StatsCounters
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.cache.tombstones import Cause, Tombstones
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.core.keys import page_keys
from sgl_tiered.core.plans import (
    QUEUE_FULL,
    WRITES_REST,
    Bools,
    Int32s,
    Int64s,
    TierOccupancy,
    UInt8s,
    UInt64s,
)
from sgl_tiered.policies.eviction.base import EvictionPolicy

__all__ = ["PageStore", "Recency"]

_MOST_STEPS = 4
"""Of the removal of what was forgotten, for one call's room."""

TOKEN_BYTES = 4
Recency = tuple[int, float]
"""Number of an access, and its time in seconds."""
_RESERVE = 64
"""A disk tier keeps one of so many slots free, to choose long runs from. Without, a run
is handed to several prompts piece by piece, until each page is an I/O of its own: after
40 times its capacity in writes, I/Os are of 0.28 MiB on average without a reserve, 1.08
MiB with 1/64 and 1.28 MiB with 1/32; 0.92 MiB in a tier never full
(benchmarks/micro/disk_runs.py)."""


class PageStore:
    """Table, index, evictors and counters of one cache.

    Args:
        config: tiers and sizes.
        eviction: one policy object per tier.
        clock: time of accesses.
        lookahead: the queue, for policies that look at it.
        reload_s: (node, tier number) -> seconds per page to bring a run back that the
            tier loses, for policies that learn.
    """

    def __init__(
        self,
        config: CacheConfig,
        eviction: Mapping[TierId, EvictionPolicy],
        clock: Clock,
        lookahead: QueueLookahead | None = None,
        reload_s: Callable[[Node, int], float] | None = None,
    ) -> None:
        layout = config.layout
        self.tiers = tuple(tier.tier for tier in config.tiers)
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_tokens * TOKEN_BYTES
        self.table = CacheTable(
            self.tiers,
            tuple(tier.num_slots for tier in config.tiers),
            layout.num_layers,
            layout.page_bytes,
            layout.encoding,
            config.act_page_bytes,
            tuple(tier.num_open or tier.num_slots for tier in config.tiers),
        )
        self.index = RadixIndex(self.table, self.page_bytes, self._push_leaf)
        policies = [eviction[tier] for tier in self.tiers]
        looks = any(policy.needs_queue for policy in policies)
        self.outlook = ComingUses(
            lookahead if looks else None,
            {
                number: ReuseHistory(tier.num_slots, layout.page_tokens)
                for number, tier in enumerate(config.tiers)
                if policies[number].needs_reuse
            },
            self._short_key,
            reload_s,
        )
        self.evictors = [
            Evictor(self.table, number, policy, self.outlook)
            for number, policy in enumerate(policies)
        ]
        if looks and lookahead is not None:
            lookahead.listen(self._fell)
        self.counters = StatsCounters(self.tiers)
        self.tombstones: Tombstones | None = None
        if config.tombstones:
            self.tombstones = Tombstones(config.tombstones, clock.now())
        self.num_held = [0] * len(self.tiers)
        """Per tier, slots in use by pages that are still to be adopted."""
        self.removal = Removal(self.table, self.discard)
        """Gives back what ``drop`` and ``clear`` have forgotten."""
        self._clock = clock
        self._sequence = 0
        self._unsettled: list[Node] = []

    # Recency.

    @property
    def recency(self) -> Recency:
        """Number and time of the last access."""
        return self._sequence, self._clock.now()

    def touch(self, path: Sequence[Node]) -> None:
        """Note an access to all pages of a path."""
        self._sequence += 1
        now_s = self._clock.now()
        for node in path:
            node.access_sequence = self._sequence
            node.last_access_s = now_s

    def add_pages(self, parent: Node, raw: bytes, as_of: Recency | None = None) -> Node:
        """Add pages without copies after ``parent``, as of now or of a past access."""
        rows = self.table.alloc_rows(len(raw) // self.page_bytes)
        return self.add_rows(parent, raw, rows, as_of or self.recency)

    def add_rows(self, parent: Node, raw: bytes, rows: Int32s, as_of: Recency) -> Node:
        """Add pages that have rows already, without copies."""
        node = self.index.add(parent, raw, rows)
        sequence, time_s = as_of
        node.access_sequence = node.insert_sequence = sequence
        node.last_access_s = node.inserted_s = time_s
        self._unsettled.append(node)
        return node

    # Copies.

    def make_room(
        self,
        tier: int,
        num_slots: int,
        *,
        protected: Collection[Node] = (),
        below: float | None = None,
    ) -> int:
        """Evict as needed and possible; return how many of the slots can be had.

        A disk tier is left with a reserve, for the sake of long runs. Pages that were
        forgotten go first.
        """
        self.give_back(tier, num_slots)
        slots = self.table.slots[tier]
        reserve = 0
        # A prompt whose rest is still to be adopted must not lose its beginning.
        is_filling = self.num_held[tier] or tier in self.removal.tiers
        if self.tiers[tier] is TierId.DISK and not is_filling:
            reserve = slots.capacity // _RESERVE
        missing = num_slots + reserve - slots.free_slots
        if missing <= 0:
            return num_slots
        # A reserve that is far from full is filled step by step: no call takes long.
        missing = max(num_slots - slots.free_slots, min(missing, 2 * num_slots))
        victims = self.evictors[tier].select(missing, protected=protected, below=below)
        column = self.table.entry_of[tier]
        is_last = tier + 1 == len(self.tiers)
        for victim in victims:
            if not is_last:
                lower = self.table.entry_of[tier + 1][victim.rows]
                num_uncopied = int(np.count_nonzero(lower < 0))
                self.counters.uncopied[self.tiers[tier]] += num_uncopied
            self.bury(tier, victim.rows, Cause.EVICTED)
            gone = self.table.discard(column[victim.rows].astype(np.int64))
            assert len(gone) == len(victim.rows), "a victim was in use"
            self.index.change_node(tier, victim.node, -len(gone))
            self._unsettled.append(victim.node)
            self.counters.evicted[self.tiers[tier]] += len(gone)
        return min(num_slots, self.table.slots[tier].free_slots)

    def give_back(self, tier: int, num_slots: int) -> None:
        """Free what was forgotten in a tier until so many slots are; bounded work."""
        slots, removal = self.table.slots[tier], self.removal
        for _ in range(_MOST_STEPS):
            if tier not in removal.tiers or slots.free_slots >= num_slots:
                return
            removal.step()

    def start_copies(
        self, tier: int, rows: Int32s, kinds: UInt8s | None = None
    ) -> Int64s:
        """Begin copies of pages in a tier with room; return their addresses.

        Args:
            tier: number of the tier.
            rows: the pages.
            kinds: uint8 [n], what the copies hold; None for KV.
        """
        addresses = self.table.slots[tier].alloc(len(rows))
        assert addresses is not None, f"no room for {len(rows)} copies"
        what = Representation.KV if kinds is None else kinds
        self.table.add_copies(tier, rows, addresses, representation=what)
        self.index.change(tier, rows, 1)
        return addresses

    def land_copies(
        self,
        tier: int,
        rows: Int32s,
        entries: Int64s,
        ok: Bools,
        sums: UInt64s,
        error: str = "",
    ) -> int:
        """End the flight of copies, some of which may have failed.

        Args:
            tier: where they were to go.
            rows: the pages.
            entries: their entries, from when the flight began.
            ok: which arrived.
            sums: their checksums, empty where none were computed.
            error: why some did not.

        Returns:
            How many arrived.
        """
        num_ok = int(np.count_nonzero(ok))
        whole = num_ok == len(ok)
        good = entries if whole else entries[ok]
        if len(good):
            checksums = None
            if len(sums):
                checksums = sums if whole else sums[ok]
            self.note_gone(tier, self.table.mark_ready(good, checksums))
        if not whole:
            was_dropped = error in (QUEUE_FULL, WRITES_REST)
            cause = Cause.BACK_PRESSURE if was_dropped else Cause.NOT_WRITTEN
            self.bury(tier, rows[~ok], cause)
            self.note_gone(tier, self.table.fail_flight(entries[~ok]))
        self.counters.stored[self.tiers[tier]] += num_ok
        self.counters.failed[self.tiers[tier]] += len(ok) - num_ok
        return num_ok

    def discard(self, tier: int, entries: Int64s, cause: Cause = Cause.DROPPED) -> None:
        """Drop copies now, or as soon as nobody uses them."""
        self.bury(tier, self.table.entry_row[entries], cause)
        self.note_gone(tier, self.table.discard(entries))

    def unpin(self, tier: int, entries: Int64s) -> None:
        """Undo a pin; doomed copies go."""
        self.note_gone(tier, self.table.unpin(entries))

    def note_gone(self, tier: int, rows: Int32s) -> None:
        """Account for copies that the table has dropped in one tier."""
        if not len(rows):
            return
        self._unsettled += self.index.change(tier, rows, -1)
        # Pages that were reset away are in no tree: their rows go with the copies.
        table = self.table
        detached = ~table.in_index[rows] & (table.copies[rows] == 0)
        if detached.any():
            table.free_rows(np.unique(rows[detached]))

    def bury(self, tier: int, rows: Int32s, cause: Cause) -> None:
        """Remember why pages have no copy in a tier any more, where that is kept.

        Derives their keys; once per page.
        """
        if self.tombstones is None or not len(rows):
            return
        table = self.table
        rows = rows[table.in_index[rows]]
        for row in rows[~table.key_known[rows]]:
            if not table.key_known[row]:
                self.derive_keys(self.index.path_to(table.node[row]))
        now_s = self._clock.now()
        self.tombstones.add(table.keys[rows], cause, self.tiers[tier], now_s)

    def refuse(self, digest: bytes, tokens: Int32s, positions: Int64s) -> None:
        """Note pages of a prompt for which the first tier has no room."""
        self.counters.num_refused_offload_pages += len(positions)
        if self.tombstones is not None and len(positions):
            end = (int(positions[-1]) + 1) * self.page_tokens
            keys = page_keys(digest, tokens[:end], self.page_tokens)[positions]
            now_s = self._clock.now()
            self.tombstones.add(keys, Cause.NO_ROOM, self.tiers[0], now_s)

    def settle(self) -> None:
        """Let pages without copies go; the end of every public operation."""
        if self._unsettled:
            nodes, self._unsettled = self._unsettled, []
            self.index.prune(reversed(nodes))

    def drop(self, tier: int) -> None:
        """Forget every copy in a tier; slots in use stay taken until their users end.

        From now on none of them is found; ``removal`` gives the others back.
        """
        self.table.doom(tier)
        self.removal.begin([tier])

    def free_dropped(self, tier: int, rows: Int32s) -> None:
        """Free those copies of pages that ``removal`` has still to free, now."""
        if tier not in self.removal.tiers:
            return
        entries = self.table.entry_of[tier][rows].astype(np.int64)
        entries = entries[entries >= 0]
        idle = self.table.doomed[entries] & ~self.table.busy(entries)
        self.discard(tier, entries[idle])

    def clear(self) -> None:
        """Forget every page; slots in use stay taken until their users end.

        From now on none of them is found; ``removal`` gives the others back.
        """
        removal = self.removal
        self._unsettled.clear()
        if self.tombstones is not None:
            self.tombstones.clear()
        self.table.detach()
        removal.begin(range(len(self.tiers)))
        removal.begin_rows()
        removal.add(take_apart(self.index.clear(), removal.max_pages))
        for evictor in self.evictors:
            for items in evictor.clear():
                removal.add_items(items)
        for history in self.outlook.histories.values():
            history.clear()

    def occupancy(self, tier: int, slot_bytes: int) -> TierOccupancy:
        """Return the use of a tier's slots; pinned ones include those in flight."""
        slots = self.table.slots[tier]
        return TierOccupancy(
            capacity_slots=slots.capacity,
            used_slots=slots.used_slots,
            free_slots=slots.free_slots,
            pinned_slots=self.table.num_busy[tier],
            slot_bytes=slot_bytes,
        )

    # Keys.

    def derive_keys(self, path: Sequence[Node]) -> None:
        """Derive the page keys of a path from the root on; once per page."""
        table = self.table
        for node in path:
            if table.key_known[node.rows[-1]]:
                continue
            parent_key = self.key_before(node)
            tokens = np.frombuffer(node.raw, np.int32)
            # A run that was cut off a known one would be known: all or none is.
            table.keys[node.rows] = page_keys(parent_key, tokens, self.page_tokens)
            table.key_known[node.rows] = True

    def keys_of(self, path: Sequence[Node], digest: bytes, tokens: Int32s) -> UInt8s:
        """Return the keys of all whole pages of a prompt; O(pages not known).

        Args:
            path: the prompt's nodes in the index.
            digest: the namespace.
            tokens: int32, the prompt.
        """
        self.derive_keys(path)
        known = concat_rows(path)
        last = self.table.keys[known[-1]].tobytes() if len(known) else digest
        new_tokens = tokens[len(known) * self.page_tokens :]
        new_keys = page_keys(last, new_tokens, self.page_tokens)
        return np.concatenate([self.table.keys[known], new_keys])

    def key_before(self, node: Node) -> bytes:
        """Return the key of the page before a run; the digest before the first."""
        parent = node.parent
        assert parent is not None, "a root has no page before it"
        if not len(parent.rows):
            return node.digest
        row = parent.rows[-1]
        assert self.table.key_known[row], "keys are derived from the root on"
        key: bytes = self.table.keys[row].tobytes()
        return key

    def _short_key(self, node: Node, position: int) -> int:
        """Return the key of a page as ``QueueLookahead`` knows it."""
        row = node.rows[position]
        if not self.table.key_known[row]:
            self.derive_keys(self.index.path_to(node))
        return int(self.table.keys[row, :8].view(np.uint64)[0])

    def _fell(self, digest: bytes, tokens: Int32s) -> None:
        """Rank pages anew that a request no longer waits for, or no longer uses."""
        for node in self.index.find(self.index.root(digest), tokens.tobytes()):
            for evictor in self.evictors:
                evictor.requeue(node)

    def _push_leaf(self, tier: int, node: Node) -> None:
        self.evictors[tier].push(node)
