"""A forked program is what its command line would have started, without the imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sgl_tiered_workloads.fork_server import ForkServer
from sgl_tiered_workloads.processes import end_group, group_runs

# Starts as many processes as it is told, prints what each of them sees as JSON, then
# does as told.
PROGRAM = """
import json, multiprocessing, os, resource, signal, sys, time


def facts(writer):
    parent = multiprocessing.parent_process()
    writer.send({
        "pid": os.getpid(), "ppid": os.getppid(), "group": os.getpgid(0),
        "parent": parent and parent.pid, "argv": sys.argv[1:],
        "mark": os.environ.get("MARK"), "late": os.environ.get("LATE"),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "main": sys.modules["__main__"].__spec__ is not None,
        "imported": IMPORTED, "cwd": os.getcwd(),
    })
    writer.close()


def end_badly(number):
    os._exit(number)


def wait(writer):
    writer.send(os.getpid())
    time.sleep(600)


IMPORTED = "planted" in sys.modules

if __name__ == "__main__":
    what, count = sys.argv[1], int(sys.argv[2])
    multiprocessing.set_start_method("spawn", force=True)
    # Children get what holds when they start.
    os.environ["LATE"] = "yes"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    told = []
    if what == "facts":
        for number in range(count):
            reader, writer = multiprocessing.Pipe(duplex=False)
            child = multiprocessing.Process(target=facts, args=(writer,))
            child.start()
            writer.close()
            told.append(reader.recv())
            child.join()
            assert child.exitcode == 0, child.exitcode
        print(json.dumps([os.getpid(), told, "planted" in sys.modules]), flush=True)
    if what == "code":
        child = multiprocessing.Process(target=end_badly, args=(count,))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    if what == "wait":
        reader, writer = multiprocessing.Pipe(duplex=False)
        multiprocessing.Process(target=wait, args=(writer,), daemon=True).start()
        print(json.dumps(reader.recv()), flush=True)
        time.sleep(600)
    if what == "raise":
        raise ValueError("as it was told")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which the program and a module can be imported."""
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    (tmp_path / "planted.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    """A fork server with one module."""
    with ForkServer(["planted"]) as server:
        yield server


def started(server, folder, *arguments, num_spares=2, env=None):
    """Return the program, started with these arguments."""
    with (folder / "log").open("wb") as log:
        return server.start(
            "forked_program",
            [str(each) for each in arguments],
            log,
            {**os.environ, **(env or {})},
            num_spares,
        )


def line(folder):
    """Return what the program has printed as JSON."""
    return json.loads((folder / "log").read_text().splitlines()[-1])


def printed(folder, process):
    """Wait until the program has printed a whole line; return what it says."""
    while "\n" not in (folder / "log").read_text():
        assert process.poll() is None, (folder / "log").read_text()
    return line(folder)


@pytest.mark.parametrize("num_spares", [0, 2, 5])
def test_processes_see_what_spawned_ones_see(server, folder, num_spares):
    """Parent, group, environment, limits and arguments are the starter's, spare or not;
    what was imported is there in spares alone."""
    env = {"MARK": "this program"}
    process = started(server, folder, "facts", 3, num_spares=num_spares, env=env)
    assert process.wait(120) == 0, (folder / "log").read_text()
    main, children, has_planted = line(folder)
    assert main == process.pid
    assert has_planted
    assert [each["imported"] for each in children] == [
        number < num_spares for number in range(3)
    ]
    assert len({each["pid"] for each in children}) == 3
    limits = {each["files"] for each in children}
    assert len(limits) == 1
    for each in children:
        assert each["ppid"] == each["parent"] == each["group"] == main
        assert each["argv"] == ["facts", "3"]
        assert each["mark"] == "this program"
        assert each["late"] == "yes"
        assert each["cwd"] == str(folder)
        assert each["main"]
    assert "MARK" not in os.environ


def test_the_command_line_says_the_same(folder):
    """The program itself is right: started as usual it sees the same things."""
    command = [sys.executable, "-m", "forked_program", "facts", "1"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    main, (child,), has_planted = json.loads(done.stdout)
    assert not has_planted
    assert not child["imported"]
    assert child["ppid"] == child["parent"] == main
    assert child["argv"] == ["facts", "1"]
    assert child["late"] == "yes"
    assert child["main"]


@pytest.mark.parametrize("num_spares", [0, 1])
def test_exit_codes_pass_through(server, folder, num_spares):
    """A child's code reaches its parent, the parent's its starter."""
    process = started(server, folder, "code", 7, num_spares=num_spares)
    assert process.wait(60) == 7
    assert process.poll() == 7


def test_an_exception_ends_a_program_with_its_traceback(server, folder):
    """As the interpreter does: code 1, the traceback in the log."""
    process = started(server, folder, "raise", 0)
    assert process.wait(60) == 1
    assert "ValueError: as it was told" in (folder / "log").read_text()


def test_a_killed_group_is_gone_with_its_children(server, folder):
    """SIGKILL to the group ends spares and children; the code says which signal."""
    process = started(server, folder, "wait", 0)
    printed(folder, process)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    end_group(process, 1.0)
    assert not group_runs(process.pid)


def test_a_program_leads_its_group_when_its_id_is_known(folder):
    """However late it comes to that: a signal to the group reaches it at once."""
    slow = "os.setsid = lambda setsid=os.setsid: (time.sleep(0.2), setsid())"
    (folder / "slow.py").write_text(f"import os, time\n{slow}\n")
    with ForkServer(["slow"]) as server:
        process = started(server, folder, "wait", 0)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_children_outlive_no_killed_parent_as_spares(server, folder):
    """A spare that waits ends with the program, although nobody told it."""
    process = started(server, folder, "wait", 0, num_spares=3)
    child = printed(folder, process)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    os.kill(child, signal.SIGKILL)
    while group_runs(process.pid):
        pass


def test_programs_end_with_their_owner(folder):
    """Ending the fork server ends what it forked."""
    with ForkServer(["planted"]) as server:
        process = started(server, folder, "wait", 0)
        printed(folder, process)
    assert not server.is_running()
    assert process.wait(60) == -signal.SIGKILL
    while group_runs(process.pid):
        pass


def test_it_knows_whether_it_is_used(server, folder):
    """Used as long as a program of it runs."""
    assert not server.is_used()
    process = started(server, folder, "wait", 0)
    assert server.is_used()
    end_group(process, 0.0)
    assert not server.is_used()


def test_a_module_that_starts_a_thread_is_refused(folder):
    """A fork has one thread: such a module would not work there."""
    thread = "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    (folder / "threads.py").write_text(f"import threading, time\n{thread}\n")
    with (
        pytest.raises(RuntimeError, match="started threads"),
        ForkServer(["threads"]),
    ):
        pass


def test_a_missing_module_is_said():
    """The message has the import's error."""
    with (
        pytest.raises(RuntimeError, match="no_such_module"),
        ForkServer(["no_such_module"]),
    ):
        pass
