"""The same pools on caches in use: the cache goes about its work between their calls.

What `test_mempool_machine.py` asks of a store of its own holds here too, and the laws
of the cache hold after every step. The cache offloads, loads, moves copies from tier to
tier, gets slots as their memory is pinned, and forgets; what it finds and what the pool
finds is the right thing.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.plans import DemotePlan, LoadPlan, OffloadPlan, TransferResult
from tests.property.pool_world import LAYOUT, Node, content, long_name, pages_of
from tests.property.test_mempool_machine import (
    BLOCKS,
    NODE,
    PICK,
    PROMPTS,
    RARELY,
    MemPoolMachine,
)

NAMESPACE = long_name(b"")
Plan = OffloadPlan | LoadPlan | DemotePlan


class CachePoolMachine(MemPoolMachine):
    """Random calls of pools, and of the caches that they stand on."""

    in_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[tuple[Node, Plan, np.ndarray]] = []

    def cache(self, node: Node) -> TieredCache:
        assert node.cache is not None
        return node.cache

    @initialize(num_open=st.sampled_from([0, 1, 3]))
    def begin(self, num_open: int = 0) -> None:
        """Start all instances, perhaps before all of their memory is pinned."""
        self.num_open = num_open
        super().begin()

    @precondition(lambda self: self.num_open)
    @rule(n=NODE, tier=st.sampled_from(list(BLOCKS)), num_slots=st.integers(2, 5))
    def open_slots(self, n: int, tier: TierId, num_slots: int) -> None:
        """More of a tier's memory is pinned."""
        cache = self.cache(self.world.nodes[n])
        cache.open_slots(tier, min(num_slots, BLOCKS[tier]))

    @rule(n=NODE, tokens=PROMPTS, at_once=st.booleans())
    def offload(self, n: int, tokens: np.ndarray, at_once: bool) -> None:
        """The cache copies pages of a prompt that the engine has computed."""
        node = self.world.nodes[n]
        plan = self.cache(node).plan_offload(NAMESPACE, tokens)
        if plan is not None:
            self.plans.append((node, plan, tokens))
            if at_once:
                self.end_plan(-1, True)

    @rule(n=NODE, tokens=PROMPTS)
    def load(self, n: int, tokens: np.ndarray) -> None:
        """The cache loads what it has of a prompt."""
        node = self.world.nodes[n]
        cache = self.cache(node)
        decision = cache.lookup(NAMESPACE, tokens, 0)
        if decision.lookup is Lookup.HIT:
            plan = cache.commit_load(decision)
            assert plan is not None
            self.plans.append((node, plan, tokens))

    @rule(n=NODE)
    def demote(self, n: int) -> None:
        """The cache copies pages to its next tier."""
        node = self.world.nodes[n]
        plan = self.cache(node).plan_demote(4)
        if plan is not None:
            self.plans.append((node, plan, np.zeros(0, np.int32)))

    @precondition(lambda self: self.plans)
    @rule(pick=PICK, ok=st.sampled_from([True, True, False]))
    def end_plan(self, pick: int, ok: bool) -> None:
        """A transfer of the cache's ends."""
        node, plan, tokens = self.plans.pop(pick % len(self.plans) if pick >= 0 else -1)
        cache = self.cache(node)
        if isinstance(plan, OffloadPlan):
            names = [pages_of(tokens)[at] for at in plan.positions.tolist()]
            self.fill(node, plan.tier, plan.addresses, names if ok else [b""])
            cache.finish_offload(plan, result(len(plan.pages), ok))
        elif isinstance(plan, DemotePlan):
            read = node.regions[plan.source][plan.source_addresses]
            node.regions[plan.target][plan.target_addresses] = read if ok else 0
            cache.finish_demote(plan, result(len(plan.pages), ok))
        else:
            names = pages_of(tokens)[plan.first_page :]
            places = zip(plan.tiers, plan.addresses, names, strict=False)
            for tier, slot, name in places:
                read = node.regions[TierId(int(tier))][slot]
                assert read.tobytes() == content(name).tobytes(), "another page's KV"
            cache.finish_load(plan, landed=ok)

    @rule(n=NODE, tier=st.sampled_from(list(BLOCKS)), really=RARELY)
    def drop(self, n: int, tier: TierId, really: bool) -> None:
        """Somebody empties a tier of a cache, or all of it (new weights)."""
        if really:
            self.cache(self.world.nodes[n]).drop_tier(tier)

    @rule(n=NODE, really=RARELY)
    def reset(self, n: int, really: bool) -> None:
        """The cache forgets all; blocks that somebody owns stay."""
        if really:
            self.cache(self.world.nodes[n]).reset()

    @rule(n=NODE, really=RARELY)
    def die(self, n: int, really: bool = True) -> None:
        """An instance dies with its transfers."""
        super().die(n, really)
        alive = set(self.world.nodes.values())
        self.plans = [some for some in self.plans if some[0] in alive]

    @invariant()
    def laws(self) -> None:
        """Table, index, slots, pins and plans agree."""
        if hasattr(self, "world"):
            for node in self.world.nodes.values():
                assert node.cache is not None
                node.cache.check()

    def teardown(self) -> None:
        """The cache ends its transfers; then all is as without one."""
        while self.plans:
            self.end_plan(-1, True)
        if hasattr(self, "world"):
            for node in self.world.nodes.values():
                for tier, num_slots in BLOCKS.items():
                    self.cache(node).open_slots(tier, num_slots)
        super().teardown()

    def fill(
        self, node: Node, tier: TierId, slots: np.ndarray, names: list[bytes]
    ) -> None:
        """Write pages into slots; one name stands for spoiled bytes in all."""
        for at, slot in enumerate(slots.tolist()):
            node.regions[tier][slot] = content(names[at % len(names)])


def result(num_pages: int, ok: bool) -> TransferResult:
    """A transfer of which everything arrived, or nothing."""
    if not ok:
        return TransferResult.failed(num_pages, 0.1, "it broke")
    return TransferResult(
        ok=np.ones(num_pages, np.bool_),
        num_bytes=num_pages * LAYOUT.page_bytes,
        seconds=0.1,
        checksums=np.zeros(num_pages, np.uint64),
        error="",
    )


TestCachePool = CachePoolMachine.TestCase
TestCachePool.settings = settings(
    # 30, and 300 in the profile ``full``: an example takes a third of a second, and the
    # rules that are not of the cache are those of test_mempool_machine.py, drawn there.
    max_examples=settings.default.max_examples * 3 // 10,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
