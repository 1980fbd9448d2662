"""What the tests of Triton forms share: a process in which Triton is interpreted."""

import subprocess
import sys

import pytest

TIMEOUT_S = 600


@pytest.fixture
def interpreted(request):
    """Words that the test's file prints, run as a program under TRITON_INTERPRET=1.

    Triton reads the variable when it is imported, so it takes a process of its own.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(request.path)],
        env={"TRITON_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
