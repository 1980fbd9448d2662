"""Whom the evictor picks while worth changes with age: the least worthy one."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.cache.evictor import Evictor
from sgl_tiered.cache.index import Node, RadixIndex
from sgl_tiered.cache.outlook import OutlookFacts
from sgl_tiered.cache.table import CacheTable
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.cost import CostPolicy

EDGES = [1, 2, 4, 8, 16]
NUM_PAGES = 6
ROOT = b""


class Aging:
    """Worth by steps of age, the same for all runs."""

    def __init__(self, worths: list[int]) -> None:
        self.worths = worths
        self.sequence = 0

    def worth(self, node: Node) -> float:
        place = bisect_left(EDGES, self.sequence - node.access_sequence)
        return float(self.worths[place])

    def facts(self, node: Node, tier: int, num_taken: int) -> OutlookFacts:
        del tier, num_taken
        return 0.0, 0, math.inf, self.worth(node)

    def alike_from(self, node: Node, position: int) -> int:
        del node, position
        return 0

    def ages(self, tier: int) -> bool:
        del tier
        return True

    def next_step(self, node: Node, tier: int) -> int | None:
        del tier
        place = bisect_left(EDGES, self.sequence - node.access_sequence)
        return None if place == len(EDGES) else node.access_sequence + EDGES[place] + 1

    def now(self, tier: int) -> int:
        del tier
        return self.sequence

    def version(self, tier: int) -> int:
        del tier
        return 0


class Tier:
    """Six prompts of one page each."""

    def __init__(self, outlook: Aging) -> None:
        self.outlook = outlook
        table = CacheTable((TierId.HOST,), (NUM_PAGES,), 1, 1)
        self.evictor = Evictor(table, 0, CostPolicy(), outlook)
        index = RadixIndex(table, 4, lambda _, node: self.evictor.push(node))
        self.nodes = []
        for page in range(NUM_PAGES):
            rows = table.alloc_rows(1)
            raw = np.array([page], np.int32).tobytes()
            node = index.add(index.root(ROOT), raw, rows)
            addresses = table.slots[0].alloc(1)
            assert addresses is not None
            table.mark_ready(table.add_copies(0, rows, addresses))
            self.use(node)
            index.change_node(0, node, 1)
            self.nodes.append(node)

    def use(self, node: Node) -> None:
        self.outlook.sequence += 1
        node.access_sequence = self.outlook.sequence


@given(
    st.lists(st.integers(0, 3), min_size=len(EDGES) + 1, max_size=len(EDGES) + 1),
    st.lists(st.integers(0, NUM_PAGES - 1), max_size=40),
)
@settings(max_examples=200)
def test_the_least_worthy_goes_whatever_its_age(
    worths: list[int], uses: list[int]
) -> None:
    """Neither the oldest nor the youngest need be it; of equals it is the oldest."""
    outlook = Aging(worths)
    tier = Tier(outlook)
    for page in uses:
        tier.use(tier.nodes[page])
        # As the tree does where a run becomes a leaf again.
        tier.evictor.push(tier.nodes[page])
        least = min(
            tier.nodes, key=lambda node: (outlook.worth(node), node.access_sequence)
        )
        (victims,) = tier.evictor.select(1)
        assert victims.node is least
