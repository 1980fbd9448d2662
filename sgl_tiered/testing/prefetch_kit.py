"""Conformance kit for prefetch policies: subclass it in a pytest module.

Example:
    class TestMyPrefetch(PrefetchPolicyKit):
        def make_policy(self):
            return MyPrefetch()
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from sgl_tiered.policies.prefetch.base import Decoding, PrefetchPolicy, QueueFacts

__all__ = ["PrefetchPolicyKit"]


def _random_queue(rng: np.random.Generator) -> QueueFacts:
    services = rng.random(int(rng.integers(0, 20))) * rng.choice([0.01, 1.0])
    decoding = tuple(
        Decoding(int(rng.integers(1, 500)), float(rng.random() * 10))
        for _ in range(int(rng.integers(0, 6)))
    )
    return QueueFacts(
        services_s=tuple(services.tolist()),
        busy_s=float(rng.choice([0.0, rng.random()])),
        is_blocked=bool(rng.integers(2)),
        tpot_s=float(rng.choice([0.0, rng.random() * 0.1])),
        decoding=decoding,
    )


class PrefetchPolicyKit:
    """What the prefetcher relies on, whenever a policy wants to read."""

    def make_policy(self) -> PrefetchPolicy:
        """Return a new object; the one method to write."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> PrefetchPolicy:
        """A policy."""
        return self.make_policy()

    @pytest.fixture
    def queues(self) -> list[QueueFacts]:
        """Facts of many queues."""
        rng = np.random.default_rng(4)
        return [_random_queue(rng) for _ in range(200)]

    def test_has_the_interface(self, policy: PrefetchPolicy) -> None:
        """It is a PrefetchPolicy with a name that a flag can spell."""
        assert isinstance(policy, PrefetchPolicy)
        assert policy.name
        assert policy.name == policy.name.lower().strip()
        assert not (policy.at_arrival and policy.looks_ahead)

    def test_starts_are_in_the_order_of_the_queue(
        self, policy: PrefetchPolicy, queues: list[QueueFacts]
    ) -> None:
        """One start per waiting request, none in the past, none before its elder's."""
        for queue in queues:
            starts_s = policy.starts_s(queue)
            assert len(starts_s) == len(queue.services_s)
            assert list(starts_s) == sorted(starts_s)
            assert all(start_s >= 0.0 for start_s in starts_s)

    def test_reads_are_due_in_the_order_of_the_queue(
        self, policy: PrefetchPolicy, queues: list[QueueFacts]
    ) -> None:
        """One time per waiting request; never for those who have nothing to read."""
        rng = np.random.default_rng(5)
        for queue in queues:
            starts_s = policy.starts_s(queue)
            loads_s = (rng.random(len(starts_s)) * rng.integers(0, 2)).tolist()
            due_s = policy.due_in_s(starts_s, loads_s)
            assert len(due_s) == len(starts_s)
            assert list(due_s) == sorted(due_s)
            nothing = policy.due_in_s(starts_s, [0.0] * len(starts_s))
            assert all(math.isinf(time_s) for time_s in nothing)

    def test_a_longer_read_is_never_due_later(
        self, policy: PrefetchPolicy, queues: list[QueueFacts]
    ) -> None:
        """Nor is one whose request starts earlier."""
        rng = np.random.default_rng(6)
        for queue in queues:
            starts_s = policy.starts_s(queue)
            loads_s = (rng.random(len(starts_s)) + 0.01).tolist()
            due_s = policy.due_in_s(starts_s, loads_s)
            longer = policy.due_in_s(starts_s, [2.0 * load_s for load_s in loads_s])
            earlier = policy.due_in_s([s - 0.5 for s in starts_s], loads_s)
            for time_s, other_s in zip(due_s, longer, strict=True):
                assert other_s <= time_s
            for time_s, other_s in zip(due_s, earlier, strict=True):
                assert other_s <= time_s

    def test_equal_facts_have_equal_answers(
        self, policy: PrefetchPolicy, queues: list[QueueFacts]
    ) -> None:
        """Asked twice, and of another object: replays and ranks agree."""
        for queue in queues:
            starts_s = policy.starts_s(queue)
            assert policy.starts_s(queue) == starts_s
            assert self.make_policy().starts_s(queue) == starts_s
