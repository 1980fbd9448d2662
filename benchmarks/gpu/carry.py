"""Collect of an installed SGLang what HiCache's kernels need, for another machine.

    python benchmarks/gpu/carry.py --to .carried

Sources of SGLang's kernels and the one module beside them that they import, under
packages that are empty otherwise. On the other machine ``PYTHONPATH=.carried`` lets the
session's ``copies`` stage compile them; ``tvm_ffi`` and nvcc have to be there too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

__all__ = ["carry"]

_FOLDERS = ("kernels/jit",)
_FILES = (
    "srt/environ.py",
    "kernels/fused_op.py",
    "kernels/kernel_api_logging.py",
    "kernels/ops/kvcache/hicache.py",
    "kernels/spec.py",
)
_EMPTY = ("", "srt", "srt/utils", "kernels", "kernels/ops", "kernels/ops/kvcache")
"""Packages whose own modules import all of their kernels, or all of SGLang."""
_LEFT_OUT = ("__pycache__", "*.pyc", "*.so")
_COMMON = '''"""What SGLang's kernels ask of the module of this name."""

import torch


def is_cuda():
    return torch.version.cuda is not None


def get_cuda_version():
    return tuple(int(part) for part in torch.version.cuda.split("."))
'''
_UTILS = '''"""What SGLang's kernels ask of the module of this name."""


def is_in_ci():
    return False
'''


def carry(source: Path, target: Path) -> int:
    """Copy the parts of a ``sglang`` package; return their bytes."""
    package = target / "sglang"
    for folder in _FOLDERS:
        shutil.copytree(
            source / folder,
            package / folder,
            ignore=shutil.ignore_patterns(*_LEFT_OUT),
            dirs_exist_ok=True,
        )
    for file in _FILES:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, package / file)
    for folder in _EMPTY:
        (package / folder).mkdir(parents=True, exist_ok=True)
        (package / folder / "__init__.py").write_text("", encoding="utf-8")
    (package / "srt/utils/common.py").write_text(_COMMON, encoding="utf-8")
    (package / "utils.py").write_text(_UTILS, encoding="utf-8")
    return sum(path.stat().st_size for path in package.rglob("*") if path.is_file())


def main() -> None:
    """Copy, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        parser.error("SGLang is not installed here")
    num_bytes = carry(Path(found.origin).parent, args.to)
    print(json.dumps({"bytes": num_bytes}))


if __name__ == "__main__":
    main()
