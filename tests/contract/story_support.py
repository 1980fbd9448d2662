"""Runs the programs beside this file, and gives what they print last as JSON.

A program has a process of its own, as it changes what it stands on. Importing SGLang is
most of its time, so it is forked from a process that has done it, which stays for the
next one; ``TIERED_FORK=0`` starts it with an interpreter of its own.
"""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.fork_server import MODULES, ForkServer

CORES = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}
"""SGLang's tree cores, and the classes behind them."""
TIMEOUT_S = 280
ROOT = Path(__file__).parents[2]
# SGLang compiles a penalty, which takes minutes on a busy machine.
ENV = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}


@functools.cache
def image() -> ForkServer:
    """Return the process that has imported SGLang; it ends with this one."""
    server = ForkServer(MODULES, ENV).__enter__()
    atexit.register(server.close)
    return server


def output_of(program: str, *args: object, fresh: bool = False, **env: str) -> Any:
    """Return what a program beside this file prints last, from JSON.

    Args:
        program: its file's name.
        args: for it.
        fresh: whether it is to import SGLang itself.
        env: variables of its environment, besides this process's.
    """
    command = [str(Path(__file__).parent / program), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
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
