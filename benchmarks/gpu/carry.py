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

_FOLDERS = ("kernels",)
_FILES = ("srt/environ.py",)
_LEFT_OUT = ("__pycache__", "*.pyc", "*.so")


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
    for folder in {package, *((package / file).parent for file in _FILES)}:
        (folder / "__init__.py").write_text("", encoding="utf-8")
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
