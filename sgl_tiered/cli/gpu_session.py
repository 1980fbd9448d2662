"""Reads the folder of ``benchmarks/gpu/session.py``, whatever state it is in.

A session that was stopped leaves ``session.json`` without its last stages, and the
running stage's own file in ``stages``. What is missing or broken is told in a sentence
each; everything else is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_tiered.errors import ConfigError

__all__ = ["LackError", "Session", "Stage", "number", "numbers", "read_session", "text"]

Record = Mapping[str, Any]


class LackError(ValueError):
    """A record does not have what is needed; the message says what."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a session.

    Attributes:
        name: of it.
        status: ``ok``, ``failed``, ``not there``, ``timed out``, or ``not finished``.
        why: where it is not ok.
        seconds: that it took; None if it was not told.
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

    def of(self, kind: str) -> list[Record]:
        """Return the records of a kind."""
        return [record for record in self.records if record.get("kind") == kind]


@dataclass(slots=True)
class Session:
    """A folder, as far as it could be read.

    Attributes:
        header: what ran and where; empty if it is missing.
        stages: by name, in order.
        problems: a sentence for each thing that is missing or broken.
    """

    header: Record = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_dry_run(self) -> bool:
        """Whether the session says that it was one."""
        return self.header.get("dry_run") is True

    def records(self, stage: str, kind: str) -> list[Record]:
        """Return a stage's records of a kind; none where there is no such stage."""
        found = self.stages.get(stage)
        return [] if found is None else found.of(kind)


def number(record: Record, name: str) -> float:
    """Return a number of a record.

    Raises:
        LackError: it has none of that name.
    """
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LackError(f"a record of kind {record.get('kind')!r} has no number {name}")
    return float(value)


def numbers(record: Record, name: str) -> list[float]:
    """Return a list of numbers of a record, one at least.

    Raises:
        LackError: it has none of that name.
    """
    values = record.get(name)
    if (
        not isinstance(values, list)
        or not values
        or any(isinstance(v, bool) or not isinstance(v, int | float) for v in values)
    ):
        kind = record.get("kind")
        raise LackError(f"a record of kind {kind!r} has no list of numbers {name}")
    return [float(value) for value in values]


def text(record: Record, name: str) -> str:
    """Return a text of a record; empty where it has none."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


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
    told = _object(folder / "session.json", session.problems)
    if told is not None:
        _take(session, told)
    for path in sorted((folder / "stages").glob("*.json")):
        if path.stem in session.stages:
            continue
        part = _object(path, session.problems)
        if part is not None:
            why = "the session was stopped while it ran"
            records = _records(path.stem, part.get("records"), session.problems)
            session.stages[path.stem] = Stage(
                path.stem, "not finished", why, records=records
            )
    log = folder / "log.txt"
    if not log.exists():
        session.problems.append("log.txt is missing: what the stages printed is lost.")
    return session


def _take(session: Session, told: Record) -> None:
    """Take what session.json holds."""
    header = told.get("header")
    if isinstance(header, dict) and header:
        session.header = header
    else:
        session.problems.append(
            "session.json has no header, so it is not known what ran, nor where."
        )
    stages = told.get("stages")
    if not isinstance(stages, dict):
        session.problems.append("session.json has no stages.")
        return
    if not stages:
        session.problems.append("session.json has no stage yet.")
    for name, stage in stages.items():
        if not isinstance(stage, dict):
            session.problems.append(f"The stage {name} of session.json is no object.")
            continue
        session.stages[name] = Stage(
            name,
            text(stage, "status") or "not told",
            text(stage, "why"),
            _maybe(stage, "seconds"),
            _maybe(stage, "limit_s"),
            _records(name, stage.get("records"), session.problems),
        )


def _records(name: str, told: object, problems: list[str]) -> list[Record]:
    if not isinstance(told, list):
        problems.append(f"The stage {name} has no list of records.")
        return []
    good: list[Record] = [record for record in told if isinstance(record, dict)]
    if len(good) < len(told):
        count = len(told) - len(good)
        problems.append(f"{count} records of the stage {name} are no objects.")
    return good


def _maybe(record: Record, name: str) -> float | None:
    try:
        return number(record, name)
    except LackError:
        return None


def _object(path: Path, problems: list[str]) -> Record | None:
    """Return the object of a JSON file; None, and a sentence, where there is none."""
    name = path.name if path.parent.name != "stages" else f"stages/{path.name}"
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        problems.append(f"{name} is missing.")
        return None
    except (OSError, UnicodeDecodeError) as problem:
        problems.append(f"{name} cannot be read ({type(problem).__name__}).")
        return None
    if not content.strip():
        problems.append(f"{name} is empty.")
        return None
    try:
        told = json.loads(content)
    except ValueError as problem:
        problems.append(f"{name} is no whole JSON ({problem}).")
        return None
    if not isinstance(told, dict):
        problems.append(f"{name} holds no object.")
        return None
    return told
