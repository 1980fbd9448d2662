"""compute-sanitizer on the page copies and on ``kv_gen``: memory, races, first reads.

A program with a planted write beyond a buffer has to be found before a clean result
counts. In a dry run the same launches run interpreted, without a sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.stage import ROOT, Stage

__all__ = ["run"]

_PROGRAM = Path(__file__).parents[1] / "engine" / "launch_once.py"
_TOOLS = ("memcheck", "racecheck", "initcheck")
_COUNTS = ("memcheck", "racecheck")
"""The third also tells of what torch's own kernels read before they write."""
_TAIL_CHARS = 1500
_FOUND = 9
"""Exit status that the sanitizer is asked for where it finds something."""


def run(stage: Stage) -> None:
    """Write one record per tool."""
    sanitizer = _find()
    if stage.dry_run:
        told = _run([], ("page_copy", "kv_gen"), stage.left_s)
        stage.add("sanitizer", tool="none: interpreted", **told)
        assert "page_copy ran" in told["tail"], told["tail"]
        assert "kv_gen ran" in told["tail"], told["tail"]
        assert told["exit_status"] == 0, told["tail"]
        return
    if sanitizer is None:
        stage.missing("compute-sanitizer is neither on the PATH nor in CUDA's folder")
    options = [sanitizer, "--error-exitcode", str(_FOUND), "--print-limit", "5"]
    told = _run([*options, "--tool", "memcheck"], ("planted",), stage.left_s)
    stage.add("control", tool="memcheck", **told)
    if told["exit_status"] != _FOUND:
        why = f"the sanitizer does not find a planted write here: {told['tail'][-300:]}"
        stage.missing(why)
    red = []
    for tool in _TOOLS:
        if stage.left_s < 5.0:
            stage.add("skipped", tool=tool)
            continue
        told = _run([*options, "--tool", tool], ("page_copy", "kv_gen"), stage.left_s)
        stage.add("sanitizer", tool=tool, **told)
        if told["exit_status"] != 0 and tool in _COUNTS:
            red.append(f"{tool}: status {told['exit_status']}")
    stage.figure("sanitizer_red", red)
    assert not red, "; ".join(red)


def _find() -> str | None:
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for folder in filter(None, folders):
        path = Path(folder) / "bin" / "compute-sanitizer"
        if path.exists():
            return str(path)
    return shutil.which("compute-sanitizer")


def _run(prefix: list[str], kernels: tuple[str, ...], limit_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [*prefix, sys.executable, str(_PROGRAM), *kernels],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(limit_s, 1.0),
            # Torch's cache of device memory would hide writes beyond a buffer.
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace")
        return {"exit_status": -1, "tail": f"{text[-_TAIL_CHARS:]}\nkilled"}
    return {"exit_status": done.returncode, "tail": done.stdout[-_TAIL_CHARS:]}
