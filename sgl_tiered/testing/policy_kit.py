"""Conformance kits for policies: subclass them in a pytest module.

Example:
    class TestMyPolicy(EvictionPolicyKit):
        def make_policy(self, rng):
            return MyPolicy()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy
from sgl_tiered.policies.order.base import Location, RequestOrder, WaitingFacts
from sgl_tiered.policies.write_admission.base import WriteAdmission, WriteFacts

__all__ = [
    "EvictionPolicyKit",
    "RequestOrderKit",
    "WriteAdmissionKit",
    "most_overtaken",
]


def _random_facts(rng: np.random.Generator) -> EvictionFacts:
    inserted = int(rng.integers(1, 10_000))
    accessed = inserted + int(rng.integers(0, 10_000))
    return EvictionFacts(
        tier=TierId(int(rng.choice([TierId.HOST, TierId.DISK]))),
        num_pages=int(rng.integers(1, 1000)),
        last_access_s=accessed * 0.1,
        inserted_s=inserted * 0.1,
        access_sequence=accessed,
        insert_sequence=inserted,
        num_hits=int(rng.integers(0, 20)),
        score=float(rng.integers(-3, 4)),
    )


class EvictionPolicyKit:
    """What the cache relies on, whatever a policy prefers."""

    def make_policy(self, rng: np.random.Generator) -> EvictionPolicy:
        """Return a new policy object; the one method to write."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        """A policy made with a fixed seed."""
        return self.make_policy(np.random.default_rng(1))

    @pytest.fixture
    def facts(self) -> list[EvictionFacts]:
        """Facts of many runs of pages."""
        rng = np.random.default_rng(2)
        return [_random_facts(rng) for _ in range(300)]

    def test_has_the_interface(self, policy: EvictionPolicy) -> None:
        """It is an EvictionPolicy with a name that a flag can spell."""
        assert isinstance(policy, EvictionPolicy)
        assert policy.name
        assert policy.name == policy.name.lower().strip()

    def test_priorities_are_finite(
        self, policy: EvictionPolicy, facts: list[EvictionFacts]
    ) -> None:
        """Every priority is a finite float, so the heap's order is total."""
        for item in facts:
            priority = policy.priority(item)
            assert isinstance(priority, float)
            assert math.isfinite(priority)

    def test_equal_facts_have_equal_priorities(
        self, policy: EvictionPolicy, facts: list[EvictionFacts]
    ) -> None:
        """Asking in another order, or twice, changes no answer."""
        forwards = [policy.priority(item) for item in facts]
        backwards = [policy.priority(item) for item in reversed(facts)]
        assert forwards == backwards[::-1]

    def test_same_seed_gives_the_same_order(self, facts: list[EvictionFacts]) -> None:
        """Two objects made with the same seed rank alike, so replays are equal."""
        one = self.make_policy(np.random.default_rng(5))
        two = self.make_policy(np.random.default_rng(5))
        assert [one.priority(f) for f in facts] == [two.priority(f) for f in facts]

    def test_use_never_lowers_the_priority(
        self, policy: EvictionPolicy, facts: list[EvictionFacts]
    ) -> None:
        """A later access, a further hit or a higher score protects, or does nothing."""
        for item in facts:
            used = replace(
                item,
                last_access_s=item.last_access_s + 1.0,
                access_sequence=item.access_sequence + 1,
            )
            hit = replace(item, num_hits=item.num_hits + 1)
            scored = replace(item, score=item.score + 1.0)
            for better in (used, hit, scored):
                assert policy.priority(better) >= policy.priority(item)

    def test_tells_runs_apart(
        self, policy: EvictionPolicy, facts: list[EvictionFacts]
    ) -> None:
        """It ranks: not everything is equally worth keeping."""
        assert len({policy.priority(item) for item in facts}) > 1


class WriteAdmissionKit:
    """What the cache relies on, whatever an admission prefers."""

    def make_admission(self) -> WriteAdmission:
        """Return a new object; the one method to write."""
        raise NotImplementedError

    @pytest.fixture
    def admission(self) -> WriteAdmission:
        """An admission."""
        return self.make_admission()

    @pytest.fixture
    def facts(self) -> WriteFacts:
        """Facts of many pages."""
        rng = np.random.default_rng(3)
        return WriteFacts(
            tier=TierId.DISK,
            num_sightings=rng.integers(0, 3, size=400).astype(np.uint8),
            reuse_rates=rng.random(400) ** 3,
        )

    def test_has_the_interface(self, admission: WriteAdmission) -> None:
        """It is a WriteAdmission with a name that a flag can spell."""
        assert isinstance(admission, WriteAdmission)
        assert admission.name
        assert admission.name == admission.name.lower().strip()

    def test_answers_page_by_page(
        self, admission: WriteAdmission, facts: WriteFacts
    ) -> None:
        """One bool per page, the same for a page alone and among others."""
        answers = admission.admit(facts)
        assert answers.dtype == np.bool_
        assert answers.shape == facts.num_sightings.shape
        for page in range(0, 400, 7):
            alone = replace(
                facts,
                num_sightings=facts.num_sightings[page : page + 1],
                reuse_rates=facts.reuse_rates[page : page + 1],
            )
            assert admission.admit(alone).tolist() == [answers[page]]

    def test_equal_facts_have_equal_answers(
        self, admission: WriteAdmission, facts: WriteFacts
    ) -> None:
        """Asked twice, and of another object: replays are equal."""
        answers = admission.admit(facts)
        assert (admission.admit(facts) == answers).all()
        assert (self.make_admission().admit(facts) == answers).all()

    def test_a_sighting_never_takes_an_admission_back(
        self, admission: WriteAdmission, facts: WriteFacts
    ) -> None:
        """Nor does a higher rate of reuse."""
        answers = admission.admit(facts)
        seen = replace(facts, num_sightings=np.minimum(facts.num_sightings + 1, 2))
        reused = replace(facts, reuse_rates=np.minimum(facts.reuse_rates + 0.2, 1.0))
        for better in (seen, reused):
            assert not (answers & ~admission.admit(better)).any()

    def test_something_is_written(
        self, admission: WriteAdmission, facts: WriteFacts
    ) -> None:
        """What was seen twice and lies where all is reused is not refused."""
        best = replace(
            facts,
            num_sightings=np.full(400, 2, np.uint8),
            reuse_rates=np.ones(400),
        )
        assert admission.admit(best).all()

    def test_without_a_look_the_facts_do_not_matter(
        self, admission: WriteAdmission, facts: WriteFacts
    ) -> None:
        """Where ``needs_sightings`` is False the cache gathers nothing."""
        if not admission.needs_sightings:
            nothing = replace(
                facts,
                num_sightings=np.zeros(400, np.uint8),
                reuse_rates=np.zeros(400),
            )
            assert (admission.admit(nothing) == admission.admit(facts)).all()


def _random_queue(
    rng: np.random.Generator, num_waiting: int, now_s: float, first: int = 0
) -> list[WaitingFacts]:
    arrivals = np.sort(rng.uniform(0.0, now_s, size=num_waiting))
    queue = []
    for number, arrival_s in enumerate(arrivals.tolist()):
        num_prompt = int(rng.integers(1, 20_000))
        location = list(Location)[int(rng.integers(len(Location)))]
        is_new = location is Location.NOWHERE
        num_uncached = num_prompt if is_new else int(rng.integers(1, num_prompt + 1))
        queue.append(
            WaitingFacts(
                index=first + number,
                arrival_s=arrival_s,
                location=location,
                num_prompt_tokens=num_prompt,
                num_uncached_tokens=num_uncached,
                service_s=float(num_uncached * 3e-5 + 2e-3),
                has_history=not is_new or bool(rng.integers(2)),
            )
        )
    return queue


class RequestOrderKit:
    """What a scheduler relies on, whatever an order prefers.

    Set ``max_overtaking`` where the order bounds it: how many later arrivals are served
    before a request at most.
    """

    max_overtaking: int | None = None

    def make_order(self) -> RequestOrder:
        """Return a new order; the one method to write."""
        raise NotImplementedError

    def test_has_the_interface(self) -> None:
        """It is a RequestOrder with a name that a flag can spell."""
        order = self.make_order()
        assert isinstance(order, RequestOrder)
        assert order.name
        assert order.name == order.name.lower().strip()

    @pytest.mark.parametrize("num_waiting", [0, 1, 2, 33, 300])
    def test_arranges_everybody_once(self, num_waiting: int) -> None:
        """A permutation, pass after pass, whoever was served in between."""
        order, rng = self.make_order(), np.random.default_rng(num_waiting)
        queue = _random_queue(rng, num_waiting, 10.0)
        for pass_number in range(5):
            arranged = order.arrange(queue, 10.0 + pass_number, pass_number)
            assert sorted(arranged) == list(range(len(queue)))
            served = set(arranged[: int(rng.integers(4))])
            queue = [facts for i, facts in enumerate(queue) if i not in served]

    def test_equals_go_by_arrival(self) -> None:
        """Among requests that are alike nobody is overtaken."""
        order = self.make_order()
        one = _random_queue(np.random.default_rng(1), 1, 1.0)[0]
        queue = [
            replace(one, index=number, arrival_s=number * 0.01) for number in range(50)
        ]
        assert order.arrange(queue, 60.0, 1) == list(range(50))

    def test_equal_histories_give_equal_arrangements(self) -> None:
        """Two objects that saw the same agree, so that ranks and replays do."""
        one, two = self.make_order(), self.make_order()
        rng = np.random.default_rng(7)
        queue = _random_queue(rng, 60, 10.0)
        for pass_number in range(8):
            arranged = one.arrange(queue, 10.0 + pass_number, pass_number)
            assert two.arrange(queue, 10.0 + pass_number, pass_number) == arranged
            served = set(arranged[:3])
            queue = [facts for i, facts in enumerate(queue) if i not in served]

    def test_the_only_one_goes_first(self) -> None:
        """Nothing is held back by an order."""
        order = self.make_order()
        for facts in _random_queue(np.random.default_rng(3), 20, 1.0):
            assert order.arrange([facts], 2.0 + facts.index, facts.index) == [0]

    def test_overtaking_is_bounded(self) -> None:
        """Nobody is served after more later arrivals than the order allows."""
        if self.max_overtaking is None:
            return
        rng = np.random.default_rng(11)
        worst = most_overtaken(self.make_order(), rng, num_arrivals=600)
        assert worst <= self.max_overtaking


def most_overtaken(
    order: RequestOrder,
    rng: np.random.Generator,
    *,
    num_arrivals: int,
    serve: Sequence[int] = (0, 1, 1, 2, 5),
    join: Sequence[int] = (0, 1, 1, 2, 5, 20),
) -> int:
    """Serve a random queue in an order; return by how many later ones at most any
    request was overtaken.

    Args:
        order: under test.
        rng: draws the requests, how many join and how many are served per pass.
        num_arrivals: requests in all.
        serve, join: numbers per pass, drawn from.
    """
    now_s, joined, pass_number, worst = 0.0, 0, 0, 0
    queue: list[WaitingFacts] = []
    overtaken: dict[int, int] = {}
    while joined < num_arrivals or queue:
        pass_number += 1
        now_s += float(rng.exponential(0.1))
        num_new = min(int(rng.choice(join)), num_arrivals - joined)
        fresh = _random_queue(rng, num_new, 1.0, first=joined)
        queue += [replace(facts, arrival_s=now_s) for facts in fresh]
        overtaken |= {facts.index: 0 for facts in fresh}
        joined += num_new
        arranged = order.arrange(queue, now_s, pass_number)
        served = [queue[i].index for i in arranged[: int(rng.choice(serve))]]
        for index in served:
            worst = max(worst, overtaken.pop(index))
            for other in overtaken:
                overtaken[other] += other < index
        queue = [facts for facts in queue if facts.index in overtaken]
    return worst
