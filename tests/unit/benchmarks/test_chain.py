"""The check of a chain against the theory says no when it should."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SIZES = "0.4,0.7,1.4,2.9"
"""Five, ten, twenty and 43 blocks of 512 tokens at 131,072 B, rounded."""


@pytest.fixture
def chain(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("sim/chain.py")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts of three blocks that come again after 0, 2, 4 and 13 others."""
    names = [0, 0, 1, 2, 3, 1, *range(4, 9), 4, *range(9, 23), 9]
    rows = [
        {
            "timestamp": time,
            "input_length": 1500,
            "output_length": 9,
            "hash_ids": [3 * name, 3 * name + 1, 3 * name + 2],
        }
        for time, name in enumerate(names)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def run(
    chain: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str
) -> int:
    monkeypatch.setattr(sys, "argv", ["chain.py", str(path), *flags])
    status: int = chain.main()
    return status


def test_every_tier_hits_as_the_theory_says(
    chain: ModuleType,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 0, hits in each tier, and all policies in the figures."""
    assert run(chain, trace, monkeypatch, "--sizes-gb", SIZES) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["worst_points"] < 1e-6
    assert all(
        figures["served"][tier] > 0 for tier in ("device", "host", "cxl", "disk")
    )
    assert set(figures["admissions"]) == {"auto", "all", "second-hit", "reuse"}
    assert (
        figures["admissions"]["second-hit"]["tb_written"]
        < figures["admissions"]["all"]["tb_written"]
    )


def test_a_tier_that_is_off_fails(
    chain: ModuleType, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that serves the host's pages from CXL exits with 1."""
    real = chain.by_tier

    def swapped(*args: object) -> list[float]:
        device, host, cxl, disk = real(*args)
        return [device, host - 0.03, cxl + 0.03, disk]

    monkeypatch.setattr(chain, "by_tier", swapped)
    assert run(chain, trace, monkeypatch, "--sizes-gb", SIZES) == 1


def test_a_tier_may_be_left_out(
    chain: ModuleType,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without CXL the table has three tiers."""
    assert run(chain, trace, monkeypatch, "--sizes-gb", "0.4,0.7,0,2.9") == 0
    assert "| token hits | device | host | disk | all |" in capsys.readouterr().out


def test_what_is_no_trace_is_refused(
    chain: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2."""
    path = tmp_path / "none.jsonl"
    path.write_text("{}")
    assert run(chain, path, monkeypatch) == 2
