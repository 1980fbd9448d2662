"""Conformance kit for routing policies: subclass it in a pytest module.

Example:
    class TestMyRouting(RoutingPolicyKit):
        def make_routing(self):
            return MyRouting()
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sgl_tiered.policies.routing.base import (
    NUM_PLACES,
    FleetFacts,
    InstanceFacts,
    RequestFacts,
    RoutingPolicy,
)

__all__ = ["RoutingPolicyKit", "random_instances"]

_NUM_DRAWS = 50


def random_instances(
    rng: np.random.Generator, num_instances: int, num_tokens: int
) -> list[InstanceFacts]:
    """Return instances that hold, and have to do, this or that."""
    instances = []
    for number in range(num_instances):
        cuts = np.sort(rng.integers(0, num_tokens + 1, size=NUM_PLACES))
        cached = np.diff(cuts, prepend=0) * int(rng.integers(2))
        instances.append(
            InstanceFacts(
                name=f"i{number}",
                cached_tokens=tuple(int(n) for n in cached),
                confirmed_tokens=int(cached[0]),
                waiting_tokens=int(rng.integers(0, 20_000)),
                num_running=int(rng.integers(0, 40)),
            )
        )
    return instances


class RoutingPolicyKit:
    """What the router relies on, whatever a policy prefers."""

    def make_routing(self) -> RoutingPolicy:
        """Return a new policy; the one method to write."""
        raise NotImplementedError

    def test_has_the_interface(self) -> None:
        """It is a RoutingPolicy with a name that a flag can spell."""
        routing = self.make_routing()
        assert isinstance(routing, RoutingPolicy)
        assert routing.name == routing.name.strip().lower()
        assert routing.name

    def test_ranks_everyone_once(self) -> None:
        """A request that fails on the first can go on to any of the others."""
        rng = np.random.default_rng(0)
        for draw in range(_NUM_DRAWS):
            num = int(rng.integers(0, 9))
            request = RequestFacts(1000, f"s{draw % 3}" if draw % 2 else "", draw)
            ranked = self.make_routing().rank(request, random_instances(rng, num, 1000))
            assert sorted(ranked) == list(range(num))

    def test_the_best_is_the_first_of_the_ranking(self) -> None:
        """On columns as by the definition, ties included."""
        rng = np.random.default_rng(3)
        routing = self.make_routing()
        for draw in range(4 * _NUM_DRAWS):
            num = int(rng.integers(1, 9))
            instances = random_instances(rng, num, 1000)
            if draw % 2:  # few different loads and prefixes: ties
                instances = [
                    replace(
                        instances[int(rng.integers(2)) % num],
                        name=each.name,
                        waiting_tokens=1000 * int(rng.integers(2)),
                        num_running=0,
                    )
                    for each in instances
                ]
            request = RequestFacts(1000, f"s{draw % 3}" if draw % 4 < 2 else "", draw)
            best = routing.best(request, FleetFacts.of(instances))
            assert best == routing.rank(request, instances)[0]

    def test_equal_facts_give_equal_answers(self) -> None:
        """Replicas that know the same decide the same; nothing is remembered."""
        rng = np.random.default_rng(1)
        used = self.make_routing()
        for draw in range(_NUM_DRAWS):
            instances = random_instances(rng, 5, 1000)
            request = RequestFacts(1000, f"s{draw % 3}", draw)
            fresh = self.make_routing().rank(request, instances)
            assert used.rank(request, instances) == fresh

    def test_more_load_never_moves_an_instance_up(self) -> None:
        """Work added to an instance does not make it more wanted."""
        rng = np.random.default_rng(2)
        routing = self.make_routing()
        for draw in range(_NUM_DRAWS):
            instances = random_instances(rng, 5, 1000)
            request = RequestFacts(1000, f"s{draw % 3}" if draw % 2 else "", draw)
            before = routing.rank(request, instances).index(0)
            busier = replace(
                instances[0],
                waiting_tokens=instances[0].waiting_tokens + 5000,
                num_running=instances[0].num_running + 3,
            )
            after = routing.rank(request, [busier, *instances[1:]]).index(0)
            assert after >= before
