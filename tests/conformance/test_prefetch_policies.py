"""Our own prefetch policies pass the published kit; CaR's rule by hand."""

from __future__ import annotations

import math

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.prefetch.base import Decoding, PrefetchPolicy, QueueFacts
from sgl_tiered.policies.prefetch.car import releases_s
from sgl_tiered.policies.prefetch.registry import (
    PREFETCH_POLICIES,
    make_prefetch_policy,
)
from sgl_tiered.testing.prefetch_kit import PrefetchPolicyKit


class TestNone(PrefetchPolicyKit):
    """none."""

    def make_policy(self) -> PrefetchPolicy:
        return make_prefetch_policy("none")


class TestArrival(PrefetchPolicyKit):
    """arrival."""

    def make_policy(self) -> PrefetchPolicy:
        return make_prefetch_policy("arrival")


class TestCar(PrefetchPolicyKit):
    """car."""

    def make_policy(self) -> PrefetchPolicy:
        return make_prefetch_policy("car")


@pytest.mark.parametrize("name", PREFETCH_POLICIES)
def test_every_registered_policy_has_a_kit(name: str) -> None:
    """A policy that a flag can name is checked above."""
    kits = PrefetchPolicyKit.__subclasses__()
    assert name in {kit().make_policy().name for kit in kits}


def test_an_unknown_name_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match="arrival"):
        make_prefetch_policy("soon")


def test_releases_are_cars_terms() -> None:
    """TPOT * len_i - (t - timer_i), smallest first; what is overdue ends now."""
    decoding = [Decoding(100, 1.0), Decoding(50, 0.5), Decoding(10, 2.0)]
    assert releases_s(0.02, decoding) == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize(("load_s", "is_due"), [(0.29, False), (0.31, True)])
def test_one_request_is_read_by_cars_rule(load_s: float, is_due: bool) -> None:
    """Due as soon as the first release is not later than the read would end."""
    policy = make_prefetch_policy("car")
    facts = QueueFacts(
        services_s=(0.1,),
        is_blocked=True,
        tpot_s=0.01,
        decoding=(Decoding(50, 0.2), Decoding(90, 0.2)),
    )
    starts_s = policy.starts_s(facts)
    assert starts_s == pytest.approx((0.3,))
    assert (policy.due_in_s(starts_s, [load_s])[0] <= 0.0) == is_due


def test_the_whole_window_shares_the_link() -> None:
    """Two short reads are not due alone, but the second must not make the first late:

    both have to be over when the second request starts.
    """
    policy = make_prefetch_policy("car")
    assert policy.due_in_s([1.0, 1.1], [0.2, 0.0]) == (pytest.approx(0.8), math.inf)
    both = policy.due_in_s([1.0, 1.1], [0.6, 0.6])
    assert both == pytest.approx((-0.1, -0.1))


def test_nobody_has_to_end_where_the_next_pass_takes_the_head() -> None:
    """Then a request waits for the passes over those ahead of it only."""
    policy = make_prefetch_policy("car")
    facts = QueueFacts(
        services_s=(0.1, 0.2, 0.3),
        busy_s=0.5,
        is_blocked=False,
        tpot_s=0.01,
        decoding=(Decoding(500, 0.0),),
    )
    assert policy.starts_s(facts) == pytest.approx((0.5, 0.6, 0.8))
