"""Promotions among everything else: the same laws, with pages coming up from the disk.

As in the machine that this one extends, a slot's contents in the model are spoilt when
a transfer into it begins and written when a page arrives, so a page that is shown too
early, or whose source was evicted meanwhile, is found out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import PromotePlan, TransferResult
from tests.property.test_tiered_cache_machine import (
    PROMPTS,
    Driver,
    TieredCacheMachine,
    contents,
    pages_of,
    snapshot,
)


class PromotingDriver(Driver):
    """Knows promotions too."""

    def do_promote(
        self, digest: bytes, tokens: Any, first_page: int, most: int, needed: Any
    ) -> PromotePlan | None:
        plan: PromotePlan | None = self._keep(
            self.cache.promoter.plan((digest, tokens), first_page, most, needed)
        )
        return plan

    def do_finish_promote(
        self, plan_id: int, positions: list[int], ok: list[bool]
    ) -> None:
        self.cache.promoter.finish(
            self.plans.pop(plan_id),
            np.array(positions, np.int32),
            TransferResult(np.array(ok, np.bool_), 0, 1e-3),
        )


class PromotionMachine(TieredCacheMachine):
    """Random operations, promotions among them."""

    driver_class = PromotingDriver

    def pinned(self) -> set[tuple[TierId, int]]:
        """Return the slots that plans under way read."""
        slots = super().pinned()
        for plan in self.plans(PromotePlan):
            slots |= {(plan.source, int(a)) for a in plan.source_addresses}
        return slots

    def num_written(self) -> int:
        """Return how many slots plans under way write."""
        promoted = sum(plan.num_pages for plan in self.plans(PromotePlan))
        return super().num_written() + promoted

    @precondition(lambda self: TierId.DISK in self.tiers)
    @rule(
        space=st.integers(0, 1),
        tokens=PROMPTS,
        other=PROMPTS,
        first_page=st.sampled_from([0, 0, 0, 1]),
        most=st.integers(1, 5),
        was_kept=st.booleans(),
        forgotten_above=st.booleans(),
        ends_now=st.integers(0, 2),
    )
    def promote(
        self,
        space: int,
        tokens: np.ndarray,
        other: np.ndarray,
        first_page: int,
        most: int,
        was_kept: bool,
        forgotten_above: bool,
        ends_now: int,
    ) -> None:
        """Only what the disk alone has comes up, once, and evicts nothing needed."""
        if was_kept:
            self.offload(space, tokens, None, 2)
            for _ in self.tiers[1:]:
                self.demote(5, True)
        if forgotten_above:
            for tier in self.tiers[:-1]:
                self.driver.run("drop_tier", tier)
        digest = self.digests[space]
        prompt = pages_of(digest, tokens)[first_page:most]
        before = self.at_rest()
        old = self.kept()
        pinned = self.pinned()
        needed = [(digest, other)]
        plan = self.driver.run("promote", digest, tokens, first_page, most, needed)
        if plan is None:
            assert before in (None, snapshot(self.cache))
            return
        on_disk = {address: page for page, (address, _) in old[TierId.DISK].items()}
        chosen = [on_disk[address] for address in plan.source_addresses.tolist()]
        self.pages[plan.plan_id] = chosen
        assert chosen == [page for page in prompt if page in set(chosen)]
        for page in chosen:
            assert old[TierId.DISK][page][1], "read from a copy that is no hit"
            for tier in self.tiers[:-1]:
                assert not old[tier].get(page, (0, False))[1], "it is in memory"
            assert page not in old[self.first], "a second copy in one tier"
        for address in plan.target_addresses.tolist():
            self.memory[self.first][address] = None
        said = [self.held[TierId.DISK][a] for a in plan.source_addresses.tolist()]
        self.holds(self.first, plan.target_addresses, plan, said)
        kept = {*pages_of(digest, tokens), *pages_of(digest, other)}
        self.check_evictions(old, pinned, self.first, len(chosen), kept)
        if ends_now:
            self.end_promote(plan, [ends_now > 1] * len(chosen), len(chosen))

    @precondition(lambda self: self.plans(PromotePlan))
    @rule(data=st.data())
    def finish_promote(self, data: st.DataObject) -> None:
        """A read ends, or is cancelled after some pages; some may be bad."""
        plan = data.draw(st.sampled_from(self.plans(PromotePlan)))
        num_read = data.draw(st.integers(0, plan.num_pages))
        ok = [data.draw(st.integers(0, 9)) > 0 for _ in range(num_read)]
        self.end_promote(plan, ok, num_read)

    def end_promote(self, plan: PromotePlan, ok: list[bool], num_read: int) -> None:
        """The source still holds the page; what is bad is a hit nowhere."""
        chosen = self.pages[plan.plan_id]
        sources = plan.source_addresses.tolist()
        for number in range(num_read):
            page = chosen[number]
            assert self.memory[plan.source][sources[number]] == page
            if ok[number]:
                target = int(plan.target_addresses[number])
                self.memory[self.first][target] = page
        self.driver.run("finish_promote", plan.plan_id, list(range(num_read)), ok)
        on_disk = contents(self.cache, TierId.DISK)
        hits = {address for address, is_hit in on_disk.values() if is_hit}
        for number in range(num_read):
            if not ok[number]:
                assert sources[number] not in hits


TestPromotionMachine = PromotionMachine.TestCase
TestPromotionMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
