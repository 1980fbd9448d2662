"""Facts of the machine are read where they can be, and left out where not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from sgl_tiered_workloads.harness import machine

SMI = """\
#!/bin/sh
echo 'NVIDIA H200, 143771, 570.86.15, 5'
echo 'NVIDIA L20, [N/A], 570.86.15, 4'
"""


def with_program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for nvidia-smi first on the path."""
    program = folder / "nvidia-smi"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_accelerators_are_named_with_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is in bytes; a card that tells none is left out, not guessed."""
    with_program(tmp_path, SMI, monkeypatch)
    assert machine.machine_facts()["accelerators"] == [
        {
            "name": "NVIDIA H200",
            "memory_bytes": 143771 * 2**20,
            "driver": "570.86.15",
            "pcie_generation": "5",
        }
    ]


def test_a_driver_that_fails_means_no_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its complaint is no card."""
    failing = "#!/bin/sh\necho 'no devices, 1, 2, 3'\nexit 9\n"
    with_program(tmp_path, failing, monkeypatch)
    assert machine.machine_facts()["accelerators"] == []


def test_no_fact_names_a_place() -> None:
    """Records travel; folders and hosts stay at home."""
    facts = json.dumps([machine.machine_facts(), machine.versions()])
    assert str(Path.cwd()) not in facts
    assert socket.gethostname() not in facts
    assert machine.versions()["numpy"] != "absent"


def test_a_source_is_named_by_its_files(tmp_path: Path) -> None:
    """Contents and names of Python files in the folders count, nothing else does."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/one.py").write_text("1")
    before = machine.source_hash(tmp_path, ["a"])
    (tmp_path / "a/notes.md").write_text("1")
    (tmp_path / "b/two.py").write_text("1")
    assert machine.source_hash(tmp_path, ["a"]) == before
    (tmp_path / "a/one.py").write_text("2")
    changed = machine.source_hash(tmp_path, ["a"])
    (tmp_path / "a/one.py").rename(tmp_path / "a/two.py")
    assert len({before, changed, machine.source_hash(tmp_path, ["a"])}) == 3
    named = machine.source_hash(tmp_path, ["a"])
    (tmp_path / "a" / "cli").mkdir()
    (tmp_path / "a" / "cli" / "main.py").write_text("1")
    assert machine.source_hash(tmp_path, ["a"], ["a/cli"]) == named
    assert machine.source_hash(tmp_path, ["a"]) != named
