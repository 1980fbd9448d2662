"""The prequential comparison of length predictors counts what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from sgl_tiered.policies.length.base import LengthFacts
from sgl_tiered.policies.length.oracle import OracleLength


@pytest.fixture
def lengths(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("sim/lengths.py")


def items(module: ModuleType, outputs: list[int], *, said: bool = False) -> list:
    return [
        module.Item(LengthFacts(10, 1 << 18, said_tokens=n if said else 0), n)
        for n in outputs
    ]


def test_nobody_peeks(lengths: ModuleType) -> None:
    """The first answer is predicted before it is seen, a later one with those before.

    All but the first are alike, so the prior is off exactly while the lag lasts.
    """
    row = lengths.run(items(lengths, [50] * 20), lengths.PriorLengths(), 0)
    assert row["covered"] == 1.0
    assert row["mean_error"] == pytest.approx(
        (lengths.CONSTANT_TOKENS - 50) / 20, abs=0.1
    )
    late = lengths.run(items(lengths, [50] * 20), lengths.PriorLengths(), 5)
    assert late["mean_error"] == pytest.approx(
        6 * (lengths.CONSTANT_TOKENS - 50) / 20, abs=0.1
    )


def test_the_oracle_is_right_everywhere(lengths: ModuleType) -> None:
    """No error, everything covered, every class foretold."""
    outputs = [10, 40, 90, 200, 1000] * 60
    row = lengths.run(items(lengths, outputs, said=True), OracleLength(), 0)
    assert (row["covered"], row["error"], row["class"]) == (1.0, 0.0, 1.0)
    assert row["lower"] == 1.0
    assert row["covered_at_100"] == 1.0


def test_the_prior_knows_class_frequencies_only(lengths: ModuleType) -> None:
    """Of five lengths that come equally often it foretells one."""
    outputs = [10, 40, 90, 200, 1000] * 100
    row = lengths.run(items(lengths, outputs), lengths.PriorLengths(), 0)
    assert row["class"] == pytest.approx(0.2, abs=0.03)


def test_traces_become_a_table_and_one_object(
    lengths: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line is JSON with every trace; a file of no known format is refused."""
    azure = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{i % 60:02d}.0000000,100,{20 + i}" for i in range(30)]
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    mooncake = tmp_path / "mooncake.jsonl"
    row = {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [4, 5]}
    mooncake.write_text("\n".join([json.dumps(row)] * 9))
    monkeypatch.setattr(sys, "argv", ["lengths.py", str(azure), str(mooncake)])
    assert lengths.main() == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(summary["traces"]) == {"azure.csv", "mooncake.jsonl"}
    assert "online, groups" in summary["traces"]["mooncake.jsonl"]
    assert "online, groups" not in summary["traces"]["azure.csv"]

    strange = tmp_path / "strange.jsonl"
    strange.write_text('{"a": 1}\n')
    monkeypatch.setattr(sys, "argv", ["lengths.py", str(strange)])
    assert lengths.main() == 2
    assert "none of the known formats" in capsys.readouterr().err
