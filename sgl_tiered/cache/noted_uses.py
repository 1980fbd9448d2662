"""What the cache tells those who remember: who used which pages, and what a loss costs.

Free functions over the parts of ``TieredCache``; nothing is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sgl_tiered.cache.chain import Chain
from sgl_tiered.cache.index import Node
from sgl_tiered.cache.lookahead import short_keys
from sgl_tiered.cache.planner import Planner
from sgl_tiered.cache.store import PageStore
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, count_act

__all__ = ["Kinds", "note_uses", "reload_costs"]

Kinds = Sequence[tuple[int, int]]
"""Tier number and kind of a page there, see ``reuse.py``."""


def note_uses(
    store: PageStore,
    chain: Chain,
    path: list[Node],
    digest: bytes,
    tokens: Int32s,
    seen_pages: int,
) -> tuple[int | None, Kinds]:
    """Tell those who remember that a request has these pages.

    Returns:
        How many of the leading pages that no tier has may be copied, None for all; and
        the kinds of the last page, where somebody learns.
    """
    learns = bool(store.outlook.histories)
    if chain.sightings is None and not learns:
        return None, ()
    keys = store.keys_of(path, digest, tokens)
    most = None
    if chain.sightings is not None:
        most = chain.see(path, keys, seen_pages)
    if not learns:
        return most, ()
    sequence = store.recency[0]
    return most, store.outlook.see(short_keys(keys), path, seen_pages, sequence)


def reload_costs(
    planner: Planner, tiers: Sequence[TierId], table: Callable[[], CacheTable]
) -> Callable[[Node, int], float]:
    """Return what tells the seconds per page that it costs if a tier loses a run.

    The run comes back from the next tier that has it, or is computed, instead of being
    read from there. Pages of activations are read as such, and rebuilt.

    Args:
        planner: predicts loads, rebuilds and passes.
        tiers: by number.
        table: returns who knows what the copies hold.
    """

    def held_s(node: Node, tier: int, num_pages: int) -> float:
        num_act = 0
        if table().act_page_bytes:
            entries = table().entry_of[tier][node.rows]
            num_act = count_act(table().kinds(entries[entries >= 0].astype(np.int64)))
        load_s = planner.load_s(tiers[tier], num_pages, num_act)
        rebuild_s = planner.rebuild_s(num_act)
        if tiers[tier] is TierId.DISK:
            # It is read before the request runs, and rebuilt while that does.
            return load_s + rebuild_s
        return max(load_s, rebuild_s)

    def reload_s(node: Node, tier: int) -> float:
        num_pages = max(1, node.resident[tier])
        here_s = held_s(node, tier, num_pages)
        there_s = planner.compute_s(node.first_page, num_pages)
        for below in range(tier + 1, len(tiers)):
            if node.resident[below] >= num_pages:
                there_s = held_s(node, below, num_pages)
                break
        return max(there_s - here_s, 0.0) / num_pages

    return reload_s
