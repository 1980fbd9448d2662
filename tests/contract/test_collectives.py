"""Real all-reduces of two gloo processes, as the contention guard sees them."""

from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import pytest

from tests.contract.story_support import image, output_of, told_once

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def ranks():
    """What both ranks saw."""
    return told_once("collectives of two ranks", tell)


def tell():
    """Run both ranks."""
    # Before two threads ask for it.
    image()
    # They meet in a folder: a port that is free now may be another's by then.
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as both:
        told = [
            both.submit(output_of, "collectives_program.py", rank, folder)
            for rank in range(2)
        ]
        return [one.result() for one in told]


def test_the_hooks_change_no_answer(ranks):
    """Sums and gathered tensors are those of both ranks, watched or not."""
    for told in ranks:
        assert told["missing"] == []
        assert told["unwatched"] == 2000.0
        assert told["sums"] == [3000.0] * 4
        assert told["gathered"] == [0.0] * 4 + [1.0] * 4


def test_every_collective_is_seen_once(ranks):
    """Four all-reduces and a gather, in the rank's own process, and then none."""
    for told in ranks:
        assert told["num_seen"] == 5
        assert told["in_flight"] is None
        assert told["usual_s"] > 0.0


def test_a_swap_waits_for_a_collective_in_flight(ranks):
    """It goes once the other rank has come and the sum is there."""
    told = ranks[0]
    for turn in range(3):
        assert told["seen"][f"delay{turn}"] > 0.0
        assert told["seen"][f"went{turn}"] is True
        assert told["seen"][f"after{turn}"] is True
    assert told["num_waits"] >= 3


def test_copies_of_layers_wait_for_a_collective_in_flight(ranks):
    """Nothing was copied while it was on its way; each sub-unit asked."""
    moved = ranks[0]["moved"]
    assert moved["during"] == 0
    assert moved["copies"] == 2
    assert moved["ok"] == [True] * 4
    assert ranks[0]["num_waits"] >= 4
    # Three turns, and two sub-units.
    assert moved["asked"] == 5
