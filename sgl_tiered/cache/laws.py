"""The laws of the cache, checked from scratch: slow, for tests and when in doubt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sgl_tiered.cache.chain import Demotion
from sgl_tiered.cache.index import Node
from sgl_tiered.cache.promotion import Promoter, Promotion
from sgl_tiered.cache.store import PageStore
from sgl_tiered.cache.table import FREE, IN_FLIGHT, LOADING, READY
from sgl_tiered.core.ids import Representation
from sgl_tiered.core.plans import Int64s

__all__ = ["Tenant", "check_laws", "state_digest"]


class Tenant(Protocol):
    """Who uses slots and copies of the table beside the cache."""

    def num_active(self, tier: int) -> int:
        """Return how many of a tier's slots in use hold no copy."""
        ...

    def held(self) -> Int64s:
        """Return the entries that it has pinned, each as often as it has."""
        ...


def check_laws(
    store: PageStore,
    loads: Sequence[Int64s],
    demotions: Sequence[Demotion],
    offloads: Sequence[Int64s],
    promoter: Promoter,
    tenant: Tenant | None = None,
) -> None:
    """Assert that table, index, slots and plans agree.

    Args:
        store: what to check.
        loads: entries that loads under way read.
        demotions: batches under way.
        offloads: entries that offloads under way write.
        promoter: promotions and fetches under way.
        tenant: who else uses slots and copies, if anybody does.
    """
    promotions = promoter.under_way
    _check_slots(store, tenant)
    _check_edges(store, demotions, offloads)
    _check_promotions(store, promotions)
    reads = [demotion.reads for demotion in demotions]
    reads += [promotion.reads for promotion in promotions]
    reads += promoter.fetches.under_way
    writes = [*offloads, *(demotion.writes for demotion in demotions)]
    writes += [promotion.writes for promotion in promotions]
    held = np.zeros(0, np.int64) if tenant is None else tenant.held()
    _check_entries(store, loads, reads, writes, held)
    _check_index(store)


def _check_slots(store: PageStore, tenant: Tenant | None) -> None:
    table = store.table
    live = np.flatnonzero(table.state != FREE)
    for number, slots in enumerate(table.slots):
        name = table.tiers[number].label
        assert slots.used_slots + slots.free_slots == slots.capacity, name
        addresses = table.address[live[table.tier[live] == number]]
        assert len(np.unique(addresses)) == len(addresses), f"{name}: a shared slot"
        num_active = 0 if tenant is None else tenant.num_active(number)
        num_held = store.num_held[number]
        assert len(addresses) + num_active + num_held == slots.used_slots, (
            f"{name}: {len(addresses)} copies, {num_active} active blocks and "
            f"{num_held} pages to adopt in {slots.used_slots} used slots"
        )
        assert not slots.is_free(addresses).any(), f"{name}: a copy in a free slot"
        everywhere = slots.is_free(np.arange(slots.capacity))
        num_free = int(np.count_nonzero(everywhere))
        assert num_free == slots.free_slots, (name, num_free, slots.free_slots)
    used_entries = table.entries.used_slots
    assert used_entries == len(live), (used_entries, len(live))


def _check_edges(
    store: PageStore, demotions: Sequence[Demotion], offloads: Sequence[Int64s]
) -> None:
    tier = store.table.tier
    sources = [demotion.edge.source for demotion in demotions]
    assert len(set(sources)) == len(sources), f"two batches on one edge: {sources}"
    for demotion in demotions:
        edge = demotion.edge
        assert edge.target == edge.source + 1, "an edge that leaves out a tier"
        assert (tier[demotion.reads] == edge.source).all(), "read from another tier"
        assert (tier[demotion.writes] == edge.target).all(), "written to another tier"
        assert len(demotion.reads) == len(demotion.writes), "pages lost on the way"
        _check_alike(store, demotion.reads, demotion.writes)
    for entries in offloads:
        assert (tier[entries] == 0).all(), "offloaded past the first tier"


def _check_promotions(store: PageStore, promotions: Sequence[Promotion]) -> None:
    table = store.table
    for promotion in promotions:
        assert (table.tier[promotion.writes] == 0).all(), "promoted past the first tier"
        rows = table.entry_row[promotion.reads]
        assert (rows == table.entry_row[promotion.writes]).all(), "another page's bytes"
        assert (table.pins[promotion.reads] > 0).all(), "a source that may go"
        _check_alike(store, promotion.reads, promotion.writes)


def _check_alike(store: PageStore, reads: Int64s, writes: Int64s) -> None:
    table = store.table
    kinds = table.representation
    assert (kinds[reads] == kinds[writes]).all(), "a copy of another kind"
    assert (table.num_bytes[reads] == table.num_bytes[writes]).all(), "a torn copy"


def _check_entries(
    store: PageStore,
    loads: Sequence[Int64s],
    demote_reads: Sequence[Int64s],
    writes: Sequence[Int64s],
    held: Int64s,
) -> None:
    table = store.table
    live = np.flatnonzero(table.state != FREE)
    copies = np.bincount(table.entry_row[live], minlength=table.rows.capacity)
    assert (copies == table.copies).all(), "copies per page miscounted"
    pins = np.zeros(table.entries.capacity, np.int64)
    for entries in [*loads, *demote_reads]:
        pins[entries] += 1
    np.add.at(pins, held, 1)
    assert (pins == table.pins).all(), f"{pins.sum()} pins, table {table.pins.sum()}"
    is_act = table.representation[live] == Representation.ACT
    assert table.act_page_bytes or not is_act.any(), "activations where there are none"
    whole = (table.layer_start[live] == 0) & (
        table.layer_stop[live] == table.num_layers
    )
    whole &= table.encoding[live] == table.whole_encoding
    sizes = np.where(is_act, table.act_page_bytes, table.page_bytes)
    assert (table.num_bytes[live] == sizes)[whole].all(), "bytes of another kind"
    written = np.zeros(table.entries.capacity, np.bool_)
    for entries in writes:
        written[entries] = True
    assert (written == (table.state == IN_FLIGHT)).all(), "flights and plans differ"
    busy = (table.pins > 0) | (table.state == IN_FLIGHT)
    unused = np.flatnonzero(table.doomed & ~busy & (table.state != FREE))
    assert all(map(store.removal.covers, unused.tolist())), "doomed yet unused"
    num_busy = np.bincount(table.tier[busy], minlength=len(table.tiers)).tolist()
    assert num_busy == table.num_busy, f"{table.num_busy} in use, of {num_busy}"
    loading = np.zeros(table.rows.capacity, np.bool_)
    for entries in loads:
        loading[table.entry_row[entries]] = True
    detached = ~table.in_index
    unbound = np.array([node is None for node in table.node])
    held = np.flatnonzero(detached & ~unbound)
    is_kept = [store.removal.covers_row(row) or table.copies[row] for row in held]
    assert all(is_kept), "a node that nobody needs"
    assert not (unbound & ~detached).any(), "in_index and node differ"
    flagged = (table.flags & LOADING) != 0
    assert (flagged == (loading & ~detached)).all(), "pages marked loading differ"
    for number, column in enumerate(table.entry_of):
        rows = np.flatnonzero(column >= 0)
        entries = column[rows].astype(np.int64)
        assert (table.entry_row[entries] == rows).all(), "entry of another page"
        assert (table.tier[entries] == number).all(), "entry of another tier"
        assert (table.state[entries] != FREE).all(), "entry that is free"
        ready = (table.state[entries] == READY) & ~table.doomed[entries]
        shown = np.zeros(table.rows.capacity, np.bool_)
        shown[rows[ready]] = True
        flags = (table.flags >> number & 1) == 1
        assert (flags == shown).all(), f"flags of {table.tiers[number].label} differ"


def _check_index(store: PageStore) -> None:
    table, index = store.table, store.index
    for root in index.roots:
        assert root.children, "a namespace without pages"
    seen = np.zeros(table.rows.capacity, np.int64)
    below: dict[Node, list[int]] = {}
    # Children first, so that the counts below a node are known when it comes.
    for node in list(index.nodes())[::-1]:
        rows = node.rows
        assert len(rows), "a node without pages"
        assert len(node.raw) == len(rows) * store.page_bytes, "tokens and rows differ"
        seen[rows] += 1
        assert all(holder is node for holder in table.node[rows]), "row of another"
        known = table.key_known[rows]
        assert known.all() or not known.any(), "keys known for a part of a run"
        parent = node.parent
        assert parent is not None
        first = node.raw[: store.page_bytes]
        assert parent.children.get(first) is node, "not its parent's child"
        assert node.first_page == parent.first_page + len(parent.rows), "gap in a path"
        assert node.children or table.copies[rows[-1]], "an unreachable last page"
        counted = below.pop(node, [0] * len(store.tiers))
        assert counted == node.below, (counted, node.below)
        above = below.setdefault(parent, [0] * len(store.tiers))
        for number in range(len(store.tiers)):
            resident = int(np.count_nonzero(table.entry_of[number][rows] >= 0))
            assert resident == node.resident[number], (resident, node.resident)
            above[number] += counted[number] + resident
            if node.is_leaf(number):
                assert node.queued[number], "a leaf that no evictor knows"
    for root, counted in below.items():
        assert root.below == counted, (root.below, counted)
    assert seen.max(initial=0) <= 1, "a page in two runs"
    used = ~table.rows.is_free(np.arange(table.rows.capacity))
    detached = used & (seen == 0)
    assert not (seen.astype(np.bool_) & ~used).any(), "a free row in the index"
    idle = np.flatnonzero(detached & (table.copies == 0))
    assert all(map(store.removal.covers_row, idle.tolist())), "a row that nobody needs"


def state_digest(store: PageStore, credit: int) -> bytes:
    """Return 16 bytes over pages, copies and recency, in an order of contents.

    Args:
        store: pages and copies.
        credit: of the sightings, by which new pages are copied or not.
    """
    table = store.table
    parts = []
    for node in store.index.nodes():
        copies = b"".join(
            np.where(column[node.rows] >= 0, table.address[column[node.rows]], -1)
            .astype(np.int64)
            .tobytes()
            for column in table.entry_of
        )
        flags = table.flags[node.rows].tobytes()
        if table.act_page_bytes:
            for column in table.entry_of:
                entries = column[node.rows]
                flags += np.where(
                    entries >= 0, table.representation[entries], 0
                ).tobytes()
        facts = (node.access_sequence, node.insert_sequence, node.num_hits)
        place = node.digest + node.first_page.to_bytes(8, "little")
        parts.append(place + node.raw + copies + flags + repr(facts).encode())
    digest = hashlib.blake2b(digest_size=16)
    digest.update(credit.to_bytes(8, "little"))
    for part in sorted(parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    for slots in table.slots:
        digest.update(slots.free_slots.to_bytes(8, "little"))
    return digest.digest()
