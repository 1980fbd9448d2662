"""What a run stood on: commit, versions, processor, memory, accelerators.

Facts only, and none that names a path, a host or a user of the machine. What cannot be
read is left out or empty, never guessed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "NOT_IN_SERVERS",
    "commit",
    "is_dirty",
    "machine_facts",
    "source_hash",
    "versions",
]

_VERSIONED = (
    "sglang",
    "sgl-tiered",
    "torch",
    "numpy",
    "transformers",
    "openai",
    "lmcache",
)
_ASK_S = 20.0
_GPU_FIELDS = ("name", "memory.total", "driver_version", "pcie.link.gen.max")
_MIB = 1 << 20


def commit() -> str:
    """Return the commit of the working tree that we run from; empty outside one."""
    return _ask("git", "rev-parse", "HEAD", cwd=Path(__file__).parent)


def is_dirty() -> bool:
    """Whether tracked files differ from the commit."""
    arguments = ("status", "--porcelain", "--untracked-files=no")
    return bool(_ask("git", *arguments, cwd=Path(__file__).parent))


NOT_IN_SERVERS = ("sgl_tiered/cli", "sgl_tiered/router", "sgl_tiered/sim")
"""What no server with tiers imports: it changes none of their answers."""


def source_hash(root: Path, folders: Iterable[str], without: Iterable[str] = ()) -> str:
    """Return what names the sources in some folders of a checkout: 16 hex digits.

    Args:
        root: of the checkout.
        folders: in it; a single file counts as well.
        without: folders in these that do not count, such as ``NOT_IN_SERVERS``.
    """
    digest = hashlib.sha256()
    left_out = [root / folder for folder in without]
    for folder in folders:
        place = root / folder
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            if any(file.is_relative_to(each) for each in left_out):
                continue
            digest.update(str(file.relative_to(root)).encode() + b"\0")
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter, or ``absent``."""
    found: dict[str, str] = {}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def machine_facts() -> dict[str, Any]:
    """Return processor, cores, memory in bytes, system, Python and accelerators."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "accelerators": _accelerators(
            _ask(
                "nvidia-smi",
                f"--query-gpu={','.join(_GPU_FIELDS)}",
                "--format=csv,noheader,nounits",
            )
        ),
    }


def _accelerators(table: str) -> list[dict[str, Any]]:
    """Read nvidia-smi's table: one line per GPU, memory in MiB."""
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_GPU_FIELDS) or not cells[1].isdigit():
            continue
        name, memory_mib, driver, link = cells
        found.append(
            {
                "name": name,
                "memory_bytes": int(memory_mib) * _MIB,
                "driver": driver,
                "pcie_generation": link,
            }
        )
    return found


def _ask(*command: str, cwd: Path | None = None) -> str:
    """Return what a program prints; empty where it is absent, slow or fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
