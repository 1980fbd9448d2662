"""What the processes of a run of the tests share: made once, by the first to ask."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from sgl_tiered_workloads.fork_server import _FREE_NAMES, ForkServer
from sgl_tiered_workloads.processes import signal_group

__all__ = ["SharedForkServer", "recorded_once", "run_folder"]

T = TypeVar("T")
_END_S = 10.0
_OUTLIVING: list[object] = []
"""Processes that serve others when who started them has ended."""


def run_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of this run that all its processes see."""
    folder = factory.getbasetemp()
    # A process of several has a folder of its own in the run's.
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold what a file stands for, against all processes and threads."""
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def recorded_once(file: Path, record: Callable[[], T]) -> T:
    """Return what a file has; the first process to ask records it, others wait."""
    with _alone(file):
        if not file.exists():
            content = pickle.dumps(record())
            file.write_bytes(content)
        found: T = pickle.loads(file.read_bytes())
    return found


class SharedForkServer(ForkServer):
    """A fork server whose process serves all processes of a run.

    Imports take 20 s of CPU time, and what was imported holds 1 GB. So the first that
    asks starts the process, and hands the socket on which it listens to the others:
    messages of several senders come in one by one. The process ends when the last of
    them has closed it; a program ends with the one that started it.

    Args:
        folder: of the run.
        modules: imported once, before any fork.
        env: the environment that they see; this process's own if None.

    Raises:
        RuntimeError: on entering: an import failed; says the end of what it printed.
    """

    def __init__(
        self,
        folder: Path,
        modules: Sequence[str],
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(modules, env)
        read = sorted(
            pair for pair in self._env.items() if not pair[0].startswith(_FREE_NAMES)
        )
        what = hashlib.sha256(json.dumps([self._modules, read]).encode()).hexdigest()
        self._path = folder / f"image-{what[:12]}"
        self._listener: socket.socket | None = None
        self._is_shared = False

    def __enter__(self) -> SharedForkServer:
        with _alone(self._path):
            self._control = self._handed()
            self._is_shared = self._control is not None
            if self._control is None:
                super().__enter__()
                self._listener = self._listening()
        return self

    def _handed(self) -> socket.socket | None:
        """Return the socket of a process that is there already."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            try:
                asking.connect(str(self._path))
                _, fds, _, _ = socket.recv_fds(asking, 1, 1)
            except (FileNotFoundError, ConnectionError):
                return None
        if not fds:
            return None
        control = socket.socket(fileno=fds[0])
        control.set_inheritable(False)
        if _has_ended(control):
            control.close()
            return None
        return control

    def _listening(self) -> socket.socket:
        """Hand the socket out in a thread, from now on."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._path))
        listener.listen()
        threading.Thread(target=self._hand_out, args=(listener,), daemon=True).start()
        return listener

    def _hand_out(self, listener: socket.socket) -> None:
        # Closing it ends the wait.
        with suppress(OSError):
            while True:
                asked, _ = listener.accept()
                with asked:
                    control = self._control
                    if control is not None:
                        self._is_shared = True
                        socket.send_fds(asked, [b"1"], [control.fileno()])

    def is_running(self) -> bool:
        """Whether programs can be started."""
        return self._control is not None and not _has_ended(self._control)

    def close(self) -> None:
        """End what it forked for this process, and the process if no other has it."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for program in self._programs:
            if program.poll() is None:
                signal_group(program, signal.SIGKILL)
                program.wait(_END_S)
        self._programs = []
        if self._is_shared and self._control is not None:
            self._control.close()
            self._control = None
            _OUTLIVING.append(self._process)
        else:
            super().close()


def _has_ended(control: socket.socket) -> bool:
    """Whether the process at the other end is gone: it says nothing after its start."""
    readable, _, _ = select.select([control], [], [], 0.0)
    return bool(readable)
