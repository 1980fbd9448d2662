"""Promotion: pages of the disk get a copy in the first memory tier, ahead of need.

A promoted page is an ordinary copy there: every request finds it, the tier's policy
evicts it, and its disk copy stays. While it is on its way it is in flight like an
offloaded one, so nobody reads it, and its source is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.fetches import Fetches
from sgl_tiered.cache.index import Node, concat_rows
from sgl_tiered.cache.store import PageStore
from sgl_tiered.cache.table import LOADING
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, Int64s, PromotePlan, TransferResult

__all__ = ["Promoter", "Promotion", "Prompt", "Whereabouts"]

Prompt = tuple[bytes, Int32s]
"""Namespace and int32 token ids."""
_NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """The entries that a promotion under way reads and writes."""

    reads: Int64s
    writes: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Whereabouts:
    """Where the pages of a prompt are, from the device's last one on.

    Attributes:
        first_page: pages that the device has.
        rows: int32 [n], rows of the pages found after those, without a gap.
        wanted: int32, positions in ``rows`` of those that only the disk has.
        coming: int32, positions of those that are on their way to memory.
    """

    first_page: int
    rows: Int32s
    wanted: Int32s
    coming: Int32s

    @property
    def num_found(self) -> int:
        """Pages found."""
        return len(self.rows)


class Promoter:
    """Plans promotions of one cache; at most one at a time has any given page.

    Args:
        store: pages and copies; where its last tier is not a disk below a memory
            tier, nothing is ever wanted.
        take_plan_id: numbers plans.
    """

    def __init__(self, store: PageStore, take_plan_id: Callable[[], int]) -> None:
        self._store = store
        self._take_plan_id = take_plan_id
        tiers = store.tiers
        self._has_disk = len(tiers) > 1 and tiers[-1] is TierId.DISK
        self._source = len(tiers) - 1
        self._memory_mask = np.uint8((1 << self._source) - 1)
        self._under_way: dict[int, Promotion] = {}
        # Set while the disk fails: nothing new is read from it then.
        self.rests = False
        # The way on to the device.
        self.fetches = Fetches(store, take_plan_id)

    @property
    def under_way(self) -> list[Promotion]:
        """Promotions that have not ended."""
        return list(self._under_way.values())

    def rest(self, tiers: Collection[TierId]) -> None:
        """Read nothing from these tiers, until it is called without them."""
        self.rests = TierId.DISK in tiers
        self.fetches.rest(tiers)

    def look(self, prompt: Prompt, first_page: int, max_pages: int) -> Whereabouts:
        """Say where a prompt's pages are; changes no page's recency.

        Args:
            prompt: of a namespace.
            first_page: pages that the device has.
            max_pages: pages of the prompt that may be reused.
        """
        rows = concat_rows(self._walk(prompt))[first_page:max_pages]
        if not self._has_disk or not len(rows):
            return Whereabouts(first_page, _NO_ROWS, _NO_ROWS, _NO_ROWS)
        table = self._store.table
        flags = table.flags.take(rows)
        # What another request loads is on its way to the device, and ends the run.
        stops = (flags == 0) | ((flags & LOADING) != 0)
        if stops.any():
            num_found = int(stops.argmax())
            rows, flags = rows[:num_found], flags[:num_found]
        not_here = (flags & self._memory_mask) == 0
        in_flight = table.entry_of[0].take(rows) >= 0
        wanted = np.flatnonzero(not_here & ~in_flight).astype(np.int32)
        coming = np.flatnonzero(not_here & in_flight).astype(np.int32)
        return Whereabouts(first_page, rows, wanted, coming)

    def plan(
        self,
        prompt: Prompt,
        first_page: int,
        max_pages: int,
        needed: Iterable[Prompt] = (),
    ) -> PromotePlan | None:
        """Plan copies of what only the disk has of a prompt.

        Args:
            prompt, first_page, max_pages: as for ``look``.
            needed: other prompts, whose copies are not evicted for it.

        Returns:
            As many of the leading pages as there can be room for; None for none.
        """
        if self.rests:
            return None
        store, table = self._store, self._store.table
        kept = [prompt, *needed]
        # Twice: a walk may split a run of a path found before it.
        for other in kept:
            self._walk(other)
        protected = {node for other in kept for node in self._walk(other)}
        found = self.look(prompt, first_page, max_pages)
        rows = found.rows[found.wanted]
        if not len(rows):
            return None
        rows = rows[: store.make_room(0, len(rows), protected=protected)]
        if not len(rows):
            store.settle()
            return None
        # It is to be used, and so must not be the next to go.
        store.touch(self._walk(prompt))
        reads = table.entry_of[self._source][rows].astype(np.int64)
        table.pin(reads)
        kinds = table.kinds(reads)
        addresses = store.start_copies(0, rows, kinds)
        store.settle()
        plan = PromotePlan(
            plan_id=self._take_plan_id(),
            source=store.tiers[self._source],
            target=store.tiers[0],
            pages=rows,
            source_addresses=table.address[reads],
            target_addresses=addresses,
            checksums=table.checksum[reads],
            representations=kinds,
        )
        writes = table.entry_of[0][rows].astype(np.int64)
        self._under_way[plan.plan_id] = Promotion(reads, writes)
        return plan

    def finish(
        self, plan: PromotePlan, positions: Int32s, result: TransferResult
    ) -> None:
        """Make the copies that arrived hits, and release the sources.

        Args:
            plan: finishing it twice is a broken invariant.
            positions: in the plan of the pages that were read.
            result: one element per position; a page that is not ok was wrong or
                unreadable, so its disk copy is dropped. Pages that were not read
                stay as they are.
        """
        promotion = self._under_way.pop(plan.plan_id, None)
        assert promotion is not None, f"promotion {plan.plan_id} is not under way"
        store = self._store
        reads, writes = promotion.reads, promotion.writes
        is_read = np.zeros(len(reads), np.bool_)
        is_read[positions] = True
        bad = positions[~result.ok]
        if len(bad):
            # Doomed while still pinned, so that unpinning drops them.
            store.discard(self._source, reads[bad])
            store.counters.bad[plan.source] += len(bad)
        store.land_copies(
            0,
            plan.pages[positions],
            writes[positions],
            result.ok,
            np.zeros(0, np.uint64),
        )
        if not is_read.all():
            store.note_gone(0, store.table.fail_flight(writes[~is_read]))
        store.unpin(self._source, reads)
        store.settle()

    def _walk(self, prompt: Prompt) -> Sequence[Node]:
        digest, tokens = prompt
        index = self._store.index
        return index.walk(index.root(digest), tokens.tobytes())
