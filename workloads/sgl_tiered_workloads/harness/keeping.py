"""Keeps what a run found as a file that says itself what it is of.

Every program that measures keeps its records so: ``NAME-SOURCE.json``, with ``-2``,
``-3`` and so on behind it for further runs on the same source. ``make results`` makes
the figures of README and docs from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.harness.machine import (
    NOT_IN_SERVERS,
    commit,
    is_dirty,
    machine_facts,
    source_hash,
    versions,
)

__all__ = ["keep_record", "read_kept", "run_facts"]


def run_facts(
    command: str,
    root: Path,
    sources: Iterable[str],
    without: Iterable[str] = NOT_IN_SERVERS,
) -> dict[str, Any]:
    """Return what a record says of its run: command, commit, source, machine, and when.

    ``date`` and ``time`` are those of this call, in UTC.

    Args:
        command: that makes such a record; no paths of the machine in it.
        root: of the checkout.
        sources: folders and files in it whose source decides what is measured.
        without: what of these does not count.
    """
    now = datetime.now(UTC)
    return {
        "command": command,
        "date": now.date().isoformat(),
        "time": now.strftime("%H:%M:%S"),
        "commit": commit(),
        "dirty": is_dirty(),
        "source": source_hash(root, sources, without),
        "versions": versions(),
        "machine": machine_facts(),
    }


def keep_record(folder: Path, name: str, record: Mapping[str, Any]) -> Path:
    """Write a record that has ``run_facts`` beside those already kept; return its file.

    Raises:
        KeyError: the record names no source.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    stem, number = f"{name}-{record['source']}", 1
    while True:
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return path


def read_kept(folder: Path, name: str, source: str) -> list[dict[str, Any]]:
    """Return the records of that name and source, in the order of their files."""
    return [
        json.loads(path.read_text())
        for path in sorted(folder.glob(f"{name}-{source}*.json"))
    ]
