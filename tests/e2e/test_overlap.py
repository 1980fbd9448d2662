"""A real server with SGLang's overlap schedule, whose loads to the device break.

Two requests run at a time and others queue behind them, so that pages are brought to
the device ahead of their turn as well. The played device of ``tests/contract`` has what
a CPU has not: forwards and copies that are in flight (``overlap_program.py``).
"""

import pytest
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import Case, pinned, settle, stats
from tests.e2e.test_prefetch import queue_behind
from tests.faults.fault_support import Prompts, assert_same, dropped_to, faults, struck

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16, overlap=True, spins=True)
MAX_ROUNDS = 5


@pytest.fixture(scope="module")
def plain(reference):
    return reference(CASE)


@pytest.fixture
def server(servers, model, plain):
    flags = (
        "--tiered-load-policy=always",
        "--tiered-prefetch=car",
        "--tiered-prefetch-to=device",
        "--max-running-requests=2",
    )
    env = {
        "SGL_TIERED_ALLOW_FAULTS": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    tiers = Tiers(16 * MB)
    spec = tiered_spec(CASE.device(model), tiers, "overlap", flags=flags, env=env)
    return servers.get(spec)


def repaired(state):
    """Return how many tokens were computed in the place of loads that failed late."""
    return state["counters"].get("tokens_repaired", 0)


def test_a_crowd_is_answered_right_while_loads_break(server, plain):
    """What did not come is computed; no slot and no source is left behind."""
    prompts = Prompts()
    before = repaired(stats(server))
    # A load that fails before its batch has begun is computed as if it had not been: it
    # takes rounds until one fails behind a batch, and each has to be right.
    for seed in range(3, 3 + MAX_ROUNDS):
        requests = prompts.take(6)
        cold = dropped_to(server, "host", requests)
        with faults(server, f"host:fault=error@0.4/load,seed={seed}"):
            assert_same(plain, cold, queue_behind(server, requests))
            assert struck(server, "host") > 0
        state = settle(server)
        if repaired(state) > before:
            break
    assert repaired(state) > before
    assert pinned(state) == 0
    # Once it is over, with whatever is where it is now.
    assert_same(plain, cold, queue_behind(server, requests, seed=2))
    assert pinned(settle(server)) == 0
