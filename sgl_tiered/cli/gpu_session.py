"""Reads the folder of ``benchmarks/gpu/session.py``, also where it was stopped.

A session that was stopped leaves ``session.json`` without its last stages, and the
running stage's own file in ``stages``. What is missing or cannot be read is told in a
sentence; everything else is read as ``session.py`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_tiered.errors import ConfigError

__all__ = ["Record", "Session", "Stage", "read_session"]

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a session.

    Attributes:
        name: of it.
        status: ``ok``, ``failed``, ``not there``, ``timed out``, or ``not finished``.
        why: where it is not ok.
        seconds: that it took; None of one that was stopped.
        limit_s: that it had.
        records: what it wrote.
    """

    name: str
    status: str
    why: str = ""
    seconds: float | None = None
    limit_s: float | None = None
    records: Sequence[Record] = ()

    @property
    def is_wrong(self) -> bool:
        """Whether its bytes or answers were found wrong: it has no figures then."""
        return self.status == "failed" and self.why.startswith("wrong")


@dataclass(slots=True)
class Session:
    """A folder, as far as it could be read.

    Attributes:
        header: what ran and where; empty if it is missing.
        stages: by name, in order.
        problems: a sentence for each thing that is missing or cannot be read.
    """

    header: Record = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_dry_run(self) -> bool:
        """Whether the session says that it was one."""
        return self.header.get("dry_run") is True

    def records(self, stage: str, *kinds: str) -> list[Record]:
        """Return a stage's records of some kinds; none where there is no such stage."""
        found = self.stages.get(stage)
        every = () if found is None else found.records
        return [record for record in every if record.get("kind") in kinds]


def read_session(folder: Path) -> Session:
    """Read a folder.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(
            "DIR",
            f"there is no folder {folder}",
            "give the --out of benchmarks/gpu/session.py",
        )
    session = Session()
    told = _read(folder / "session.json", session.problems)
    session.header = told.get("header", {})
    for name, stage in told.get("stages", {}).items():
        words = ("status", "why", "seconds", "limit_s", "records")
        session.stages[name] = Stage(name, *(stage[word] for word in words))
    for path in sorted((folder / "stages").glob("*.json")):
        if path.stem not in session.stages:
            why = "the session was stopped while it ran"
            records = _read(path, session.problems).get("records", ())
            session.stages[path.stem] = Stage(
                path.stem, "not finished", why, records=records
            )
    return session


def _read(path: Path, problems: list[str]) -> Record:
    """Return the object of a file; an empty one, and a sentence, where there is none.

    Files are put in place whole, so that one which is no JSON is not the session's.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing.")
    except (OSError, ValueError) as problem:
        problems.append(f"{path.name} cannot be read ({type(problem).__name__}).")
    else:
        if isinstance(told, dict):
            return told
        problems.append(f"{path.name} cannot be read (it holds no object).")
    return {}
