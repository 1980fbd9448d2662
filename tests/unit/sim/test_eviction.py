"""Eviction that sees the queue, in the hierarchy of the replays and on the server."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.registry import (
    EVICTION_POLICIES,
    make_eviction_policy,
)
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.exclusive import ExclusiveTier
from sgl_tiered.sim.opt import OptBound
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import replay_exclusive
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.server import SimServer
from tests.unit.sim.replay_support import spell_trace, word_lists

Make = Callable[..., ServerConfig]
MakeChats = Callable[..., SimWorkload]


def hits(trace: PageTrace, policy: str, num_pages: int, visible: int) -> int:
    rng = np.random.default_rng(3)
    tier = ExclusiveTier(TierId.DEVICE, num_pages, make_eviction_policy(policy, rng))
    return replay_exclusive(trace, [tier], visible).hit_pages[TierId.DEVICE]


@given(word_lists(), st.integers(1, 12))
@settings(max_examples=150)
def test_with_all_requests_in_sight_cost_is_the_best_possible(
    words: list[str], num_pages: int
) -> None:
    """What the queue will use is kept in the order of use: Belady's rule."""
    trace = spell_trace(words)
    best = sum(OptBound(trace).hits(num_pages))
    assert hits(trace, "cost", num_pages, len(words)) == best


@given(word_lists(), st.integers(1, 12))
@settings(max_examples=100)
def test_without_proof_and_queue_cost_is_lru(words: list[str], num_pages: int) -> None:
    """Short traces prove nothing, and nobody waits: the least recently used goes."""
    trace = spell_trace(words)
    lru = hits(trace, "lru", num_pages, 0)
    assert hits(trace, "cost", num_pages, 0) == lru
    assert hits(trace, "score", num_pages, 0) == lru


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("device", EVICTION_POLICIES)
def test_a_server_runs_to_its_end_under_every_policy(
    make_config: Make, make_chats: MakeChats, policy: str, device: str
) -> None:
    """All requests end, the pages add up, and nobody is waited for at the end."""
    config = make_config(
        device=60, host=60, disk=120, eviction=policy, device_eviction=device
    )
    server = SimServer(config, make_chats())
    result = server.run()
    assert not any(record.aborted for record in result.records)
    server.tree.check()
    assert server.lower is not None
    server.lower.cache.check()
    if server.lookahead is not None:
        assert len(server.lookahead) == 0
    assert result.log.digest() == SimServer(config, make_chats()).run().log.digest()


def test_the_default_server_has_no_lookahead(make_config: Make) -> None:
    """LRU costs what it did: nothing is kept beside it."""
    server = SimServer(make_config(host=10), SimWorkload("none", 4, ()))
    assert server.lookahead is None
