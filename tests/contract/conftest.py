"""Runs the contract program, each mode once per session."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "contract_program.py"
MODELS = Path(__file__).parents[2] / ".cache" / "models"
TIMEOUT_S = 280


@pytest.fixture(scope="session")
def model():
    """The folder of the tiny Llama."""
    making = pytest.importorskip("sgl_tiered_workloads.model")
    return making.make_model("tiny", MODELS)


@pytest.fixture(scope="session")
def look():
    """Return a function that runs a mode of the program and gives its JSON."""

    def run(*args):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *map(str, args)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def symbols(look):
    """What SGLang's symbols look like."""
    return look("symbols")
