"""Real all-reduces of two gloo processes, as the contention guard sees them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

PROGRAM = Path(__file__).parent / "collectives_program.py"
TIMEOUT_S = 280


def free_port():
    """Return a port that, with the one after it, is free."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            if port == 65535:
                continue
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def ranks():
    """What both ranks saw."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=TIMEOUT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


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
