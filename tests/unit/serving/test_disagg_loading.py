"""What a decode instance's own tiers hold comes to its device before the match."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import LoadPlan, TransferResult
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.serving.disagg.loading import OwnLoads
from sgl_tiered.testing.strategies import spell

PAGE = 2
LAYOUT = PageLayout(2, PAGE, 64)


class Rig:
    """A host tier with one prompt of seven pages, and a device that takes fetches."""

    def __init__(self, load_policy: str = "auto", sent_s: float = 1.0) -> None:
        self.clock = ManualClock()
        tiers = (TierConfig(TierId.HOST, 16),)
        rng = np.random.default_rng(0)
        self.cache = TieredCache(
            CacheConfig(LAYOUT, tiers, load_policy),
            # Computing is next to free here: it is not what a load is compared with.
            cost=CostModel(
                PrefillCost(1e-9, 1, 1, 1e12), {TierId.HOST: LinkCost(1e-4, 1e9)}
            ),
            eviction={TierId.HOST: make_eviction_policy("lru", rng)},
            clock=self.clock,
        )
        self.digest = self.cache.open_namespace(Namespace("m", "bfloat16", PAGE))
        plan = self.cache.plan_offload(self.digest, spell("abcdefg", PAGE))
        assert plan is not None
        num = len(plan.pages)
        ended = TransferResult(np.ones(num, np.bool_), 0, 0.0, np.zeros(num, np.uint64))
        self.cache.finish_offload(plan, ended)
        self.asked: list[tuple[int, int]] = []

        def sent(first_page: int, num_pages: int) -> float:
            self.asked.append((first_page, num_pages))
            return sent_s

        self.loads = OwnLoads(self.cache, self.clock, sent)
        self.loads.prefetcher.room = self
        self.flights: dict[int, LoadPlan] = {}
        self.room = 20

    def arrive(self, rid: str, word: str = "abcdefgh") -> None:
        self.loads.arrived(rid, self.digest, spell(word, PAGE), key=word)

    def advance(self, **on_device: int) -> set[str]:
        """Look at requests, each with so many pages on the device."""
        known = {id(self.loads.state(rid)): num for rid, num in on_device.items()}
        return self.loads.advance(on_device.keys(), lambda state: known[id(state)])

    # The device.

    def room_pages(self) -> int:
        return self.room

    def submit(self, plan, state, keep) -> bool:
        self.flights[plan.plan_id] = plan
        return True

    def cancel(self, plan_id: int) -> None:
        self.end(self.flights[plan_id], landed=False)

    def end(self, plan: LoadPlan, *, landed: bool) -> None:
        del self.flights[plan.plan_id]
        self.loads.prefetcher.ended(plan, landed=landed)

    @property
    def flight(self) -> LoadPlan:
        (plan,) = self.flights.values()
        return plan


def test_a_request_waits_for_what_is_held_here() -> None:
    """From where its pages on the device end; and goes on once it has landed."""
    rig = Rig()
    rig.arrive("r")
    assert rig.advance(r=2) == {"r"}
    assert (rig.flight.first_page, rig.flight.num_pages) == (2, 5)
    assert rig.asked == [(2, 5)]
    assert rig.advance(r=2) == {"r"}
    rig.end(rig.flight, landed=True)
    assert rig.advance(r=7) == set()
    assert rig.advance(r=7) == set()
    assert not rig.flights


def test_a_load_that_fails_is_not_tried_again() -> None:
    """The request is sent all of it."""
    rig = Rig()
    rig.arrive("r")
    assert rig.advance(r=0) == {"r"}
    rig.end(rig.flight, landed=False)
    assert rig.advance(r=0) == set()
    assert rig.advance(r=0) == set()
    assert not rig.flights


def test_a_load_that_is_late_is_given_up() -> None:
    """Nobody waits long, and its room is free again."""
    rig = Rig()
    rig.arrive("r")
    assert rig.advance(r=0) == {"r"}
    rig.clock.advance(10.0)
    assert rig.advance(r=0) == set()
    rig.advance(r=0)
    assert not rig.flights


def test_a_request_that_has_gone_waits_for_nothing() -> None:
    """Aborted, or matched."""
    rig = Rig()
    rig.arrive("r")
    assert rig.advance(r=0) == {"r"}
    assert rig.advance() == set()
    assert not rig.flights
    assert not rig.loads.arriving


@pytest.mark.parametrize(
    ("policy", "sent_s", "is_loaded"),
    [
        ("auto", 1e-3, True),
        ("auto", 1e-5, False),
        ("always", 1e-9, True),
        ("never", 10.0, False),
    ],
)
def test_the_faster_way_is_taken(policy: str, sent_s: float, is_loaded: bool) -> None:
    """Unless the load policy says which."""
    rig = Rig(policy, sent_s)
    rig.arrive("r")
    assert rig.advance(r=0) == ({"r"} if is_loaded else set())
    assert bool(rig.flights) is is_loaded


def test_nobody_waits_who_has_nothing_here() -> None:
    """Unknown prompts, those on the device, and those without room."""
    rig = Rig()
    rig.arrive("other", "xyz")
    rig.arrive("here")
    assert rig.advance(other=0, here=7) == set()
    assert not rig.flights


def test_without_room_it_is_looked_at_again() -> None:
    """It may wait for room anyway; then its pages come first."""
    rig = Rig()
    rig.room = 3
    rig.arrive("r")
    assert rig.advance(r=0) == set()
    assert rig.advance(r=0) == set()
    assert not rig.flights
    rig.room = 20
    assert rig.advance(r=0) == {"r"}
    rig.room = 3
    assert rig.advance(r=0) == {"r"}
    rig.end(rig.flight, landed=True)
    assert rig.advance(r=7) == set()


def test_two_requests_wait_for_one_load() -> None:
    """Of the same prompt; each page is copied once."""
    rig = Rig()
    rig.arrive("one")
    rig.arrive("two")
    assert rig.advance(one=0, two=0) == {"one", "two"}
    assert len(rig.flights) == 1
    assert rig.advance(two=0) == {"two"}
    rig.end(rig.flight, landed=True)
    assert rig.advance(two=7) == set()
