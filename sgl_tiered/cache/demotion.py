"""Which pages get a copy in the second tier, and in what order.

A page is demoted only when the page before it is in the second tier already, or is
demoted with it: what survives a restart there is found from the start of the sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.cache.config import CacheConfig
from sgl_tiered.cache.index import Node
from sgl_tiered.cache.store import PageStore
from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.core.plans import Int32s, Int64s, PageRecords, UInt8s

__all__ = ["Batch", "Demoter"]


@dataclass(slots=True)
class Batch:
    """Pages of one namespace to demote together.

    Attributes:
        digest: the namespace.
        parts: nodes with the positions of their pages in the run, parents first.
        num_pages: pages in all parts.
    """

    digest: bytes
    parts: list[tuple[Node, Int64s]] = field(default_factory=list)
    num_pages: int = 0

    @property
    def rows(self) -> Int32s:
        """The pages' rows in the table."""
        return np.concatenate([node.rows[where] for node, where in self.parts])


class Demoter:
    """Chooses batches; evicts in the second tier to make room for them."""

    def __init__(self, store: PageStore, config: CacheConfig) -> None:
        self._store = store
        self._has_target = len(config.tiers) > 1
        self._is_write_through = config.demote_policy == "write-through"
        first_slots = config.tiers[0].num_slots
        self._watermark_slots = int(config.demote_watermark * first_slots)
        # Keep as many of the coldest pages copied as lie above the watermark.
        self._window_pages = max(1, first_slots - self._watermark_slots)
        # The last row of each offload: all that is missing before it goes with it.
        self._queue: deque[int] = deque()
        self._idle_version = -1

    def offer(self, rows: Int32s) -> None:
        """Take note of pages that have come to the first tier, in token order."""
        if self._has_target and self._is_write_through:
            self._queue.append(int(rows[-1]))

    def clear(self) -> None:
        """Forget what was offered."""
        self._queue.clear()

    def choose(self, max_pages: int) -> Batch | None:
        """Return the next batch, with room made for it, or None."""
        if not self._has_target or max_pages < 1:
            return None
        if self._is_write_through:
            return self._choose_offered(max_pages)
        return self._choose_coldest(max_pages)

    def records(self, batch: Batch) -> PageRecords:
        """Return what the tier keeps beside the bytes; derives keys where needed."""
        store, table = self._store, self._store.table
        keys, parents, tokens = [], [], []
        for node, where in batch.parts:
            store.derive_keys(store.index.path_to(node))
            run_keys = table.keys[node.rows]
            before: UInt8s = np.frombuffer(store.key_before(node), np.uint8)
            run_parents = np.concatenate([before[None, :], run_keys[:-1]])
            run_tokens = np.frombuffer(node.raw, np.int32)
            keys.append(run_keys[where])
            parents.append(run_parents[where])
            tokens.append(run_tokens.reshape(-1, store.page_tokens)[where])
        all_keys = np.concatenate(keys)
        assert all_keys.shape == (batch.num_pages, KEY_BYTES), all_keys.shape
        return PageRecords(
            namespace=batch.digest,
            keys=all_keys,
            parents=np.concatenate(parents),
            tokens=np.concatenate(tokens),
            checksums=np.zeros(batch.num_pages, np.uint64),
            addresses=np.zeros(batch.num_pages, np.int64),
        )

    def _choose_offered(self, max_pages: int) -> Batch | None:
        batch: Batch | None = None
        for _ in range(len(self._queue)):
            row = self._queue[0]
            node = self._store.table.node[row]
            if node is None:
                self._queue.popleft()
                continue
            if batch is None:
                batch = Batch(node.digest)
            elif batch.digest != node.digest:
                break
            missing, waits = self._missing(node, batch)
            has_room = self._take(batch, missing, max_pages)
            if has_room and batch.num_pages >= max_pages:
                # The rest of this path comes with the next batch.
                break
            self._queue.popleft()
            if waits:
                self._queue.append(row)
            if not has_room:
                break
        return batch if batch is not None and batch.num_pages else None

    def _choose_coldest(self, max_pages: int) -> Batch | None:
        store = self._store
        version = store.table.version
        if (
            store.table.slots[0].used_slots <= self._watermark_slots
            or version == self._idle_version
        ):
            return None
        batch: Batch | None = None
        for victims in store.evictors[0].select(self._window_pages):
            node = victims.node
            if batch is None:
                batch = Batch(node.digest)
            elif batch.digest != node.digest:
                if batch.num_pages:
                    break
                batch = Batch(node.digest)
            missing, _ = self._missing(node, batch)
            if not self._take(batch, missing, max_pages):
                break
            if batch.num_pages >= max_pages:
                break
        if batch is None or not batch.num_pages:
            # Nothing to do until the table changes: asking again costs nothing.
            self._idle_version = store.table.version
            return None
        return batch

    def _missing(
        self, node: Node, batch: Batch
    ) -> tuple[list[tuple[Node, Int64s]], bool]:
        """Return the pages up to a node's end to demote, root first.

        Also whether there are more that wait for a copy in flight.
        """
        table = self._store.table
        taken = {id(part): where for part, where in batch.parts}
        missing = []
        for part in self._store.index.path_to(node):
            if part.resident[1] == len(part.rows):
                continue
            lacks = table.entry_of[1][part.rows] < 0
            if id(part) in taken:
                lacks[taken[id(part)]] = False
            is_source = (table.flags[part.rows] & 1) != 0
            blocked = np.flatnonzero(lacks & ~is_source)
            if len(blocked):
                lacks[blocked[0] :] = False
            where = np.flatnonzero(lacks)
            if len(where):
                missing.append((part, where))
            if len(blocked):
                return missing, bool(table.entry_of[0][part.rows[blocked[0]]] >= 0)
        return missing, False

    def _take(
        self, batch: Batch, missing: list[tuple[Node, Int64s]], max_pages: int
    ) -> bool:
        """Add pages to the batch as far as there is room; return whether there was."""
        store = self._store
        for node, where in missing:
            where = where[: max_pages - batch.num_pages]
            if not len(where):
                return True
            wanted = batch.num_pages + len(where)
            room = store.make_room(
                1,
                wanted,
                protected=set(_ancestry(batch, node)),
                # Nothing is evicted there that its policy values as much.
                below=store.evictors[1].priority(node),
            )
            where = where[: max(0, room - batch.num_pages)]
            if len(where):
                self._append(batch, node, where)
            if room < wanted:
                return False
        return True

    def _append(self, batch: Batch, node: Node, where: Int64s) -> None:
        for number, (part, before) in enumerate(batch.parts):
            if part is node:
                batch.parts[number] = (node, np.concatenate([before, where]))
                break
        else:
            batch.parts.append((node, where))
        batch.num_pages += len(where)


def _ancestry(batch: Batch, node: Node) -> Iterator[Node]:
    for part in [*(part for part, _ in batch.parts), node]:
        above: Node | None = part
        while above is not None:
            yield above
            above = above.parent
