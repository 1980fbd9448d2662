"""Records of calls: a file each, JSON lines, and which calls add up.

The first line says what ran and where, each further one is a block: one run or repeat
of the plan. A block is written when it is whole, so that a call that is ended loses the
one under way and no other. Blocks of several calls add up where source, design and
machine are the same, and whether others computed beside them. The last line is what all
of them came to when the call ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.harness.keeping import run_facts

__all__ = ["PRODUCT", "ROOT", "Call", "busy_cores", "design_hash", "read_blocks"]

ROOT = Path(__file__).parents[3]
PRODUCT = ("sgl_tiered", "kernels", "platform_dist")
"""Folders whose source decides what is measured of ours."""
_ADDS_UP = ("bench", "source", "design", "machine", "alone")
_ALONE = 0.25
"""Cores at work before a call, below which it has the machine for itself."""
_LOOKS_S = 3.0


def design_hash(design: Mapping[str, Any]) -> str:
    """Return what names a design (sizes, loads, arms): 12 hex digits."""
    text = json.dumps(design, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def busy_cores(seconds: float = _LOOKS_S) -> float:
    """Return how many cores are at work in the next seconds."""
    before = _work()
    time.sleep(seconds)
    busy, whole = (now - then for now, then in zip(_work(), before, strict=True))
    return round((os.cpu_count() or 1) * busy / max(whole, 1), 2)


class Call:
    """One call: its header now, its blocks as they come.

    Args:
        bench: name of the benchmark; the file's name begins with it.
        design: what is measured; all of it is written down.
        folder: of the records.
        peers: versions of what is compared with.
        busy: cores that are at work before anything of ours is started.
    """

    def __init__(
        self,
        bench: str,
        design: Mapping[str, Any],
        folder: Path,
        peers: Mapping[str, str],
        busy: float,
    ) -> None:
        facts = run_facts(f"make bench-{bench}", ROOT, PRODUCT, ())
        self.header: dict[str, Any] = {
            "kind": "call",
            "bench": bench,
            **facts,
            "versions": {**facts["versions"], **peers},
            "design": design_hash(design),
            "sizes": dict(design),
            "busy_before": busy,
            "alone": busy < _ALONE,
        }
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / f"{bench}-{self.header['source'][:12]}-{now}.jsonl"
        self.before = read_blocks(folder, self.header)
        self.blocks: list[dict[str, Any]] = []

    @property
    def all_blocks(self) -> list[dict[str, Any]]:
        """Blocks of earlier calls and of this one."""
        return [*self.before, *self.blocks]

    def keep(self, block: Mapping[str, Any]) -> None:
        """Write a whole block."""
        if not self.blocks:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.header) + "\n")
        told = {
            "kind": "block",
            "alone": self.header["alone"],
            **block,
        }
        self.blocks.append(told)
        with self.path.open("a") as out:
            out.write(json.dumps(told) + "\n")

    def end(self, told: Mapping[str, Any]) -> None:
        """Write what all blocks came to, if any of them is of this call."""
        if self.blocks:
            with self.path.open("a") as out:
                out.write(json.dumps({"kind": "summary", "figures": dict(told)}) + "\n")


def read_blocks(folder: Path, header: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the blocks of calls that add up with this one, oldest first.

    A last line that a killed call has not ended is left out.

    Raises:
        ValueError: another line is no JSON.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"{header['bench']}-*.jsonl")):
        first, *rest = _lines(path)
        if all(first.get(name) == header[name] for name in _ADDS_UP):
            found += [line for line in rest if line["kind"] == "block"]
    return found


def _lines(path: Path) -> Sequence[dict[str, Any]]:
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()
    if not whole:
        return [{}]
    return [json.loads(line) for line in whole]


def _work() -> tuple[int, int]:
    """Return the ticks of all cores at work, and all of them, since the start."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(word) for word in words]
    # The fourth and fifth are idle, the latter while a disk is waited for.
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
