"""Routing policies by tables; what all keep to is in ``tests/conformance``."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.routing.base import (
    PLACES,
    FleetFacts,
    InstanceFacts,
    RequestFacts,
)
from sgl_tiered.policies.routing.holders import Holder, holders_of_more
from sgl_tiered.policies.routing.prompt_tree import PromptTreeRouting
from sgl_tiered.policies.routing.registry import make_routing


def instance(name: str, waiting: int = 0, running: int = 0, **cached: int):
    row = tuple(cached.get(place, 0) for place in PLACES)
    confirmed = sum(row) - cached.get("assumed", 0)
    return InstanceFacts(name, row, confirmed, waiting, running)


def names(policy, request, instances) -> str:
    return "".join(instances[i].name for i in policy.rank(request, instances))


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(0, 0), (100, 0), (50, 0)], "acb"),
        ([(0, 1), (65, 0), (63, 0)], "cab"),  # one that runs counts 64
        ([(0, 2), (0, 1), (0, 0)], "cba"),
    ],
)
def test_least_load_looks_at_the_load_only(loads, expected) -> None:
    """Waiting tokens, and 64 for each request under way."""
    instances = [
        instance(name, waiting, running, device=1000 if name == "b" else 0)
        for name, (waiting, running) in zip("abc", loads, strict=True)
    ]
    policy = make_routing("least-load")
    assert names(policy, RequestFacts(1000), instances) == expected


@pytest.mark.parametrize("policy", ["least-load", "prompt-tree"])
def test_equals_take_turns(policy) -> None:
    """A tie is a round robin."""
    instances = [instance(name) for name in "abc"]
    firsts = [
        names(make_routing(policy), RequestFacts(10, turn=turn), instances)[0]
        for turn in range(6)
    ]
    assert firsts == list("abcabc")


def test_a_session_stays_and_only_those_of_a_lost_instance_move() -> None:
    """Rendezvous hashing: minimal disruption, and every instance has a share."""
    policy = make_routing("session")
    instances = [instance(name, waiting=10_000 * (name == "a")) for name in "abcd"]
    homes = {
        f"s{n}": names(policy, RequestFacts(10, f"s{n}", turn=n), instances)[0]
        for n in range(400)
    }
    shares = Counter(homes.values())
    assert set(shares) == set("abcd")
    assert min(shares.values()) > 50
    for session, home in homes.items():
        moved = names(policy, RequestFacts(10, session), instances[:-1])[0]
        assert moved == home or home == "d"
        back = names(policy, RequestFacts(10, session), instances[::-1])[0]
        assert back == home


def test_a_request_without_a_session_goes_where_the_load_is_least() -> None:
    """There is nothing to stay with."""
    instances = [instance("a", waiting=5), instance("b")]
    assert names(make_routing("session"), RequestFacts(10), instances) == "ba"


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        # the paper's rule: the longest prefix
        ([instance("a"), instance("b", device=512), instance("c", device=800)], "cba"),
        # a faster tier wins over a slower one of the same length
        ([instance("a", disk=800), instance("b", host=800)], "ba"),
        # but not over a much longer prefix
        ([instance("a", disk=1000), instance("b", device=300)], "ab"),
        # a wait that is longer than what the prefix saves
        ([instance("a", waiting=1700, device=800), instance("b")], "ba"),
        ([instance("a", waiting=1500, device=800), instance("b")], "ab"),
        # what was sent there counts nearly as much as what is there
        ([instance("a", assumed=800), instance("b", device=800)], "ba"),
        ([instance("a", assumed=800), instance("b", device=700)], "ab"),
    ],
)
def test_the_prompt_tree_weighs_prefix_tier_and_load(instances, expected) -> None:
    """The least work ahead of the first token wins."""
    assert names(make_routing("prompt-tree"), RequestFacts(1000), instances) == expected


def test_a_prompt_that_is_being_computed_is_waited_for() -> None:
    """Computing it a second time would delay others."""
    computing = instance("a", waiting=1024, running=1, assumed=1024)
    request = RequestFacts(1034)
    for cost, expected in ((1.0, "ba"), (2.0, "ab")):
        policy = make_routing("prompt-tree", compute_cost=cost)
        assert names(policy, request, [computing, instance("b")]) == expected


def test_credits_are_the_users_to_set() -> None:
    """A disk that is as good as the device is one."""
    instances = [instance("a", disk=800), instance("b", device=700)]
    request = RequestFacts(1000)
    assert names(PromptTreeRouting(), request, instances) == "ba"
    assert names(PromptTreeRouting({"disk": 1.0}), request, instances) == "ab"


@pytest.mark.parametrize("credits", [{"moon": 1.0}, {"disk": 1.5}, {"disk": -0.1}])
def test_wrong_credits_are_refused(credits) -> None:
    """A place that is not known, or a share outside 0 to 1."""
    with pytest.raises(ConfigError):
        PromptTreeRouting(credits)


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    """The sentence lists them."""
    with pytest.raises(ConfigError, match=r"least-load, session, prompt-tree"):
        make_routing("best")


def test_holders_of_more_are_named_most_first() -> None:
    """Confirmed prefixes longer than the chosen one's, with their slowest tier."""
    instances = [
        instance("a", device=100),
        instance("b", device=300, disk=10),
        instance("c", device=500),
        instance("d", device=100),
        instance("e", device=50, assumed=900),
    ]
    fleet = FleetFacts.of(instances)
    assert holders_of_more(fleet, 0) == (
        Holder(2, 500, "device"),
        Holder(1, 310, "disk"),
    )
    assert holders_of_more(fleet, 0, limit=1) == (Holder(2, 500, "device"),)
    assert holders_of_more(fleet, 2) == ()


def test_facts_are_the_same_by_columns_and_one_by_one() -> None:
    """Back and forth, and for some of them."""
    instances = [
        instance("a", waiting=5),
        instance("b", running=2, device=30, disk=10),
        instance("c", assumed=7),
        instance("d"),
    ]
    fleet = FleetFacts.of(instances)
    assert [fleet.instance(at) for at in range(4)] == instances
    some = fleet.take(np.array([0, 2, 3]))
    assert [some.instance(at) for at in range(3)] == [instances[i] for i in (0, 2, 3)]
