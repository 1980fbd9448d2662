"""What the tests of Triton forms share: a process in which Triton is interpreted."""

import json
import subprocess
import sys

import pytest

from tests.shared_run import recorded_once, run_folder

TIMEOUT_S = 600
PROGRAM = """
import contextlib, io, json, runpy, sys, traceback

told = {}
for file in sys.argv[1:]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(file, run_name="__main__")
    except BaseException:
        told[file] = {"error": traceback.format_exc()}
    else:
        told[file] = {"words": out.getvalue().split()}
print(json.dumps(told))
"""
"""Runs files as programs, one after the other: importing torch and Triton is half of
the time of each."""


@pytest.fixture(scope="session")
def all_interpreted(request, tmp_path_factory):
    """What the files whose tests ask for it say, or the error that ended them.

    Triton reads TRITON_INTERPRET when it is imported, so it takes a process of its own:
    one for all files and all processes of a run.
    """
    pytest.importorskip("triton")
    asking = {i.path for i in request.session.items if "interpreted" in i.fixturenames}

    def run():
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, sorted(asking))],
            env={"TRITON_INTERPRET": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return recorded_once(run_folder(tmp_path_factory) / "interpreted.pickle", run)


@pytest.fixture
def interpreted(request, all_interpreted):
    """Words that the test's file prints, run as a program under TRITON_INTERPRET=1."""
    told = all_interpreted[str(request.path)]
    assert "error" not in told, told["error"]
    return told["words"]
