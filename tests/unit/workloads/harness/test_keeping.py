"""Records say themselves what they are of, and none replaces another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sgl_tiered_workloads.harness import keeping


def test_a_record_says_what_it_is_of(tmp_path: Path) -> None:
    """Day, commit, source, command and machine, and no path of it."""
    (tmp_path / "product").mkdir()
    (tmp_path / "product/a.py").write_text("a = 1\n")
    facts = keeping.run_facts("make it", tmp_path, ["product"])
    assert len(facts["source"]) == 16
    assert facts["command"] == "make it"
    assert len(facts["date"].split("-")) == 3
    assert facts["machine"]["cores"] >= 1
    assert str(Path.home()) not in json.dumps(facts)
    (tmp_path / "product/a.py").write_text("a = 2\n")
    assert keeping.run_facts("", tmp_path, ["product"])["source"] != facts["source"]


def test_further_runs_stand_beside_the_first(tmp_path: Path) -> None:
    """And those of another source or name are not read with them."""
    folder = tmp_path / "records"
    for source, value in (("aa", 1), ("aa", 2), ("aa", 3), ("bb", 4)):
        keeping.keep_record(folder, "reuse", {"source": source, "value": value})
    keeping.keep_record(folder, "no-reuse", {"source": "aa", "value": 5})
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "no-reuse-aa.json",
        "reuse-aa-2.json",
        "reuse-aa-3.json",
        "reuse-aa.json",
        "reuse-bb.json",
    ]
    kept = keeping.read_kept(folder, "reuse", "aa")
    assert sorted(record["value"] for record in kept) == [1, 2, 3]


def test_a_record_without_a_source_is_refused(tmp_path: Path) -> None:
    """Nobody could say what it is of."""
    with pytest.raises(KeyError, match="source"):
        keeping.keep_record(tmp_path, "it", {"value": 1})
    assert list(tmp_path.iterdir()) == []
