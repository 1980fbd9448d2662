"""Two servers of two ranks each in one pool: rank i pulls from rank i, or none does.

The answers must be plain SGLang's with two ranks. A rank that decided otherwise than
the first one would have stopped its server.
"""

import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.sessions import ChatShape, replay
from sgl_tiered_workloads.systems import plain_spec

from tests.e2e.e2e_support import (
    REFERENCE_POOL_TOKENS,
    drop,
    edge,
    record_reference,
    sequential,
    stats,
    wait_until,
)
from tests.e2e.test_peer import (
    CASE,
    Pair,
    in_turns,
    members,
    pulled,
    serves_on_without_a,
)
from tests.e2e.test_tensor_parallel import CORES, on_two_ranks

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.e2e,
    pytest.mark.skipif(len(CORES) < 2, reason="each rank needs a core"),
]

SHAPE = ChatShape(
    num_sessions=2,
    num_turns=3,
    system_tokens=128,
    first_tokens=300,
    user_tokens=40,
    answer_tokens=4,
)
"""Few and short: two ranks on two cores take a second for a prompt."""


@pytest.fixture(scope="module")
def plain(request, servers, model):
    """Plain SGLang's answers with two ranks."""
    if not request.config.getoption("--full"):
        pytest.skip("four ranks that wait for each other are slow: by --full only")
    spec = plain_spec(CASE.device(model, REFERENCE_POOL_TOKENS))
    found = record_reference(servers.get(on_two_ranks(spec)), SHAPE)
    servers.stop()
    return found


@pytest.fixture(scope="module")
def pair(plain, model, tmp_path_factory):
    """Two servers of one pool, four processes that compute."""
    pair = Pair(tmp_path_factory.mktemp("ranks"), model, on_two_ranks)
    try:
        wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
        yield pair
    finally:
        pair.stop()


def assert_plains(plain, chosen, answers, must_cover=()):
    """The answers are plain's; those of some tiers, to the bit."""
    result = check_equality(
        chosen,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.0,
        must_cover=must_cover,
    )
    assert result.passed, result.summary()


def test_what_all_ranks_have_pulled_is_served(pair, plain):
    """By turns, so that the KV of each turn of a chat is on the other server."""
    answers = in_turns(pair, plain.chat)
    assert len(pulled(answers)) > len(answers) // 3, "too little came from the peer"
    assert_plains(plain, plain.chat, answers, must_cover=["peer"])
    assert edge(stats(pair.b), "peer->host") > 0
    assert edge(stats(pair.b), "peer->host", "failed_pages") == 0


def test_the_disks_of_all_ranks_are_read_for_a_peer(pair, plain):
    """What only the disks have is read by each rank, and sent when all have it."""
    chosen = plain.chat[-2:]
    drop(pair.b, "device", "host")
    sequential(pair.a, replay(chosen))
    drop(pair.a, "device", "host")
    before = edge(stats(pair.a), "disk->host")
    answers = sequential(pair.b, replay(chosen))
    assert edge(stats(pair.a), "disk->host") > before
    assert len(pulled(answers)) == len(chosen)
    # Plain computed other parts of these prompts, so that bits differ.
    assert_plains(plain, chosen, answers)


def test_a_holder_that_dies_is_done_without(pair):
    """All ranks of the other go on alike, while it is in the pool and afterwards."""
    serves_on_without_a(pair)


def test_spoiled_parts_are_computed_on_all_ranks(pair, plain):
    """The checks of every rank fail together, and the answers are plain's."""
    chosen = plain.chat[-2:]
    pair.a.stop()
    pair.a = pair.start("a", ["--tiered-fault-corrupt=peer"])
    wait_until(lambda: len(members(pair.b)) == 2, "both are in the pool")
    drop(pair.b, "device", "host")
    sequential(pair.a, replay(chosen))
    before = edge(stats(pair.b), "peer->host", "failed_pages")
    answers = sequential(pair.b, replay(chosen))
    assert not pulled(answers)
    assert edge(stats(pair.b), "peer->host", "failed_pages") > before
    assert_plains(plain, chosen, answers)
