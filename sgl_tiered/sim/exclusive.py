"""An exclusive hierarchy: each page lies in one tier, and a hit moves it to the device.

Built of the product's own parts: ``CacheTable`` (rows, copies, slots), ``RadixIndex``
(the walk), one ``Evictor`` per tier and an eviction policy in each. What is added here
is the order of moves, which the served ``TieredCache`` does not know because it is
inclusive: a hit leaves its tier, what the device loses goes to the next tier, what the
last tier loses is gone. There is no time; accesses are numbered instead.

A page id stands for its whole prefix, so to the index it is a page of one token.
Capacities hold between requests: each tier has room beyond them for one request's
pages, because a running request's own pages are extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sgl_tiered.cache.evictor import Evictor, Victims
from sgl_tiered.cache.index import Node, RadixIndex, concat_rows
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.outlook import ComingUses
from sgl_tiered.cache.reuse import ReuseHistory
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, UInt64s
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.base import EvictionPolicy

__all__ = ["ExclusiveHierarchy", "ExclusiveTier", "page_ids"]

_ROOT = b""
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class ExclusiveTier:
    """One tier of the hierarchy.

    Attributes:
        tier: which.
        num_pages: pages that it holds between requests, at least 1.
        policy: ranks what it loses.
    """

    tier: TierId
    num_pages: int
    policy: EvictionPolicy


class ExclusiveHierarchy:
    """The tiers, the pages in them, and what has moved.

    Args:
        tiers: fastest first; hits move to the first.
        max_request_pages: pages of the longest request to come.
        page_tokens: tokens of a page, for policies that learn.
        lookahead: the queue, made with ``keys_of=page_ids``; None without one.

    Attributes:
        lost_pages: per tier, pages that it has passed to the next, or dropped if last.

    Raises:
        ConfigError: no tiers, not fastest first, or one without a page.
    """

    def __init__(
        self,
        tiers: Sequence[ExclusiveTier],
        *,
        max_request_pages: int,
        page_tokens: int = 1,
        lookahead: QueueLookahead | None = None,
    ) -> None:
        order = [int(tier.tier) for tier in tiers]
        if not order or order != sorted(set(order)):
            raise ConfigError(
                "tiers",
                f"{[tier.tier.label for tier in tiers]} is not a list of different "
                "tiers, fastest first",
                "put them in order",
            )
        for tier in tiers:
            if tier.num_pages < 1:
                raise ConfigError(
                    f"tiers.{tier.tier.label}",
                    f"{tier.num_pages} pages are no tier",
                    "leave it out or give it room",
                )
        self._capacities = [tier.num_pages for tier in tiers]
        self._tiers = tuple(tier.tier for tier in tiers)
        self._table = CacheTable(
            self._tiers,
            tuple(tier.num_pages + max_request_pages for tier in tiers),
            num_layers=1,
            page_bytes=1,
        )
        self._index = RadixIndex(self._table, _ID_BYTES, self._push_leaf)
        # What a tier passes on is found in the next: it keeps what all down to it do.
        reached = list(accumulate(self._capacities))
        self._outlook = ComingUses(
            lookahead,
            {
                number: ReuseHistory(reached[number], page_tokens)
                for number, tier in enumerate(tiers)
                if tier.policy.needs_reuse
            },
            _key_of,
        )
        self._evictors = [
            Evictor(self._table, number, tier.policy, self._outlook)
            for number, tier in enumerate(tiers)
        ]
        if lookahead is not None:
            lookahead.listen(self._fell)
        self._sequence = 0
        self.lost_pages: dict[TierId, int] = dict.fromkeys(self._tiers, 0)

    @property
    def num_resident(self) -> Mapping[TierId, int]:
        """Pages in each tier now."""
        slots = self._table.slots
        return {t: slots[n].used_slots for n, t in enumerate(self._tiers)}

    def num_first(self, pages: Int32s) -> int:
        """Return how many of a request's first pages the first tier has; no use."""
        path = self._index.walk(self._index.root(_ROOT), pages.tobytes())
        present = self._table.entry_of[0][concat_rows(path)] >= 0
        absent = np.flatnonzero(~present)
        return int(absent[0]) if len(absent) else len(present)

    def access(self, pages: Int32s) -> dict[TierId, int]:
        """Serve one request; return the pages hit in each tier.

        Hits are the pages from the first one on, up to the first that no tier has;
        those are computed, and what is left of the prompt behind them too. At the end
        all pages of the request lie on top of the hierarchy.
        """
        self._sequence += 1
        raw = pages.tobytes()
        path = self._index.walk(self._index.root(_ROOT), raw)
        rows = concat_rows(path)
        absent = np.flatnonzero(self._table.copies[rows] == 0)
        num_hits = int(absent[0]) if len(absent) else len(rows)
        hits = {
            tier: int(np.count_nonzero(self._table.entry_of[n][rows[:num_hits]] >= 0))
            for n, tier in enumerate(self._tiers)
        }
        for node in path:
            node.access_sequence = self._sequence
            node.last_access_s = float(self._sequence)
            node.num_hits += 1
        new_kinds = self._outlook.see(page_ids(_ROOT, pages), path, 0, self._sequence)
        self._raise(path, rows)
        self._add_new(path, raw, len(pages) - len(rows), new_kinds)
        self._push_down()
        return hits

    def _raise(self, path: list[Node], rows: Int32s) -> None:
        """Move all pages of a path to the first tier."""
        for number in range(1, len(self._tiers)):
            entries = self._table.entry_of[number][rows]
            self._table.discard(entries[entries >= 0].astype(np.int64))
            for node in path:
                if node.resident[number]:
                    self._index.change_node(number, node, -node.resident[number])
        self._place(0, rows[self._table.entry_of[0][rows] < 0])
        for node in path:
            if node.resident[0] < len(node.rows):
                num_missing = len(node.rows) - node.resident[0]
                self._index.change_node(0, node, num_missing)

    def _add_new(
        self,
        path: list[Node],
        raw: bytes,
        num_new: int,
        kinds: Sequence[tuple[int, int]],
    ) -> None:
        if not num_new:
            return
        rows = self._table.alloc_rows(num_new)
        parent = path[-1] if path else self._index.root(_ROOT)
        node = self._index.add(parent, raw[len(raw) - num_new * _ID_BYTES :], rows)
        node.access_sequence = node.insert_sequence = self._sequence
        node.last_access_s = node.inserted_s = float(self._sequence)
        for tier, kind in kinds:
            node.kinds[tier] = kind
        self._place(0, rows)
        self._index.change_node(0, node, num_new)

    def _push_down(self) -> None:
        """Bring each tier back to its capacity, from the fastest down."""
        for number, capacity in enumerate(self._capacities):
            excess = self._table.slots[number].used_slots - capacity
            if excess <= 0:
                # Nothing was pushed into the tiers below either.
                return
            victims = self._evictors[number].select(excess)
            rows = np.concatenate([victim.rows for victim in victims])
            assert len(rows) == excess, f"{len(rows)} victims for {excess} pages"
            self.lost_pages[self._tiers[number]] += excess
            entries = self._table.entry_of[number][rows]
            self._table.discard(entries.astype(np.int64))
            is_last = number + 1 == len(self._tiers)
            if not is_last:
                self._place(number + 1, rows)
            self._count_moved(number, victims, is_last)

    def _count_moved(self, number: int, victims: list[Victims], is_last: bool) -> None:
        for victim in victims:
            num_pages = len(victim.rows)
            self._index.change_node(number, victim.node, -num_pages)
            if not is_last:
                self._index.change_node(number + 1, victim.node, num_pages)
        if is_last:
            self._index.prune(victim.node for victim in victims)

    def _place(self, number: int, rows: Int32s) -> None:
        addresses = self._table.slots[number].alloc(len(rows))
        assert addresses is not None, f"{len(rows)} pages and no room in {number}"
        self._table.mark_ready(self._table.add_copies(number, rows, addresses))

    def _push_leaf(self, tier: int, node: Node) -> None:
        self._evictors[tier].push(node)

    def _fell(self, digest: bytes, pages: Int32s) -> None:
        """Rank pages anew that a request no longer waits for."""
        for node in self._index.find(self._index.root(digest), pages.tobytes()):
            for evictor in self._evictors:
                evictor.requeue(node)


def page_ids(digest: bytes, pages: Int32s) -> UInt64s:
    """Return the keys of pages: their ids, which stand for whole prefixes."""
    del digest
    return pages.astype(np.uint64)


def _key_of(node: Node, position: int) -> int:
    return int.from_bytes(node.raw[position * _ID_BYTES :][:_ID_BYTES], "little")
