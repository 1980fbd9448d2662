"""``make fuzz`` runs targets in processes of their own, and says what they did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_its_last_line_is_what_its_processes_found(root: Path) -> None:
    """A few inputs of one target, run in another process, as all of them are."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs=20", "--targets", "traces"]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=280
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["targets"], told["inputs"]) == (1, 20), done.stderr[-2000:]
    assert (told["crashes"], told["wrong"]) == (0, 0)
