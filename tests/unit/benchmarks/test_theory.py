"""The cache theory check says no when it should."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def theory(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("sim/theory.py")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A prompt of two blocks, twice: half of all tokens are hit."""
    row = {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [4, 5]}
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 2))
    return path


@pytest.mark.parametrize(
    ("lru", "opt", "ideal", "fine"),
    [
        (0.5, 0.5, 0.5, True),
        (0.4951, 0.5049, 0.4951, True),
        (0.494, 0.5, 0.5, False),
        (0.5, 0.506, 0.5, False),
        (0.5, 0.5, 0.506, False),
    ],
)
def test_each_ratio_counts(
    theory: ModuleType,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    lru: float,
    opt: float,
    ideal: float,
    fine: bool,
) -> None:
    """One ratio further off than 0.005 is enough: of LRU, of OPT, the ideal."""
    curve = {54: (0.5, 0.5), 100: (0.5, opt), 566: (lru, 0.5), 4566: (0.5, 0.5)}
    known = theory.Known(curve, ideal)
    monkeypatch.setattr(theory, "MOONCAKE", known)
    assert theory.check(trace, 512, with_served=False) is fine


def test_the_table_has_all_systems(
    theory: ModuleType, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exclusive, stack and served, then stack and OPT, find the half that is there."""
    theory.check(trace, 512, with_served=True)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| 54 |")]
    assert [row.count(" 0.5000 |") for row in rows] == [3, 2]


@pytest.mark.parametrize(
    ("text", "status"), [("{}", 2), ('{"hash_ids": [1]}', 2), (None, 1)]
)
def test_exit_status(
    theory: ModuleType,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
    status: int,
) -> None:
    """2 for a file that is no trace, 1 for another trace than the known ones."""
    if text is not None:
        trace.write_text(text)
    monkeypatch.setattr(sys, "argv", ["theory.py", str(trace), "--no-served"])
    assert theory.main() == status
