"""The processes of a run share one process that forks, and what is recorded once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sgl_tiered_workloads.fork_server import ForkedProcess
from sgl_tiered_workloads.processes import group_runs

from tests.shared_run import SharedForkServer, recorded_once

PROGRAM = """
import os, time
print(os.getppid(), flush=True)
time.sleep(600)
"""
OTHER = """
import sys, time
from pathlib import Path
from tests.shared_run import SharedForkServer
folder = Path(sys.argv[1])
server = SharedForkServer(folder, ["planted"]).__enter__()
with (folder / "other").open("wb") as log:
    import os
    print(server.start("shared_program", [], log, os.environ).pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, from which a program and a module can be imported."""
    (tmp_path / "shared_program.py").write_text(PROGRAM)
    (tmp_path / "planted.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    # Where they are missing an interpreter may set them, for its children too.
    for name, value in (("LC_CTYPE", "C.UTF-8"), ("LINES", "24"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    return tmp_path


def started(server: SharedForkServer, folder: Path) -> tuple[ForkedProcess, int]:
    """Return a program that waits, and who forked it."""
    file = folder / "log"
    with file.open("wb") as log:
        process = server.start("shared_program", [], log, os.environ)
    while "\n" not in file.read_text():
        assert process.poll() is None, file.read_text()
    return process, int(file.read_text())


def test_all_are_forked_by_one_process_that_outlives_its_starter(folder: Path) -> None:
    """Each ends its own programs alone; with the last one the process ends."""
    with SharedForkServer(folder, ["planted"]) as second_last:
        pass
    first = SharedForkServer(folder, ["planted"]).__enter__()
    with SharedForkServer(folder, ["planted"]) as second:
        of_first, image = started(first, folder)
        of_second, same = started(second, folder)
        assert same == image
        first.close()
        assert of_first.wait(60) == -signal.SIGKILL
        assert not first.is_running()
        assert second.is_running()
        assert of_second.poll() is None
        assert started(second, folder)[1] == image
    assert not second_last.is_running()
    while group_runs(of_second.pid) or Path(f"/proc/{image}/exe").exists():
        pass


def test_other_imports_or_another_environment_are_another_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that are read later make no difference."""
    (folder / "other_planted.py").write_text("")
    with SharedForkServer(folder, ["planted"]) as first:
        _, image = started(first, folder)
        with SharedForkServer(folder, ["other_planted"]) as second:
            assert started(second, folder)[1] != image
        monkeypatch.setenv("PYTEST_OF_ANOTHER", "1")
        with SharedForkServer(folder, ["planted"]) as third:
            assert started(third, folder)[1] == image
        monkeypatch.setenv("READ_AT_IMPORT", "1")
        with SharedForkServer(folder, ["planted"]) as fourth:
            assert started(fourth, folder)[1] != image


def test_a_process_that_is_gone_is_replaced(folder: Path) -> None:
    """Who asks next gets a new one; who has the old one is told that it has ended."""
    with SharedForkServer(folder, ["planted"]) as first:
        _, image = started(first, folder)
        os.kill(image, signal.SIGKILL)
        while first.is_running():
            pass
        with SharedForkServer(folder, ["planted"]) as second:
            assert second.is_running()
            assert started(second, folder)[1] != image


def test_programs_end_with_the_process_that_started_them(folder: Path) -> None:
    """However that ends; those of others stay."""
    with SharedForkServer(folder, ["planted"]) as server:
        ours, image = started(server, folder)
        with subprocess.Popen(
            [sys.executable, "-c", OTHER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        ) as other:
            assert other.stdout is not None
            theirs = int(other.stdout.readline())
            text = folder / "other"
            while "\n" not in text.read_text():
                assert group_runs(theirs)
            assert int(text.read_text()) == image
            other.kill()
        while group_runs(theirs):
            pass
        assert ours.poll() is None


def test_what_is_recorded_once_is_recorded_by_the_first(tmp_path: Path) -> None:
    """And again where the first one failed."""
    asked = []

    def record(number: int) -> Callable[[], int]:
        def tell() -> int:
            asked.append(number)
            if number == 0:
                raise ValueError("not this time")
            return number

        return tell

    file = tmp_path / "told.pickle"
    with pytest.raises(ValueError, match="not this time"):
        recorded_once(file, record(0))
    assert [recorded_once(file, record(number)) for number in (1, 2)] == [1, 1]
    assert asked == [0, 1]
