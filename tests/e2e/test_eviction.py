"""Eviction by score and by cost, on the device and below it, against plain SGLang."""

import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import replay
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import Case, edge, open_loop, pinned, sequential, settle

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16)


@pytest.mark.parametrize(
    "policy", ["score", pytest.param("cost", marks=pytest.mark.full)]
)
def test_answers_equal_plain(servers, model, reference, tmp_path, policy):
    """Chats one by one, then all at once so that a queue forms, give plain's tokens.

    Tiers and pool are too small for the chats, so that every level evicts; at the end
    nothing is pinned, and the queue that was looked at is empty.
    """
    plain = reference(CASE)
    flags = (
        "--tiered-load-policy=always",
        f"--tiered-eviction-policy={policy}",
        f"--tiered-device-eviction={policy}",
    )
    tiers = Tiers(2 * MB, tmp_path / "disk", 3 * MB)
    spec = tiered_spec(CASE.device(model), tiers, f"evict-{policy}", flags=flags)
    server = servers.get(spec)
    server.flush_cache()
    # In batches the products have other heights than plain's: near ties are the rule.
    for send, min_exact in ((sequential, 0.1), (open_loop, 0.0)):
        answers = send(server, replay(plain.chat))
        result = check_equality(
            plain.chat,
            answers,
            page_size=CASE.page_size,
            spread=plain.spread,
            min_exact_fraction=min_exact,
        )
        assert result.passed, result.summary()
    state = settle(server)
    assert pinned(state) == 0
    assert edge(state, "host->device") > 0
    evicted = state["cache"]["pages_evicted"]
    assert min(evicted.values()) > 0, evicted
    assert state["queue_lookahead"] == 0
    servers.stop()
