"""TieredCache: decides what is kept below the device, where, and what to bring back.

Pure decisions, no I/O, on one thread: it hands out frozen plans, pipelines carry them
out, results come back through ``finish_*``. What a plan reads is pinned, what it writes
set aside. Expected negatives (miss, full, stale) are values, broken laws assertions.

The life of a page: ``plan_offload`` gives it a row and a slot in the first tier,
``finish_offload`` makes the copy a hit, ``plan_demote`` / ``finish_demote`` add a copy
in the next tier of the chain, ``lookup`` / ``commit_load`` / ``finish_load`` bring it
back from the fastest, after which an offload gives it a copy in the first tier again,
and eviction or a bad read takes copies away; with the last one the page is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np

from sgl_tiered.cache.adoption import Adoption, Arranged, arrange
from sgl_tiered.cache.chain import Chain, Demotion
from sgl_tiered.cache.config import LOAD_POLICIES, CacheConfig, TierConfig, check_choice
from sgl_tiered.cache.copy_watch import CopyWatch, PageNames
from sgl_tiered.cache.holes import lacking_copies
from sgl_tiered.cache.index import concat_rows
from sgl_tiered.cache.laws import Tenant, check_laws, state_digest
from sgl_tiered.cache.load_report import with_rebuilds
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.misses import MissReader
from sgl_tiered.cache.noted_uses import Kinds, note_uses, reload_costs
from sgl_tiered.cache.planner import IDLE, PassFacts, Planner
from sgl_tiered.cache.promotion import Promoter
from sgl_tiered.cache.sources import BUSY, Sources
from sgl_tiered.cache.stats import CacheStats
from sgl_tiered.cache.store import PageStore, Recency
from sgl_tiered.cache.table import LOADING
from sgl_tiered.cache.tombstones import Cause
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import (
    Bools,
    Decision,
    DemotePlan,
    FoundPages,
    Int32s,
    Int64s,
    LoadPlan,
    OffloadPlan,
    PageRecords,
    TierOccupancy,
    TransferResult,
    UInt8s,
)
from sgl_tiered.cost.model import CostModel
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.base import EvictionPolicy

__all__ = ["CacheConfig", "TierConfig", "TieredCache"]

_NOTHING_FOUND = "no page found"
_BEING_LOADED = "another request's load of these pages is under way"
_NO_ROWS, _NO_TIERS = np.zeros(0, np.int32), np.zeros(0, np.uint8)


class TieredCache:
    """The table, the index, the planner and the eviction policies as one cache.

    Args:
        config: tiers, page layout and policies.
        cost: predicted seconds; knows a link for every tier.
        eviction: one policy object per tier.
        clock: time of accesses.
        lookahead: the queue, for eviction policies that look at it.

    Raises:
        ConfigError: a tier without a link or a policy.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        cost: CostModel,
        eviction: Mapping[TierId, EvictionPolicy],
        clock: Clock,
        lookahead: QueueLookahead | None = None,
    ) -> None:
        for tier in config.tiers:
            if tier.tier not in eviction or tier.tier not in cost.tiers:
                raise ConfigError(
                    f"tiers.{tier.tier.label}",
                    "it has no eviction policy or no link cost",
                    "give both for every tier",
                )
        self._config = config
        self._tiers = tuple(tier.tier for tier in config.tiers)
        self._planner = Planner(
            cost,
            config.layout,
            config.load_policy,
            overlaps=config.load_overlaps,
            act_page_bytes=config.act_page_bytes,
        )
        self._store = PageStore(
            config,
            eviction,
            clock,
            lookahead,
            reload_costs(self._planner, self._tiers, lambda: self._store.table),
        )
        self._table = self._store.table
        self._index = self._store.index
        self._chain = Chain(self._store, config, clock)
        self.misses = MissReader(self._store, self._chain, config, clock)
        self.promoter = Promoter(self._store, self._take_plan_id)
        self._sources = Sources(self._table, self._tiers)
        self._next_plan_id = 1
        # Plan id -> the entries that it reads (load) or writes (offload).
        self._loads: dict[int, Int64s] = {}
        self._offloads: dict[int, Int64s] = {}
        self._tenant: Tenant | None = None
        self._adoptions: list[Adoption] = []

    @property
    def config(self) -> CacheConfig:
        """The settings."""
        return self._config

    @property
    def stats(self) -> CacheStats:
        """Counters since the start."""
        return self._store.counters.freeze()

    @property
    def planner(self) -> Planner:
        """What weighs loads against computing, for those who re-plan."""
        return self._planner

    def use_load_policy(self, policy: str) -> None:
        """Decide by another load policy from now on, for experiments.

        Raises:
            ConfigError: there is none of this name.
        """
        check_choice("load_policy", policy, LOAD_POLICIES)
        self._planner.load_policy = policy

    def open_namespace(self, namespace: Namespace) -> bytes:
        """Return a namespace's digest; it takes no room before it has a page."""
        return namespace.digest()

    @property
    def num_namespaces(self) -> int:
        """Namespaces with pages."""
        return self._index.num_namespaces

    def watch_namespaces(self, gone: Callable[[bytes], None]) -> None:
        """Call ``gone`` with each namespace that loses its last page from now on."""
        self._index.on_gone = gone

    def has_pages(self, digest: bytes) -> bool:
        """Return whether a namespace has a page."""
        return self._index.has_pages(digest)

    # Device <- tiers.

    def lookup(
        self,
        digest: bytes,
        tokens: Int32s,
        first_page: int,
        *,
        max_pages: int | None = None,
        tiers_allowed: Collection[TierId] | None = None,
        facts: PassFacts = IDLE,
        quiet: bool = False,
    ) -> Decision:
        """Say what to do about the prompt's pages from ``first_page`` on.

        Changes nothing but the pages' recency, so it may be asked again and again.

        Args:
            digest: a namespace.
            tokens: int32, the prompt; a last partial page is left out.
            first_page: pages that the device has.
            max_pages: most pages to load (``first_page`` does not count).
            tiers_allowed: tiers that may be read now; None for all.
            facts: of the links, and of the pass that the prompt would join.
            quiet: only a prediction: not even the recency changes.
        """
        store, table = self._store, self._table
        path = self._index.walk(self._index.root(digest), _raw(tokens))
        if not quiet:
            store.touch(path)
            store.counters.num_lookups += 1
        rows = concat_rows(path)[first_page:]
        if max_pages is not None:
            rows = rows[:max_pages]
        if not len(rows):
            return self._no_pages(Lookup.MISS, first_page, _NOTHING_FOUND)
        # take() does the same as indexing, in half the time.
        tiers = self._sources.by_flags(tiers_allowed).take(table.flags.take(rows))
        stops = tiers >= BUSY
        num_found = int(stops.argmax())
        if not stops[num_found]:
            num_found = len(rows)
        elif num_found == 0:
            if tiers[0] == BUSY:
                store.counters.num_pending += not quiet
                return self._no_pages(Lookup.PENDING, first_page, _BEING_LOADED)
            return self._no_pages(Lookup.MISS, first_page, _NOTHING_FOUND)
        tiers = tiers[:num_found]
        kinds = self._sources.kinds(rows[:num_found], tiers)
        choice = self._planner.choose(
            tiers, first_page, len(tokens), facts, may_try=not quiet, kinds=kinds
        )
        num_pages = choice.num_pages
        loaded = None if kinds is None else kinds[:num_pages]
        return Decision(
            lookup=Lookup.HIT if num_pages else Lookup.MISS,
            first_page=first_page,
            num_pages=num_pages,
            num_found=num_found,
            # A copy: one node's rows would be the index's own array.
            pages=rows[:num_pages].copy(),
            tiers=tiers[:num_pages],
            load_s=choice.load_s,
            recompute_s=choice.recompute_s,
            reason=with_rebuilds(choice.reason, tiers[:num_pages], loaded),
            version=table.version,
            wait_s=choice.wait_s,
            split_at=choice.split_at,
            total_s=choice.total_s,
            alternative_s=choice.alternative_s,
            representations=loaded,
        )

    def commit_load(self, decision: Decision) -> LoadPlan | None:
        """Pin the sources of a decision and mark its pages as being loaded.

        Returns:
            None where there is nothing to load or a source is gone or being loaded
            by another plan since the decision: look up again.
        """
        if not decision.num_pages:
            return None
        table, rows = self._table, decision.pages
        if table.version != decision.version and not self._sources.still_hold(decision):
            self._store.counters.num_refused_loads += 1
            return None
        entries = self._sources.entries(rows, decision.tiers)
        table.pin(entries)
        table.flags[rows] |= np.uint8(LOADING)
        table.version += 1
        plan = LoadPlan(
            plan_id=self._take_plan_id(),
            first_page=decision.first_page,
            pages=rows,
            tiers=decision.tiers,
            addresses=table.address.take(entries),
            checksums=table.checksum.take(entries),
            predicted_s=decision.load_s,
            representations=table.kinds(entries),
            num_bytes=table.bytes_by_kind(entries),
        )
        self._loads[plan.plan_id] = entries
        return plan

    def finish_load(
        self,
        plan: LoadPlan,
        *,
        landed: bool,
        bad_pages: Int32s | None = None,
        unused: Int32s | None = None,
    ) -> None:
        """Take note of the end of a load, whichever way it ended.

        Args:
            plan: from ``commit_load``; finishing it twice is a broken invariant.
            landed: whether the pages are on the device.
            bad_pages: positions in the plan whose bytes were wrong or unreadable;
                these copies are dropped.
            unused: positions in the plan that were computed after all; they do not
                count as loaded.
        """
        entries = self._loads.pop(plan.plan_id, None)
        assert entries is not None, f"load {plan.plan_id} is not under way"
        store, table = self._store, self._table
        table.flags[plan.pages] &= np.uint8(0xFF ^ LOADING)
        table.version += 1
        bad = np.zeros(len(entries), np.bool_)
        if bad_pages is not None:
            bad[bad_pages] = True
        idle = np.zeros(len(entries), np.bool_)
        if unused is not None:
            idle[unused] = True
        for number, tier in enumerate(self._tiers):
            mine = plan.tiers == tier
            if not mine.any():
                continue
            if bad_pages is not None:
                # Doomed while still pinned, so that unpinning drops them.
                store.discard(number, entries[mine & bad], Cause.FAILED_CHECK)
                store.counters.bad[tier] += int(np.count_nonzero(mine & bad))
            store.unpin(number, entries[mine])
            if landed:
                store.counters.loaded[tier] += int(
                    np.count_nonzero(mine & ~bad & ~idle)
                )
        if landed:
            for node in set(table.nodes_of(plan.pages)) - {None}:
                node.num_hits += 1
        store.settle()

    # Device -> first tier.

    def sight(self, digest: bytes, tokens: Int32s, *, seen_pages: int = 0) -> Recency:
        """Note that a request has these pages, which are to be offloaded later.

        Returns:
            What ``plan_offload`` is to be told then.
        """
        path = self._index.walk(self._index.root(digest), _raw(tokens))
        self._store.touch(path)
        note_uses(self._store, self._chain, path, digest, tokens, seen_pages)
        return self._store.recency

    def plan_offload(
        self,
        digest: bytes,
        tokens: Int32s,
        *,
        max_pages: int | None = None,
        seen_pages: int = 0,
        sighted: Recency | None = None,
        leave: Bools | None = None,
        kinds: UInt8s | None = None,
    ) -> OffloadPlan | None:
        """Plan copies in the first tier for the prompt's pages that lack one.

        Call it once per request and whenever more of its pages are computed. Pages
        that were loaded from a slower tier lack one: so they are promoted.

        Args:
            digest: a namespace.
            tokens: int32, a prompt whose pages are all on the device; a last partial
                page is left out.
            max_pages: most pages to copy.
            seen_pages: leading pages of earlier calls for the same request: the others
                are sighted (write policies ``auto`` and ``selective``, admission to
                disk).
            sighted: what ``sight`` returned, where that came before: pages are as
                recent as they were then, and not sighted again.
            leave: bool, pages that are not whole on the device; None for none.
            kinds: uint8 by page, the ``Representation`` to copy of it; None for KV.

        Returns:
            As many of the leading missing pages as there can be room for; None where
            that is none.
        """
        store, table = self._store, self._table
        raw = _raw(tokens)
        root = self._index.root(digest)
        path = self._index.walk(root, raw)
        known = concat_rows(path)
        store.free_dropped(0, known)
        num_new = len(raw) // store.page_bytes - len(known)
        uses: Kinds = ()
        if sighted is None:
            store.touch(path)
            facts = (path, digest, tokens, seen_pages)
            most, uses = note_uses(store, self._chain, *facts)
            if most is not None:
                # Those of earlier calls were counted then.
                unseen = max(len(known) + num_new - seen_pages, 0)
                store.counters.num_seen_once_pages += min(num_new - most, unseen)
                num_new = most
        positions = lacking_copies(table, known, num_new, leave)[:max_pages]
        if not len(positions):
            return None
        # The prompt's own pages are not evicted for its later ones.
        room = store.make_room(0, len(positions), protected=set(path))
        store.refuse(digest, tokens, positions[room:])
        positions = positions[:room]
        if not len(positions):
            store.settle()
            return None
        rows = known
        num_added = int(positions[-1]) + 1 - len(known)
        if num_added > 0:
            start = len(known) * store.page_bytes
            stop = start + num_added * store.page_bytes
            parent = path[-1] if path else root
            added = store.add_pages(parent, raw[start:stop], sighted)
            for tier, kind in uses:
                added.kinds[tier] = kind
            rows = np.concatenate([known, added.rows])
        rows = rows[positions]
        held = None if kinds is None else kinds[positions]
        addresses = store.start_copies(0, rows, held)
        store.settle()
        entries = table.entry_of[0][rows].astype(np.int64)
        plan = OffloadPlan(
            plan_id=self._take_plan_id(),
            tier=self._tiers[0],
            positions=positions.astype(np.int32),
            pages=rows,
            addresses=addresses,
            representations=table.kinds(entries),
            num_bytes=table.bytes_by_kind(entries),
        )
        self._offloads[plan.plan_id] = entries
        return plan

    def share(self, tenant: Tenant) -> tuple[PageStore, Chain]:
        """Return the pages and the edges, for one who keeps blocks among the copies."""
        assert self._tenant is None, "somebody shares this cache already"
        self._tenant = tenant
        return self._store, self._chain

    def known_pages(self, digest: bytes, tokens: Int32s) -> Int32s:
        """Return the table's rows of a prompt's leading pages, as far as it has any."""
        return concat_rows(self._index.walk(self._index.root(digest), _raw(tokens)))

    def watch_rows(self, freed: Callable[[Int32s], None]) -> None:
        """Have ``freed`` called as well with the rows that the table gives back."""
        self._table.on_rows_freed.append(freed)

    def watch_copies(self, names: PageNames) -> CopyWatch:
        """Return what tells from now on which copies come and go; call it once."""
        watch = CopyWatch(self._table, self._index, self._store.page_bytes, names)
        self.watch_rows(watch.freed)
        return watch

    def num_without_copy(self, digest: bytes, tokens: Int32s, first_page: int) -> int:
        """Return how many of a prompt's pages from ``first_page`` on are in no tier."""
        rows = self.known_pages(digest, tokens)[first_page:]
        num_pages = len(tokens) // self._config.layout.page_tokens - first_page
        return num_pages - int(np.count_nonzero(self._table.copies[rows]))

    def finish_offload(self, plan: OffloadPlan, result: TransferResult) -> None:
        """Make the copies that arrived hits, and drop the others."""
        entries = self._offloads.pop(plan.plan_id, None)
        assert entries is not None, f"offload {plan.plan_id} is not under way"
        found = (plan.pages, entries, result.ok, result.checksums, result.error)
        self._store.land_copies(0, *found)
        self._chain.arrived(0, plan.pages[result.ok])
        self._store.settle()

    # Tier -> next tier.

    def plan_demote(
        self, max_pages: int, *, not_to: Collection[TierId] = ()
    ) -> DemotePlan | None:
        """Plan copies of up to ``max_pages`` pages in the next tier of the chain.

        Call it until it returns None: one plan is under way per edge, and source and
        target are in the plan. Which pages follows from ``demote_policy`` and the
        write admission; room is made by evicting in the target what its policy values
        less. Derives the page keys that are not known yet. ``not_to`` names tiers that
        nothing is to be written to now. None where there is nothing to do.
        """
        chosen = self._chain.choose(max_pages, not_to)
        if chosen is None:
            self._store.settle()
            return None
        edge, batch = chosen
        store, table = self._store, self._table
        rows = batch.rows
        records = edge.records(batch)
        reads = table.entry_of[edge.source][rows].astype(np.int64)
        table.pin(reads)
        kinds = table.kinds(reads)
        addresses = store.start_copies(edge.target, rows, kinds)
        store.settle()
        plan = DemotePlan(
            plan_id=self._take_plan_id(),
            source=self._tiers[edge.source],
            target=self._tiers[edge.target],
            pages=rows,
            source_addresses=table.address[reads],
            target_addresses=addresses,
            records=replace(records, addresses=addresses, representations=kinds),
        )
        writes = table.entry_of[edge.target][rows].astype(np.int64)
        self._chain.begin(plan.plan_id, Demotion(edge, reads, writes))
        return plan

    def finish_demote(self, plan: DemotePlan, result: TransferResult) -> None:
        """Make the copies that arrived hits, drop the others, release the sources."""
        demotion, store = self._chain.end(plan.plan_id), self._store
        edge = demotion.edge
        found = (plan.pages, demotion.writes, result.ok, result.checksums)
        store.land_copies(edge.target, *found, result.error)
        self._chain.landed(edge, plan.pages, result.ok)
        store.unpin(edge.source, demotion.reads)
        store.settle()

    # Whole tiers.

    def adopt(self, tier: TierId, records: PageRecords) -> tuple[int, Int64s]:
        """Take over copies that a former process left in a tier.

        A page is refused where its key does not follow from its parent's key and its
        tokens, its parent is unknown, its slot or its copy is there already, or it is
        activations and no page can be.

        Returns:
            How many were adopted, and the addresses that were refused.
        """
        adoption = self.begin_adoption(tier, arrange(FoundPages.of([records])))
        while adoption.step(len(records.addresses)):
            pass
        return adoption.num_adopted, adoption.take_refused()

    def begin_adoption(self, tier: TierId, arranged: Arranged) -> Adoption:
        """Begin to take over what a former process left in a tier.

        The pages' slots are in use from now on. Call its ``step`` until nothing is
        left; ``reset`` and ``drop_tier`` cancel it.
        """
        number = self._tiers.index(tier)
        self._adoptions = [one for one in self._adoptions if one.num_left]
        self._adoptions.append(Adoption(self._store, number, arranged))
        return self._adoptions[-1]

    def rest(self, tiers: Collection[TierId]) -> None:
        """Leave these tiers out of every lookup, until it is called without them.

        For a medium that fails: its pages stay in the table, and are found again
        when it is well.
        """
        self._sources.rest(tiers)
        self.promoter.rest(tiers)

    def open_slots(self, tier: TierId, num_slots: int) -> None:
        """Let a tier use its slots below ``num_slots``, if it does not already."""
        slots = self._store.table.slots[self._tiers.index(tier)]
        slots.grow(max(num_slots, slots.capacity))

    def drop_tier(self, tier: TierId) -> None:
        """Forget every copy in a tier: none of them is found from now on.

        Their slots come back by and by, see ``free_dropped``; those in use as soon as
        they no longer are. ``take_forgotten`` tells which.
        """
        number = self._tiers.index(tier)
        for adoption in self._adoptions:
            if adoption.tier == number:
                adoption.cancel()
        self._chain.dropped(number)
        self._store.drop(number)
        self.free_dropped()

    def reset(self) -> None:
        """Forget every page: none is found from now on.

        Plans under way finish into nothing, and their slots are not used again before
        that. All others come back by and by, see ``free_dropped``.
        """
        for adoption in self._adoptions:
            adoption.cancel()
        self._chain.clear()
        self._store.clear()
        self.free_dropped()

    def free_dropped(self) -> bool:
        """Give back some of what a drop or a reset has forgotten; bounded work.

        To be called again and again, by several ranks at the same points. Where a plan
        needs room, some of it is given back as well.

        Returns:
            Whether there is more.
        """
        more = self._store.removal.step()
        self._store.settle()
        return more

    @property
    def is_freeing(self) -> bool:
        """Whether ``free_dropped`` has something left to do."""
        return self._store.removal.is_under_way

    def take_forgotten(self, tier: TierId) -> Int64s:
        """Return the addresses freed since the last call, for ``Tier.forget``.

        An address that is in use again is left out: the new copy's record takes the
        old one's place. So call it, and forget, before the next store is submitted.
        """
        return self._table.take_forgotten(self._tiers.index(tier))

    def occupancy(self, tier: TierId) -> TierOccupancy:
        """Return the use of a tier's slots; pinned ones include those in flight."""
        slot_bytes = self._config.layout.slot_bytes
        return self._store.occupancy(self._tiers.index(tier), slot_bytes)

    def slots_in_use(self, tier: TierId) -> Int64s:
        """Return the slots that a page has, those included to which one is on its way.

        O(slots).
        """
        slots = self._store.table.slots[self._tiers.index(tier)]
        return np.flatnonzero(~slots.is_free(np.arange(slots.capacity)))

    # Laws.

    def check(self) -> None:
        """Assert every law that ties table, index, slots and plans together."""
        check_laws(
            self._store,
            list(self._loads.values()),
            self._chain.under_way,
            list(self._offloads.values()),
            self.promoter,
            self._tenant,
        )

    def state_digest(self) -> bytes:
        """Return 16 bytes that are equal where pages, copies, recency and credit are.

        Two caches that were asked the same in the same order agree; a check for
        replays and between ranks. O(pages).
        """
        sightings = self._chain.sightings
        return state_digest(self._store, 0 if sightings is None else sightings.credit)

    @property
    def copies_at_once(self) -> bool:
        """Whether pages get a copy in the first tier when they are computed, as of now.

        Write policy ``auto`` stops that where nothing comes again.
        """
        return self._chain.copies_at_once

    @property
    def trust_pages(self) -> int:
        """Pages without reuse after which none is expected; 0 where nobody asks."""
        sightings = self._chain.sightings
        return 0 if sightings is None else sightings.trust_pages

    def memory_bytes(self) -> int:
        """Return the bytes of all arrays (the index's objects not counted)."""
        sightings, graves = self._chain.sightings, self._store.tombstones
        num_bytes = self._table.array_bytes() + (graves.num_bytes if graves else 0)
        return num_bytes + (sightings.num_bytes if sightings else 0)

    # Private.

    def _no_pages(self, lookup: Lookup, first_page: int, reason: str) -> Decision:
        return Decision(
            lookup=lookup,
            first_page=first_page,
            num_pages=0,
            num_found=0,
            pages=_NO_ROWS,
            tiers=_NO_TIERS,
            load_s=0.0,
            recompute_s=0.0,
            reason=reason,
            version=self._table.version,
        )

    def _take_plan_id(self) -> int:
        plan_id = self._next_plan_id
        self._next_plan_id += 1
        return plan_id


def _raw(tokens: Int32s) -> bytes:
    assert tokens.dtype == np.int32, f"token ids are int32, not {tokens.dtype}"
    return tokens.tobytes()
