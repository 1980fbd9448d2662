"""Runs the programs beside this file, and gives what they print last as JSON.

A program has a process of its own, as it changes what it stands on. Importing SGLang is
most of its time, so it is forked from a process that has done it, which stays for the
next one; ``TIERED_FORK=0`` starts it with an interpreter of its own. Each program runs
once: all processes of a run of the tests share the process and what programs print.
"""

import atexit
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.fork_server import MODULES, ForkServer

from tests.shared_run import SharedForkServer, recorded_once, run_folder

CORES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}
"""SGLang's tree cores, and the classes behind them."""
TIMEOUT_S = 280
ROOT = Path(__file__).parents[2]
# SGLang compiles a penalty, which takes minutes on a busy machine.
ENV = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}


_RUN: list[Path] = []
"""The folder of this run, once it is there."""
FOLDER = "{folder}"
"""Among a program's arguments: an empty folder of its own."""


def share(factory: pytest.TempPathFactory) -> None:
    """Share with the processes of this run from now on."""
    _RUN[:] = [run_folder(factory)]


@functools.cache
def image() -> ForkServer:
    """Return the process that has imported SGLang; it ends with this one."""
    (folder,) = _RUN
    server = SharedForkServer(folder, MODULES, ENV).__enter__()
    atexit.register(server.close)
    return server


def told_once(what: object, tell: Callable[[], Any]) -> Any:
    """Return what a call returns that is made once in this run.

    Args:
        what: names it, as JSON.
        tell: makes it.
    """
    (folder,) = _RUN
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
    return recorded_once(folder / f"told-{name}.pickle", tell)


def output_of(program: str, *args: object, fresh: bool = False, **env: str) -> Any:
    """Return what a program beside this file prints last, from JSON.

    Args:
        program: its file's name.
        args: for it.
        fresh: whether it is to import SGLang itself.
        env: variables of its environment, besides this process's.
    """
    words = [str(arg) for arg in args]
    return told_once(
        [program, words, fresh, env], lambda: _run(program, words, fresh, env)
    )


def _run(program: str, words: list[str], fresh: bool, env: dict[str, str]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out, err, own = Path(folder, "out"), Path(folder, "err"), Path(folder, "own")
        own.mkdir()
        command = [str(Path(__file__).parent / program)]
        command += [str(own) if word == FOLDER else word for word in words]
        with out.open("wb") as log, err.open("wb") as errors:
            if fresh or os.environ.get("TIERED_FORK") == "0":
                process: Any = subprocess.Popen(
                    [sys.executable, *command],
                    stdout=log,
                    stderr=errors,
                    env=ENV | env,
                    cwd=ROOT,
                )
            else:
                words = [str(err), *command]
                module = "tests.contract.as_script"
                process = image().start(module, words, log, ENV | env)
        try:
            code = process.wait(timeout=TIMEOUT_S)
        finally:
            process.kill()
        assert code == 0, err.read_text(errors="replace")[-4000:]
        return json.loads(out.read_text().splitlines()[-1])


def told_by(program: str) -> dict[str, Any]:
    """Return the stories that a program beside this file tells, by core."""
    stories: dict[str, Any] = output_of(program)
    for core, name in CORES.items():
        assert stories[core]["core"] == name
    return stories
