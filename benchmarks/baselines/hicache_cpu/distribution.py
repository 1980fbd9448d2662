"""Makes the HiCache baseline visible to SGLang without installing anything.

SGLang finds plugins by their distribution's entry points, and Python finds
distributions in every folder of its path. So a folder with a ``dist-info`` of two small
files is generated where the benchmark writes, and it and the folder of baselines go on
``PYTHONPATH`` of the servers that need the baseline, and of no other.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["hicache_env"]

_FOLDER = "hicache_cpu-1.dist-info"
_METADATA = "Metadata-Version: 2.1\nName: hicache-cpu\nVersion: 1\n"
_ENTRY_POINTS = "[sglang.srt.plugins]\nhicache_cpu = hicache_cpu.plugin:activate\n"


def hicache_env(folder: Path, asynchronous: bool) -> dict[str, str]:
    """Write the distribution under ``folder`` and return a server's variables."""
    info = folder.resolve() / _FOLDER
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    path = [str(info.parent), str(Path(__file__).resolve().parents[1])]
    if os.environ.get("PYTHONPATH"):
        path.append(os.environ["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "HICACHE_CPU_ASYNC": "1" if asynchronous else "0",
    }
