"""Our own eviction policies pass the published kit."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.policies.eviction.base import EvictionPolicy
from sgl_tiered.policies.eviction.registry import (
    EVICTION_POLICIES,
    make_eviction_policy,
)
from sgl_tiered.testing.policy_kit import EvictionPolicyKit


class TestLRU(EvictionPolicyKit):
    """lru."""

    def make_policy(self, rng: np.random.Generator) -> EvictionPolicy:
        return make_eviction_policy("lru", rng)


class TestFIFO(EvictionPolicyKit):
    """fifo."""

    def make_policy(self, rng: np.random.Generator) -> EvictionPolicy:
        return make_eviction_policy("fifo", rng)


class TestRandom(EvictionPolicyKit):
    """random."""

    def make_policy(self, rng: np.random.Generator) -> EvictionPolicy:
        return make_eviction_policy("random", rng)


class TestScore(EvictionPolicyKit):
    """score."""

    def make_policy(self, rng: np.random.Generator) -> EvictionPolicy:
        return make_eviction_policy("score", rng)


class TestCost(EvictionPolicyKit):
    """cost."""

    def make_policy(self, rng: np.random.Generator) -> EvictionPolicy:
        return make_eviction_policy("cost", rng)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_every_registered_policy_has_a_kit(name: str) -> None:
    """A policy that a flag can name is checked above."""
    kits = EvictionPolicyKit.__subclasses__()
    rng = np.random.default_rng(0)
    assert name in {kit().make_policy(rng).name for kit in kits}
