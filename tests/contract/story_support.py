"""Runs a program of stories: what happened over SGLang's real tree, by core."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CORES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}
"""SGLang's tree cores, and the classes behind them."""
TIMEOUT_S = 280


def told_by(program: str) -> dict[str, Any]:
    """Return the stories that a program beside this file tells, by core."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    stories: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for core, name in CORES.items():
        assert stories[core]["core"] == name
    return stories
