"""Which pages get a copy in the next tier, and in what order: one edge of the chain.

A page is demoted only when the page before it is in the target already, or is demoted
with it: what survives a restart there is found from the start of the sequence. A batch
takes pages of all namespaces in the order in which they are due: with many tenants of
a page or two each, a batch for each would cost a write for each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.cache.config import CacheConfig
from sgl_tiered.cache.index import Node
from sgl_tiered.cache.sightings import Sightings
from sgl_tiered.cache.store import PageStore
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.plans import (
    Bools,
    Int32s,
    Int64s,
    PageRecords,
    UInt8s,
    namespace_rows,
)
from sgl_tiered.policies.write_admission.base import WriteAdmission, WriteFacts

__all__ = ["Batch", "Demoter"]

_MAX_ATTEMPTS = 3
"""Pages that the target refused, or that failed on their way, are tried so often: a
target whose copies were all in use, or a disk that was full for a moment, has changed
by then; one that holds nothing but what it values more has not."""
_MAX_OFFERS = 65_536
_MAX_WINDOW = 4096
"""Pages kept copied ahead of need under on-evict: 8 GB at 2 MiB a page, some seconds of
what a device can offload. All of them are looked at whenever the table has changed."""
_MAX_REFUSED = 8
"""Refusals after which a call gives up: each asks the target's evictor in vain."""


@dataclass(slots=True)
class Batch:
    """Pages to demote together, of any namespaces.

    Attributes:
        parts: nodes with the positions of their pages in the run, parents first.
        num_pages: pages in all parts.
        kept: nodes that must lose nothing in the target: the parts, the one that is
            being added, and all above them.
    """

    parts: dict[Node, Int64s] = field(default_factory=dict)
    num_pages: int = 0
    kept: set[Node] = field(default_factory=set)

    @property
    def rows(self) -> Int32s:
        """The pages' rows in the table."""
        return np.concatenate([node.rows[where] for node, where in self.parts.items()])

    def keep(self, node: Node) -> None:
        """Protect a node and all above it, up to those that are kept already."""
        above: Node | None = node
        while above is not None and above not in self.kept:
            self.kept.add(above)
            above = above.parent

    def add(self, node: Node, where: Int64s) -> None:
        """Add pages of a node."""
        before = self.parts.get(node)
        self.parts[node] = where if before is None else np.concatenate([before, where])
        self.num_pages += len(where)


class Demoter:
    """Chooses batches for one edge; evicts in its target to make room for them.

    Args:
        store: pages and copies.
        config: policies and sizes.
        source: number of the tier that pages are read from; the next is the target.
        admission: which pages may be written to the target; None for all.
        sightings: what the admission looks at; None for one that does not look.
    """

    def __init__(
        self,
        store: PageStore,
        config: CacheConfig,
        source: int,
        admission: WriteAdmission | None = None,
        sightings: Sightings | None = None,
    ) -> None:
        self.source = source
        self.target = source + 1
        self._store = store
        self._admission = admission
        self._sightings = sightings
        self._is_write_through = config.demote_policy == "write-through"
        self._watermark = config.demote_watermark
        # The last row of each path that came to the source, and how often it was
        # refused: all that is missing before it goes with it.
        self._queue: deque[tuple[int, int]] = deque()
        self._idle_version = -1
        self._num_failed = 0

    @property
    def target_id(self) -> TierId:
        """Where its pages go."""
        return self._store.tiers[self.target]

    @property
    def is_picky(self) -> bool:
        """Whether a page may be refused now and admitted when it is seen again."""
        return self._sightings is not None

    def offer(self, rows: Int32s) -> None:
        """Take note of pages that are in the source, of one path in token order."""
        if self._is_write_through:
            self._put(int(rows[-1]), 0)

    def failed(self, rows: Int32s, *, all_failed: bool) -> None:
        """Take back pages that did not arrive; some of them may be gone by now."""
        self._num_failed = self._num_failed + 1 if all_failed else 0
        if self._num_failed >= _MAX_ATTEMPTS:
            self._drop("failed", len(rows))
        elif self._is_write_through:
            for row in self._store.table.ends_of(rows):
                self._put(row, 0)

    def succeeded(self) -> None:
        """Note that a batch arrived as a whole."""
        self._num_failed = 0

    def clear(self) -> None:
        """Forget what was offered."""
        self._queue.clear()

    def choose(self, max_pages: int) -> Batch | None:
        """Return the next batch, with room made for it, or None."""
        # Where there was nothing to do, there is nothing until the table changes.
        if max_pages < 1 or self._store.table.version == self._idle_version:
            return None
        if self._is_write_through:
            batch = self._choose_offered(max_pages)
        else:
            batch = self._choose_coldest(max_pages)
        if not batch.num_pages:
            self._idle_version = self._store.table.version
            return None
        return batch

    def records(self, batch: Batch) -> PageRecords:
        """Return what the tier keeps beside the bytes; derives keys where needed."""
        store, table = self._store, self._store.table
        namespaces, keys, parents, tokens = [], [], [], []
        for node, where in batch.parts.items():
            store.derive_keys(store.index.path_to(node))
            run_keys = table.keys[node.rows]
            before: UInt8s = np.frombuffer(store.key_before(node), np.uint8)
            run_parents = np.concatenate([before[None, :], run_keys[:-1]])
            run_tokens = np.frombuffer(node.raw, np.int32)
            namespaces.append(namespace_rows(node.digest, len(where)))
            keys.append(run_keys[where])
            parents.append(run_parents[where])
            tokens.append(run_tokens.reshape(-1, store.page_tokens)[where])
        all_keys = np.concatenate(keys)
        all_spaces = np.concatenate(namespaces)
        shape = (batch.num_pages, KEY_BYTES)
        assert all_keys.shape == all_spaces.shape == shape, (all_keys.shape, shape)
        return PageRecords(
            namespaces=all_spaces,
            keys=all_keys,
            parents=np.concatenate(parents),
            tokens=np.concatenate(tokens),
            checksums=np.zeros(batch.num_pages, np.uint64),
            addresses=np.zeros(batch.num_pages, np.int64),
        )

    def _put(self, row: int, attempts: int) -> None:
        if len(self._queue) >= _MAX_OFFERS:
            self._queue.popleft()
            self._drop("queue full", 1)
        self._queue.append((row, attempts))
        self._idle_version = -1

    def _drop(self, reason: str, num_pages: int) -> None:
        self._store.counters.note_dropped(self.target_id, reason, num_pages)

    def _choose_offered(self, max_pages: int) -> Batch:
        batch = Batch()
        num_refused = 0
        for _ in range(len(self._queue)):
            if num_refused >= (1 if batch.num_pages else _MAX_REFUSED):
                break
            row, attempts = self._queue[0]
            (node,) = self._store.table.nodes_of(np.array([row]))
            if node is None:
                self._queue.popleft()
                continue
            if not batch.num_pages:
                # One that was refused keeps nothing in the target for the next.
                batch = Batch()
            missing, waits = self._missing(node, batch)
            num_missing = sum(len(where) for _, where in missing)
            num_before = batch.num_pages
            has_room = self._take(batch, missing, max_pages)
            if has_room and batch.num_pages >= max_pages:
                # The rest of this path comes with the next batch.
                break
            self._queue.popleft()
            num_refused += not has_room
            if waits:
                self._queue.append((row, attempts))
            elif not has_room and attempts + 1 < _MAX_ATTEMPTS:
                self._queue.append((row, attempts + 1))
            elif not has_room:
                self._drop("no room", num_missing - batch.num_pages + num_before)
        return batch

    def _choose_coldest(self, max_pages: int) -> Batch:
        batch = Batch()
        store, source = self._store, self.source
        slots = store.table.slots[source]
        watermark_slots = int(self._watermark * slots.capacity)
        if slots.used_slots <= watermark_slots:
            return batch
        # Keep as many of the coldest pages copied as lie above the watermark.
        window_pages = min(max(1, slots.capacity - watermark_slots), _MAX_WINDOW)
        for victims in store.evictors[source].select(window_pages):
            missing, _ = self._missing(victims.node, batch)
            if not self._take(batch, missing, max_pages):
                break
            if batch.num_pages >= max_pages:
                break
        return batch

    def _missing(
        self, node: Node, batch: Batch
    ) -> tuple[list[tuple[Node, Int64s]], bool]:
        """Return the pages up to a node's end to demote, root first.

        Also whether there are more that wait for a copy in flight.
        """
        table, source, target = self._store.table, self.source, self.target
        missing = []
        path = self._store.index.path_to(node)
        if self._sightings is not None:
            self._store.derive_keys(path)
        for part in path:
            if part.resident[target] == len(part.rows):
                continue
            lacks = table.entry_of[target][part.rows] < 0
            if part in batch.parts:
                lacks[batch.parts[part]] = False
            is_source = (table.flags[part.rows] >> source & 1) != 0
            refused = lacks & ~self._admitted(part)
            blocked = np.flatnonzero(lacks & ~is_source | refused)
            if len(blocked):
                lacks[blocked[0] :] = False
            where = np.flatnonzero(lacks)
            if len(where):
                missing.append((part, where))
            if len(blocked):
                first = blocked[0]
                entry = table.entry_of[source][part.rows[first]]
                waits = entry >= 0 and not table.doomed[entry]
                return missing, bool(waits and not is_source[first])
        return missing, False

    def _admitted(self, node: Node) -> Bools:
        """Ask the admission about all pages of a run, whose keys are known."""
        num_pages = len(node.rows)
        if self._admission is None:
            return np.ones(num_pages, np.bool_)
        sightings, table = self._sightings, self._store.table
        if sightings is None:
            no_counts, no_rates = np.zeros(num_pages, np.uint8), np.zeros(num_pages)
            facts = WriteFacts(self.target_id, no_counts, no_rates)
        else:
            facts = WriteFacts(
                self.target_id,
                sightings.count(table.keys[node.rows]),
                sightings.reuse_rates(node.first_page, num_pages),
                sightings.comes_again,
            )
        return self._admission.admit(facts)

    def _take(
        self, batch: Batch, missing: list[tuple[Node, Int64s]], max_pages: int
    ) -> bool:
        """Add pages to the batch as far as there is room; return whether there was."""
        store, target = self._store, self.target
        for node, where in missing:
            where = where[: max_pages - batch.num_pages]
            if not len(where):
                return True
            wanted = batch.num_pages + len(where)
            batch.keep(node)
            room = store.make_room(
                target,
                wanted,
                protected=batch.kept,
                # Nothing is evicted there that its policy values as much.
                below=store.evictors[target].priority(node),
            )
            where = where[: max(0, room - batch.num_pages)]
            if len(where):
                batch.add(node, where)
            if room < wanted:
                return False
        return True
