"""Conformance kits for policies: subclass them in a pytest module.

Example:
    class TestMyPolicy(EvictionPolicyKit):
        def make_policy(self, rng):
            return MyPolicy()
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy
from sgl_tiered.policies.length.base import LengthFacts, LengthPredictor
from sgl_tiered.policies.write_admission.base import WriteAdmission, WriteFacts

__all__ = ["EvictionPolicyKit", "LengthPredictorKit", "WriteAdmissionKit"]


def _random_facts(rng: np.random.Generator) -> EvictionFacts:
    inserted = int(rng.integers(1, 10_000))
    accessed = inserted + int(rng.integers(0, 10_000))
    queued = max(0, int(rng.integers(-3, 4)))
    return EvictionFacts(
        tier=TierId(int(rng.choice([TierId.HOST, TierId.DISK]))),
        num_pages=int(rng.integers(1, 1000)),
        last_access_s=accessed * 0.1,
        inserted_s=inserted * 0.1,
        access_sequence=accessed,
        insert_sequence=inserted,
        num_hits=int(rng.integers(0, 20)),
        score=float(rng.integers(0, 4)),
        queued=queued,
        next_use=float(rng.integers(1, 100_000)) if queued else math.inf,
        worth=float(rng.random()) * 1e-3,
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
        """Access, hit, score, worth and queue protect, or do nothing."""
        for item in facts:
            used = replace(
                item,
                last_access_s=item.last_access_s + 1.0,
                access_sequence=item.access_sequence + 1,
            )
            hit = replace(item, num_hits=item.num_hits + 1)
            scored = replace(item, score=item.score + 1.0)
            worthier = replace(item, worth=item.worth * 2)
            sooner = min(item.next_use, 100_000.0) - 1.0
            wanted = replace(item, queued=item.queued + 1, next_use=sooner)
            for better in (used, hit, scored, worthier, wanted):
                assert policy.priority(better) >= policy.priority(item)

    def test_what_it_does_not_need_does_not_matter(
        self, policy: EvictionPolicy, facts: list[EvictionFacts]
    ) -> None:
        """Where ``needs_queue`` or ``needs_reuse`` is False nobody gathers the
        facts."""
        for item in facts:
            bare = item
            if not policy.needs_queue:
                bare = replace(bare, score=0.0, queued=0, next_use=math.inf)
            if not policy.needs_reuse:
                bare = replace(bare, worth=0.0)
            assert policy.priority(bare) == policy.priority(item)

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
            comes_again=False,
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
        """Nor does a higher rate of reuse, nor other prompts that come again."""
        answers = admission.admit(facts)
        seen = replace(facts, num_sightings=np.minimum(facts.num_sightings + 1, 2))
        reused = replace(facts, reuse_rates=np.minimum(facts.reuse_rates + 0.2, 1.0))
        for better in (seen, reused, replace(facts, comes_again=True)):
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


class LengthPredictorKit:
    """What admission and forecasts rely on, whatever a predictor believes."""

    def make_predictor(self) -> LengthPredictor:
        """Return a new predictor; the one method to write."""
        raise NotImplementedError

    @pytest.fixture
    def predictor(self) -> LengthPredictor:
        """A predictor that has seen nothing."""
        return self.make_predictor()

    @pytest.fixture
    def answers(self) -> list[tuple[LengthFacts, int]]:
        """Requests and the lengths of their answers, some cut at their allowance."""
        rng = np.random.default_rng(4)
        answers = []
        for _ in range(300):
            length = int(rng.lognormal(5.0, 1.5)) + 1
            facts = LengthFacts(
                num_prompt_tokens=int(rng.integers(1, 100_000)),
                max_new_tokens=int(rng.choice([1, 64, 512, 4096, 1 << 30])),
                group=str(rng.choice(["", "a", "b"])),
                said_tokens=int(rng.choice([0, 1, length, 3 * length, 1 << 40])),
            )
            answers.append((facts, min(length, facts.max_new_tokens)))
        return answers

    def test_has_the_interface(self, predictor: LengthPredictor) -> None:
        """It is a LengthPredictor with a name that a flag can spell."""
        assert isinstance(predictor, LengthPredictor)
        assert predictor.name
        assert predictor.name == predictor.name.lower().strip()

    def test_keeps_its_bounds(
        self, predictor: LengthPredictor, answers: list[tuple[LengthFacts, int]]
    ) -> None:
        """Never below what is out, never above the allowance, before and after."""
        rng = np.random.default_rng(5)
        for facts, length in answers:
            for done in (0, int(rng.integers(0, length + 1)), length, 1 << 20):
                found = predictor.predict(facts, done)
                assert done + 1 <= found.lower <= found.median <= found.upper
                assert found.upper <= max(facts.max_new_tokens, done + 1)
            predictor.observe(facts, length)

    def test_a_prediction_is_for_ints(
        self, predictor: LengthPredictor, answers: list[tuple[LengthFacts, int]]
    ) -> None:
        """Tokens are whole numbers, and no numpy value reaches a message or a file."""
        for facts, length in answers[:50]:
            found = predictor.predict(facts)
            for value in (found.lower, found.median, found.upper):
                assert type(value) is int
            predictor.observe(facts, length)

    def test_bounds_do_not_fall_while_the_answer_grows(
        self, predictor: LengthPredictor, answers: list[tuple[LengthFacts, int]]
    ) -> None:
        """More tokens out never make a shorter answer likelier."""
        for facts, length in answers:
            predictor.observe(facts, length)
        for facts, _ in answers[:30]:
            found = [predictor.predict(facts, done) for done in range(0, 600, 7)]
            for before, after in pairwise(found):
                assert before.lower <= after.lower
                assert before.median <= after.median
                assert before.upper <= after.upper

    def test_asking_teaches_nothing(
        self, predictor: LengthPredictor, answers: list[tuple[LengthFacts, int]]
    ) -> None:
        """Equal observations give equal predictions, however often it was asked."""
        other = self.make_predictor()
        for number, (facts, length) in enumerate(answers):
            for done in range(0, length, 50):
                other.predict(answers[number // 2][0], done)
            predictor.observe(facts, length)
            other.observe(facts, length)
        for facts, length in answers:
            for done in (0, length // 2):
                assert predictor.predict(facts, done) == other.predict(facts, done)
