"""The chain of tiers: one edge from each tier to the next, and what moves on each.

A page that comes to a tier is offered to the edge below it, so under write-through it
goes all the way down; under on-evict each edge takes the coldest pages of its source.
One batch is under way per edge, and an edge that lost a whole batch rests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sgl_tiered.cache.config import CacheConfig
from sgl_tiered.cache.demotion import Batch, Demoter
from sgl_tiered.cache.index import Node, concat_rows
from sgl_tiered.cache.sightings import Sightings
from sgl_tiered.cache.store import PageStore
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Bools, Int32s, Int64s, UInt8s
from sgl_tiered.policies.write_admission.registry import make_write_admission

__all__ = ["Chain", "Demotion"]

_REMEMBERED = 2
"""Sightings remembered per slot of all tiers and page of the device: a page that is
admitted at its second sighting must be remembered for longer than it would have been
kept."""
_TRUST = 4
"""Reuse of a disk's reach is not waited for, but four times that of what is above it:
traffic that comes again at all does so at shorter distances too."""


@dataclass(frozen=True, slots=True, eq=False)
class Demotion:
    """A batch under way: its edge, and the entries that it reads and writes."""

    edge: Demoter
    reads: Int64s
    writes: Int64s


class Chain:
    """The edges between the tiers of one cache.

    Args:
        store: pages and copies.
        config: tiers and policies.
        clock: for the rest after a failure.
    """

    def __init__(self, store: PageStore, config: CacheConfig, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._rest_s = config.demote_rest_s
        admission = make_write_admission(config.disk_admission)
        has_disk = any(tier.tier is TierId.DISK for tier in config.tiers[1:])
        asks_twice = has_disk and admission.needs_sightings
        self._write_policy = config.write_policy
        self.sightings: Sightings | None = None
        if asks_twice or config.write_policy in ("selective", "auto"):
            every = config.device_pages + sum(tier.num_slots for tier in config.tiers)
            last = config.tiers[-1]
            above = every - (last.num_slots if last.tier is TierId.DISK else 0)
            self.sightings = Sightings(_REMEMBERED * every, min(every, _TRUST * above))
        self._edges = []
        for number, target in enumerate(config.tiers[1:]):
            is_disk = target.tier is TierId.DISK
            self._edges.append(
                Demoter(
                    store,
                    config,
                    number,
                    admission if is_disk else None,
                    self.sightings if is_disk and asks_twice else None,
                )
            )
        self._not_before_s = [0.0] * len(self._edges)
        self._under_way: dict[int, Demotion] = {}

    @property
    def under_way(self) -> list[Demotion]:
        """Batches that have not ended."""
        return list(self._under_way.values())

    @property
    def copies_at_once(self) -> bool:
        """Whether a page gets its copy in the first tier when it is computed.

        Not where it has to be seen twice, or only the device's coldest are copied.
        """
        if self._write_policy == "auto":
            assert self.sightings is not None
            return self.sightings.comes_again
        return self._write_policy == "write-through"

    def see(self, path: list[Node], keys: UInt8s, seen_pages: int) -> int:
        """Note that a request has these pages.

        Args:
            path: the prompt's nodes in the index.
            keys: of all its pages, uint8 [n, 16].
            seen_pages: leading pages that were noted for this request before.

        Returns:
            How many of the leading pages that no tier has may be copied to the first.
        """
        sightings = self.sightings
        assert sightings is not None, "nobody looks at sightings"
        known = concat_rows(path)
        num_held = max(len(known) - seen_pages, 0)
        sightings.see(keys[seen_pages:], seen_pages, num_held)
        for edge in self._edges:
            if edge.is_picky and len(known):
                edge.offer(known)
        num_new = len(keys) - len(known)
        if self._write_policy == "on-evict" or self.copies_at_once:
            return num_new
        new = keys[len(known) :]
        if num_new and sightings.count(new[:1])[0] < 2:
            # Mostly so; and again with each chunk of a long prompt.
            return 0
        once = np.flatnonzero(sightings.count(new) < 2)
        return int(once[0]) if len(once) else num_new

    def arrived(self, tier: int, rows: Int32s) -> None:
        """Offer pages of one path that have come to a tier to the edge below it."""
        if tier < len(self._edges) and len(rows):
            self._edges[tier].offer(rows)

    def choose(
        self, max_pages: int, not_to: Collection[TierId] = ()
    ) -> tuple[Demoter, Batch] | None:
        """Return an edge that is free and a batch for it, with room made; or None."""
        busy = {demotion.edge.source for demotion in self._under_way.values()}
        now_s = self._clock.now()
        for edge in self._edges:
            if edge.source in busy or edge.target_id in not_to:
                continue
            if now_s < self._not_before_s[edge.source]:
                continue
            batch = edge.choose(max_pages)
            if batch is not None:
                return edge, batch
        return None

    def begin(self, plan_id: int, demotion: Demotion) -> None:
        """Keep a batch until it ends."""
        self._under_way[plan_id] = demotion

    def end(self, plan_id: int) -> Demotion:
        """Take a batch that has ended; its copies are still to be landed."""
        demotion = self._under_way.pop(plan_id, None)
        assert demotion is not None, f"demote {plan_id} is not under way"
        return demotion

    def landed(self, edge: Demoter, rows: Int32s, ok: Bools) -> None:
        """Pass on what arrived over an edge, and take the rest back."""
        if ok.all():
            edge.succeeded()
        else:
            all_failed = not ok.any()
            if all_failed:
                self._not_before_s[edge.source] = self._clock.now() + self._rest_s
            edge.failed(rows[~ok], all_failed=all_failed)
        for row in self._store.table.ends_of(rows[ok]):
            self.arrived(edge.target, np.array([row], np.int32))

    def dropped(self, tier: int) -> None:
        """Forget what was offered of a tier's pages: all of them are dropped."""
        if tier < len(self._edges):
            self._edges[tier].clear()

    def clear(self) -> None:
        """Forget offers and sightings; batches under way still end."""
        for edge in self._edges:
            edge.clear()
        if self.sightings is not None:
            self.sightings.clear()
