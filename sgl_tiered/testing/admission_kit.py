"""Conformance kit for admissions: subclass it in a pytest module.

Example:
    class TestMyAdmission(AdmissionKit):
        def make_admission(self):
            return MyAdmission()
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    AdmissionPolicy,
    CandidateFacts,
    QueueFacts,
    RunningFacts,
)
from sgl_tiered.policies.length.base import LengthPrediction

__all__ = ["AdmissionKit"]


def _decoders(rng: np.random.Generator, num: int) -> list[RunningFacts]:
    found = []
    for index in range(num):
        past = int(rng.integers(0, 200))
        lower = past + int(rng.integers(1, 100))
        median = lower + int(rng.integers(0, 100))
        found.append(
            RunningFacts(
                rid=f"d{index}",
                num_past_tokens=past,
                past_s=past * float(rng.uniform(0.01, 0.06)),
                tpot_slo_s=float(rng.choice([0.03, 0.05, NO_TARGET])),
                prediction=LengthPrediction(lower, median, median + 50),
            )
        )
    return found


def _candidates(rng: np.random.Generator, num: int) -> list[CandidateFacts]:
    return [
        CandidateFacts(
            rid=f"c{index}",
            waited_s=float(rng.uniform(0.0, 5.0)),
            ttft_slo_s=float(rng.choice([1.0, 3.0, NO_TARGET])),
            prefill_s=float(rng.uniform(0.01, 2.0)),
            is_resumed=bool(rng.random() < 0.1),
        )
        for index in range(num)
    ]


def _queue(admission: AdmissionPolicy, candidates: list[CandidateFacts]) -> QueueFacts:
    return QueueFacts(
        [one.rid for one in candidates],
        np.array([admission.due_s(one) for one in candidates]),
        np.array([one.ttft_slo_s for one in candidates]),
        np.array([one.prefill_s for one in candidates]),
    )


class AdmissionKit:
    """What an engine relies on, whatever an admission protects."""

    def make_admission(self) -> AdmissionPolicy:
        """Return a new policy; the one method to write."""
        raise NotImplementedError

    @pytest.fixture
    def admission(self) -> AdmissionPolicy:
        """A policy."""
        return self.make_admission()

    def answers(
        self, admission: AdmissionPolicy, *, num_decoders: int = 20
    ) -> list[float]:
        """Return what it says in some passes, each candidate taken if it may be."""
        rng = np.random.default_rng(11)
        found = []
        for turn in range(30):
            running = _decoders(rng, num_decoders)
            admission.begin_pass(running, lambda n: 0.02 + 0.001 * n, turn * 0.5)
            candidates = _candidates(rng, 10)
            admission.see_queue(_queue(admission, candidates))
            for candidate in candidates:
                allowed_s = admission.judge(candidate)
                found.append(allowed_s)
                if candidate.prefill_s < allowed_s:
                    admission.took(candidate, candidate.prefill_s)
        return found

    def test_has_the_interface(self, admission: AdmissionPolicy) -> None:
        """It is an AdmissionPolicy with a name that a flag can spell."""
        assert isinstance(admission, AdmissionPolicy)
        assert admission.name
        assert admission.name == admission.name.lower().strip()

    def test_nothing_is_held_while_nothing_decodes(
        self, admission: AdmissionPolicy
    ) -> None:
        """An idle device helps nobody, and a loop that holds all would spin."""
        assert set(self.answers(admission, num_decoders=0)) == {NO_TARGET}

    def test_nothing_is_held_for_those_without_a_target(
        self, admission: AdmissionPolicy
    ) -> None:
        """Who has no TPOT target cannot miss it."""
        running = [
            replace(facts, tpot_slo_s=NO_TARGET)
            for facts in _decoders(np.random.default_rng(3), 30)
        ]
        admission.begin_pass(running, lambda n: 0.02, 0.0)
        for candidate in _candidates(np.random.default_rng(4), 30):
            assert admission.judge(candidate) == NO_TARGET
            admission.took(candidate, candidate.prefill_s)

    def test_same_calls_give_the_same_answers(self) -> None:
        """Replays are equal, and ranks that see the same decide the same."""
        assert self.answers(self.make_admission()) == self.answers(
            self.make_admission()
        )

    def test_what_was_taken_leaves_less(self, admission: AdmissionPolicy) -> None:
        """Within a pass each prompt has what the ones before it left."""
        running = [
            replace(facts, tpot_slo_s=0.05)
            for facts in _decoders(np.random.default_rng(5), 3)
        ]
        admission.begin_pass(running, lambda n: 0.01, 0.0)
        before = NO_TARGET
        for candidate in _candidates(np.random.default_rng(6), 20):
            fresh = replace(candidate, waited_s=0.0, ttft_slo_s=1e6, is_resumed=False)
            left_s = admission.judge(fresh)
            assert left_s <= before
            before = left_s
            admission.took(fresh, 0.01)

    def test_nobody_waits_for_ever(self, admission: AdmissionPolicy) -> None:
        """Whoever has waited very long is due, and is let in before long."""
        late = CandidateFacts("late", 1e5, 1.0, 0.1)
        if not admission.needs_facts:
            return
        assert admission.due_s(late) <= 0.0
        running = [
            RunningFacts("d", 10, 1.0, 0.2, LengthPrediction(20, 30, 40))
            for _ in range(5)
        ]
        for turn in range(100):
            admission.begin_pass(running, lambda n: 0.19, 1e5 + turn * 0.2)
            if admission.judge(late) > late.prefill_s:
                return
        raise AssertionError("it was held in 100 passes")
