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


def test_a_hash_of_source_follows_names_and_contents(tmp_path: Path) -> None:
    """And nothing else: neither where the checkout lies, nor files of other kinds."""
    found = []
    for place, (name, text) in enumerate(
        [("a.py", "1"), ("a.py", "1"), ("b.py", "1"), ("a.py", "2")]
    ):
        folder = tmp_path / str(place) / "package"
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / "notes.txt").write_text(str(place))
        found.append(machine.source_hash(folder))
    assert found[0] == found[1]
    assert len(set(found)) == 3
