"""What each eviction policy prefers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.base import EvictionFacts
from sgl_tiered.policies.eviction.registry import (
    EVICTION_POLICIES,
    make_eviction_policy,
)

OLD = EvictionFacts(
    tier=TierId.HOST,
    num_pages=3,
    last_access_s=10.0,
    inserted_s=1.0,
    access_sequence=10,
    insert_sequence=1,
    num_hits=0,
    score=0.0,
)


def test_lru_evicts_what_was_used_longest_ago() -> None:
    """Use counts, insertion does not."""
    policy = make_eviction_policy("lru", np.random.default_rng(0))
    younger = replace(OLD, insert_sequence=5, access_sequence=9)
    assert policy.priority(younger) < policy.priority(OLD)


def test_fifo_evicts_what_came_first() -> None:
    """Insertion counts, use does not."""
    policy = make_eviction_policy("fifo", np.random.default_rng(0))
    younger = replace(OLD, insert_sequence=5, access_sequence=9)
    assert policy.priority(OLD) < policy.priority(younger)


def test_score_comes_before_recency() -> None:
    """The smallest score goes first; of equal scores the least recently used."""
    policy = make_eviction_policy("score", np.random.default_rng(0))
    wanted = replace(OLD, score=1.0, access_sequence=1)
    younger = replace(OLD, access_sequence=11)
    numbers = [policy.priority(facts) for facts in (OLD, younger, wanted)]
    assert numbers == sorted(set(numbers))


def test_cost_comes_before_recency_and_the_queue_before_cost() -> None:
    """Worth ranks what nobody waits for; what is waited for goes by its place."""
    policy = make_eviction_policy("cost", np.random.default_rng(0))
    worthy = replace(OLD, worth=1e-6)
    worthier = replace(OLD, worth=2e-6, access_sequence=1)
    later = replace(OLD, queued=1, next_use=9.0)
    sooner = replace(OLD, queued=1, next_use=8.0)
    order = (replace(OLD, access_sequence=99), worthy, worthier, later, sooner)
    numbers = [policy.priority(facts) for facts in order]
    assert numbers == sorted(set(numbers))


def test_random_draws_once_per_insertion() -> None:
    """Use never changes the draw; insertions spread evenly over [0, 1)."""
    policy = make_eviction_policy("random", np.random.default_rng(0))
    assert policy.priority(OLD) == policy.priority(replace(OLD, access_sequence=99))
    draws = [policy.priority(replace(OLD, insert_sequence=i)) for i in range(4000)]
    counts, _ = np.histogram(draws, bins=8, range=(0.0, 1.0))
    assert counts.sum() == 4000
    assert counts.min() > 400
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.1


def test_random_depends_on_the_generator() -> None:
    """Another seed gives another order."""
    one = make_eviction_policy("random", np.random.default_rng(0))
    two = make_eviction_policy("random", np.random.default_rng(1))
    assert one.priority(OLD) != two.priority(OLD)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """The error names the flag and the choices."""
    with pytest.raises(ConfigError, match=r"eviction_policy.*'mru'.*lru, fifo, random"):
        make_eviction_policy("mru", np.random.default_rng(0))


def test_registry_names_are_the_policies_names() -> None:
    """What the flag says is what the reports say."""
    rng = np.random.default_rng(0)
    names = [make_eviction_policy(name, rng).name for name in EVICTION_POLICIES]
    assert names == list(EVICTION_POLICIES)
