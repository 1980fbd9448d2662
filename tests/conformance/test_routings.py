"""Our own routing policies pass the published kit; one that should not is caught."""

from __future__ import annotations

import pytest

from sgl_tiered.policies.routing.base import RoutingPolicy
from sgl_tiered.policies.routing.registry import ROUTINGS, make_routing
from sgl_tiered.testing.routing_kit import RoutingPolicyKit


class TestLeastLoad(RoutingPolicyKit):
    """least-load."""

    def make_routing(self) -> RoutingPolicy:
        return make_routing("least-load")


class TestSession(RoutingPolicyKit):
    """session."""

    def make_routing(self) -> RoutingPolicy:
        return make_routing("session")


class TestPromptTree(RoutingPolicyKit):
    """prompt-tree."""

    def make_routing(self) -> RoutingPolicy:
        return make_routing("prompt-tree")


class Remembers(RoutingPolicyKit):
    """One that takes turns by itself, so that replicas would disagree."""

    def make_routing(self) -> RoutingPolicy:
        class Routing:
            name = "remembers"
            turn = 0

            def rank(self, request, instances):
                self.turn += 1
                num = len(instances)
                return tuple((i + self.turn) % num for i in range(num))

        return Routing()


def test_the_kit_catches_a_policy_with_a_memory() -> None:
    """Equal facts must give equal answers."""
    with pytest.raises(AssertionError):
        Remembers().test_equal_facts_give_equal_answers()


def test_every_policy_is_under_the_kit() -> None:
    """Whoever adds one adds a subclass."""
    here = {
        kit().make_routing().name
        for kit in (TestLeastLoad, TestSession, TestPromptTree)
    }
    assert here == set(ROUTINGS)
