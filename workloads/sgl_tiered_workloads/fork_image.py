"""The process that has imported a program's modules and forks programs from there.

Run by ``fork_server.ForkServer``; nobody else talks to it. It imports the modules that
it is told, starts no thread and calls nothing of theirs, so what it forks is as blank
as a program that has just imported the same.

A program becomes a child of this process, with a session, an environment and files of
its own, and runs ``python -m MODULE ARGUMENTS``. SGLang's program spawns processes
with ``multiprocessing``, which would import everything again. So before it runs a line,
the program forks some *spares*: blank children that wait. ``Process.start`` then hands
what ``spawn`` would have sent to a new interpreter to a spare, which goes on exactly as
that one does: same parent, same preparation, same pickled object. Without a spare left
``Process.start`` does what it always did.

What a spare took over at the fork and spawn would have taken later is sent along: the
environment, the working directory and the limits of resources.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pickle
import resource
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    process,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from pathlib import Path
from typing import Any, cast

__all__ = ["main"]

_MESSAGE_BYTES = 1 << 17
_MOST_FDS = 64
_LIMITS = [getattr(resource, name) for name in dir(resource) if name[:7] == "RLIMIT_"]

Task = Callable[[], None]
"""What a forked process does once the stack of its parent is left behind."""


@dataclass(slots=True)
class _Spare:
    """A blank child of a program: its id, and the socket on which it waits."""

    pid: int
    socket: socket.socket


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one message and its file descriptors; empty at the end."""
    data, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MOST_FDS)
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds


def as_file(data: bytes) -> int:
    """Return a descriptor from which ``data`` can be read."""
    fd = os.memfd_create("message")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _Image:
    """Forks programs and says how they end.

    Args:
        control: requests come in here; when it closes, all programs are killed.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._programs: dict[int, tuple[int, socket.socket]] = {}
        """By the descriptor that tells a program's end: its id and its owner."""

    def serve(self) -> Task | None:
        """Serve until the control closes; in a forked program, return what it does."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    data, fds = receive(self._control)
                    if not data:
                        self._kill_all()
                        return None
                    task = self._fork(json.loads(data), fds)
                    if task is not None:
                        return task
                elif key.data is None:
                    self._ended(key.fd)
                else:
                    # Only its end is ever read here: the owner is gone or gave it up.
                    if key.data in self._programs:
                        self._kill(key.data)
                        self._selector.unregister(key.fileobj)

    def _fork(self, request: dict[str, Any], fds: Sequence[int]) -> Task | None:
        owner_fd, log_fd = fds
        owner = socket.socket(fileno=owner_fd)
        pid = os.fork()
        if pid == 0:
            for _, other in self._programs.values():
                other.close()
            for pidfd in self._programs:
                os.close(pidfd)
            self._selector.close()
            self._control.close()
            # First, so that the id stands for a group as soon as the owner has it.
            os.setsid()
            with contextlib.suppress(OSError):
                owner.send(json.dumps({"pid": os.getpid()}).encode())
            owner.close()
            return _become(request, log_fd)
        os.close(log_fd)
        pidfd = os.pidfd_open(pid)
        self._programs[pidfd] = (pid, owner)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._selector.register(owner, selectors.EVENT_READ, data=pidfd)
        return None

    def _ended(self, pidfd: int) -> None:
        pid, owner = self._programs.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(KeyError):
            self._selector.unregister(owner)
        with contextlib.suppress(OSError):
            owner.send(json.dumps({"code": code}).encode())
        owner.close()
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def _kill(self, pidfd: int) -> None:
        pid, _ = self._programs[pidfd]
        # The program may not lead its group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _kill_all(self) -> None:
        for pidfd in list(self._programs):
            self._kill(pidfd)
            self._ended(pidfd)


def _become(request: dict[str, Any], log_fd: int) -> Task:
    """Make this process a program of its own; return what it, or a spare, does."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null)
    os.close(log_fd)
    _set_environment(request["env"])
    os.chdir(request["cwd"])
    process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]
    spares: list[_Spare] = []
    for _ in range(request["num_spares"]):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for spare in spares:
                spare.socket.close()
            ours.close()
            return lambda: _wait_for_work(theirs)
        theirs.close()
        spares.append(_Spare(pid, ours))

    def run() -> None:
        _use_spares(spares)
        sys.argv = ["-m", *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)

    return run


def _set_environment(env: dict[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)


def _use_spares(spares: list[_Spare]) -> None:
    """Let ``Process.start`` of the spawn method take a spare while there is one."""

    usual = spawn.get_executable()

    def start(new: Any) -> Any:
        # Some are to run under another program, such as numactl.
        if spares and spawn.get_executable() == usual:
            return _SparePopen(new, spares.pop(0))
        return popen_spawn_posix.Popen(new)

    spawned: Any = context.SpawnProcess
    spawned._Popen = staticmethod(start)


class _SparePopen(popen_spawn_posix.Popen):
    """A process that a spare becomes. Descriptors are passed as a fork server does."""

    DupFd = cast(Any, popen_forkserver)._DupFd
    _fds: list[int]

    def __init__(self, new: Any, spare: _Spare) -> None:
        self._spare = spare
        super().__init__(new)

    def duplicate_for_child(self, fd: int) -> int:
        """Return the number by which the child finds a descriptor."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, new: Any) -> None:
        preparation = spawn.get_preparation_data(new._name)
        packed = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, packed)
            reduction.dump(new, packed)
        finally:
            context.set_spawning_popen(None)
        self.pid = self._spare.pid
        self.sentinel = self._spare.socket.fileno()
        for limit in _LIMITS:
            resource.prlimit(self.pid, limit, resource.getrlimit(limit))
        os.sched_setaffinity(self.pid, os.sched_getaffinity(0))
        state = pickle.dumps((dict(os.environ), os.getcwd()))
        files = [as_file(state), as_file(packed.getvalue())]
        tracker = cast(int, resource_tracker.getfd())
        fds = [*files, tracker, *self._fds]
        socket.send_fds(self._spare.socket, [b"start"], fds)
        for fd in files:
            os.close(fd)
        # The socket closes with this object, like the pipes of the original.
        self.finalizer = util.Finalize(self, self._spare.socket.close)


def _wait_for_work(connection: socket.socket) -> None:
    """Become the process that the parent starts; end with the parent before that."""
    with contextlib.suppress(KeyboardInterrupt):
        data, fds = receive(connection)
        if data:
            _work(connection, fds)
    os._exit(0)


def _work(connection: socket.socket, fds: list[int]) -> None:
    state, packed, tracker, *passed = fds
    with open(state, "rb") as file:
        environment, cwd = pickle.load(file)
    _set_environment(environment)
    os.chdir(cwd)
    cast(Any, resource_tracker)._resource_tracker._fd = tracker
    cast(Any, forkserver)._forkserver._inherited_fds = passed
    # It is readable when the parent has ended, like the pipe of the original.
    sys.exit(cast(Any, spawn)._main(packed, connection.fileno()))


def main(arguments: Sequence[str]) -> None:
    """Serve on the descriptor named first, with the modules named after it."""
    control = socket.socket(fileno=int(arguments[0]))
    for name in arguments[1:]:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = [Path(f"/proc/self/task/{each}/comm").read_text() for each in threads]
        raise RuntimeError(f"an import started threads, which no fork keeps: {names}")
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    task = _Image(control).serve()
    if task is not None:
        task()


if __name__ == "__main__":
    main(sys.argv[1:])
