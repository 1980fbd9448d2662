"""The cells of a comparison on disk: a JSON file each, written as soon as it is done.

What was measured is kept; what failed, or was not there, is tried again by the next run
into the same folder, and keeps the reasons of the attempts that failed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from comparison.plan import Cell
from comparison.settings import ProblemError

__all__ = ["FAILED", "NOT_THERE", "OK", "Store"]

OK, FAILED, NOT_THERE = "ok", "failed", "not there"
_MUST_MATCH = ("source", "model", "shared", "sizes", "dry_run", "versions")
_NEEDED = {field.name for field in fields(Cell)} | {"status", "why"}


class Store:
    """The folder of one comparison.

    Args:
        out: the folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.cells = out / "cells"

    def begin(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Write the header, or find that of a run that this one goes on with.

        Returns:
            The header that counts.

        Raises:
            ProblemError: the folder holds cells of another run, or cannot be written.
        """
        path = self.out / "header.json"
        former = self._read(path)
        if former is not None and any(self.cells.glob("*.json")):
            for name in _MUST_MATCH:
                if former.get(name) != header[name]:
                    raise ProblemError(
                        f"--out: {self.out} has figures of another run, which differs "
                        f"in {name} (header.json); give another folder."
                    )
        told = dict(header)
        if former is not None:
            # A run that goes on may ask for more systems, or fewer.
            both = [*former.get("systems", []), *header["systems"]]
            told["systems"] = list(dict.fromkeys(both))
            told["began"] = former.get("began", told.get("began"))
        try:
            self.write(path, told)
        except OSError as problem:
            raise ProblemError(
                f"--out: {self.out} cannot be written ({problem.strerror})."
            ) from None
        return told

    def facts(self) -> dict[str, Any] | None:
        """Return what a server told of the device pool; None where none did yet."""
        return self._read(self.out / "facts.json")

    def keep_facts(self, facts: Mapping[str, Any]) -> None:
        """Write that down."""
        self.write(self.out / "facts.json", facts)

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell was measured."""
        told = self._read(self.path(cell))
        return told is not None and told.get("status") == OK

    def put(
        self, cell: Cell, status: str, why: str = "", **found: Any
    ) -> dict[str, Any]:
        """Write a cell with today's date and its failed attempts, and return it."""
        former = self._read(self.path(cell)) or {}
        failed = [*former.get("failed", []), *([why] if status == FAILED else [])]
        told = {
            **asdict(cell),
            "status": status,
            "why": why,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "failed": failed,
            **found,
        }
        self.write(self.path(cell), told)
        return told

    def path(self, cell: Cell) -> Path:
        """Return a cell's file."""
        return self.cells / f"{cell.name}.json"

    def every(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return all cells, and the names of files that could not be read."""
        found, broken = [], []
        for path in sorted(self.cells.glob("*.json")):
            told = self._read(path)
            if told is None or not told.keys() >= _NEEDED:
                broken.append(path.name)
            else:
                found.append(told)
        return found, broken

    @staticmethod
    def write(path: Path, told: Mapping[str, Any]) -> None:
        """Put a file in place, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(told, indent=1), encoding="utf-8")
        os.replace(fresh, path)

    @staticmethod
    def _read(path: Path) -> dict[str, Any] | None:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return told if isinstance(told, dict) else None
