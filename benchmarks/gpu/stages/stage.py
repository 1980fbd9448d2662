"""What a stage of the session gets, and how it tells what it has found.

A stage is a module with ``run(stage)``. Each record is in the stage's file as soon as
it is made, so that one that is killed has told what it had. What there is no time for
is a record of the kind ``skipped``. ``missing`` ends it as not there; an AssertionError
ends it as failed, and its figures are not told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

__all__ = ["ROOT", "NotThereError", "Stage", "add_stand_ins", "use_checkout"]

ROOT = Path(__file__).parents[3]
_STAND_INS = Path(__file__).parents[1] / "stand_ins"
_ENDS_BEFORE = 0.85
"""Share of its time after which a stage begins nothing new."""


class NotThereError(Exception):
    """What a stage is about is not on this machine; the message says what."""


class Stage:
    """One run of a stage.

    Args:
        path: of its file.
        limit_s: after which it is killed; counted from now.
        dry_run: tiny, on a CPU.

    Attributes:
        dry_run: as given.
        records: dictionaries, raw seconds and bytes among them.
        figures: numbers for the session's last line.
    """

    def __init__(self, path: Path, limit_s: float, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.records: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self._path = path
        self._began_s = time.perf_counter()
        self._limit_s = limit_s

    @property
    def spent_s(self) -> float:
        """Seconds since its start."""
        return time.perf_counter() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds in which something new may begin."""
        return _ENDS_BEFORE * self._limit_s - self.spent_s

    def add(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Write a record, and return it."""
        record = {"kind": kind, **facts}
        self.records.append(record)
        words = {key: one for key, one in facts.items() if not isinstance(one, list)}
        print(f"{kind}: {json.dumps(words, default=_plain)[:400]}", flush=True)
        self.write()
        return record

    def figure(self, name: str, value: Any) -> None:
        """Name a figure for the session's last line."""
        self.figures[name] = value
        self.write()

    def missing(self, what: str) -> NoReturn:
        """End the stage as not there."""
        raise NotThereError(what)

    def write(self) -> None:
        """Put the file in place, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        told = {"figures": self.figures, "records": self.records}
        fresh.write_text(json.dumps(told, default=_plain), encoding="utf-8")
        os.replace(fresh, self._path)


def use_checkout() -> None:
    """Let this process and those that it starts import the checkout's packages."""
    folders = [str(ROOT / folder) for folder in ("", "kernels", "workloads")]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    everything = dict.fromkeys([*folders, *filter(None, inherited)])
    os.environ["PYTHONPATH"] = os.pathsep.join(everything)


def add_stand_ins() -> list[str]:
    """Let what the product imports, and is not installed, come from ``stand_ins``.

    Returns:
        The names of what is missing.
    """
    missing = [
        path.stem for path in _STAND_INS.glob("*.py") if find_spec(path.stem) is None
    ]
    if missing:
        # Behind everything else: what is installed is used.
        sys.path.append(str(_STAND_INS))
    return sorted(missing)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return str(value)
