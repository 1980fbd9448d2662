"""Tiers as the factory builds them: the scheduler's thread asks no disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

PROGRAM = Path(__file__).parent / "thread_program.py"
TIMEOUT_S = 280


def test_the_scheduler_s_thread_asks_nothing_of_the_disk(tmp_path):
    """Pages are written, read, evicted, dropped and reset, and metrics published."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "disk")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert min(told["stored"], told["loaded"], told["evicted"]) > 0
    assert told["seen"] == []
