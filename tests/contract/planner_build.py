"""Compiles FlashInfer's own planner for a CPU.

It is host code in the headers of FlashInfer's wheel, which includes CUDA's;
``flashinfer_planner.cpp`` calls it, over ``cuda_stand_in.h``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
from pathlib import Path

CHECKED = "0.7.2"
"""FlashInfer's version whose headers and wrappers were read for this."""
COMPILED_WITHIN_S = 120
_CUDA_HEADERS = (
    "cuda_bf16.h",
    "cuda_device_runtime_api.h",
    "cuda_fp16.h",
    "cuda_fp8.h",
    "cuda_runtime.h",
    "cuda_runtime_api.h",
    "driver_types.h",
)


def why_not() -> str:
    """Return why the planner cannot be compiled here; empty if it can."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    version = importlib.metadata.version("flashinfer-python")
    if version != CHECKED:
        return f"flashinfer-python is {version}, and {CHECKED} was checked"
    return ""


def compiled(folder: Path) -> Path:
    """Compile the planner; return the library.

    Args:
        folder: for it, and for what stands for CUDA's headers.
    """
    here = Path(__file__).parent
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    for name in _CUDA_HEADERS:
        (folder / name).write_text(f'#include "{here / "cuda_stand_in.h"}"\n')
    library = folder / "planner.so"
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    command += ["-I", str(folder), "-I", str(Path(spec.origin).parent / "data/include")]
    command += [str(here / "flashinfer_planner.cpp"), "-o", str(library)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=COMPILED_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return library
