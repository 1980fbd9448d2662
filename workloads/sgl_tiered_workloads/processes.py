"""Processes that programs and tests own: a log each, a group each, ended as a whole.

A process gets a session and so a process group of its own: a Ctrl-C in the terminal
reaches its owner first, who ends it in order, and a signal to the group reaches all of
its children. Processes still running at interpreter exit are ended too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

__all__ = [
    "Service",
    "ServiceError",
    "Started",
    "end_group",
    "group_runs",
    "signal_group",
]

_KILL_S = 5.0
"""A killed process frees its memory first: seconds, for a large pool."""
_POLL_S = 0.1
_TAIL_LINES = 20


class Started(Protocol):
    """A process that leads a group: a ``subprocess.Popen``, or what is used of one."""

    @property
    def pid(self) -> int:
        """Of the process and of its group."""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; ``subprocess.TimeoutExpired`` if that is too long."""

    def terminate(self) -> None:
        """Send SIGTERM."""


class ServiceError(RuntimeError):
    """A process ended, or did not get ready in time; says the end of its log."""


def signal_group(process: Started, number: int) -> None:
    """Send a signal to a process that leads a group, and to all of that group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_group(process: Started, grace_s: float) -> None:
    """End a process that leads a group, then whatever is left of the group.

    Args:
        process: started with ``start_new_session``.
        grace_s: time between SIGTERM and SIGKILL.
    """
    # Only the root gets SIGTERM: SGLang's ends its children itself, and takes a
    # scheduler that dies before it for a crash, with 5 s of diagnostics.
    process.terminate()
    # What was stopped could not take the signal, and would keep its children waiting.
    signal_group(process, signal.SIGCONT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s)
    # start_new_session made the group's id the root's id. The group lives as
    # long as any member, so what is still there is the process's own.
    signal_group(process, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _KILL_S
    while group_runs(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def group_runs(group: int) -> bool:
    """Whether a process of the group still runs; zombies do not count.

    Orphans are reaped by the system's first process, which in a container may
    never do it, so asking the group itself would not tell.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(process_group) == group and state not in "ZX":
            return True
    return False


_RUNNING: weakref.WeakSet[Service] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for service in list(_RUNNING):
        service.stop(grace_s=1.0)


class Service:
    """A process that is no SGLang server: a router, a registry, a forwarder.

    Args:
        name: of the log file.
        command: to run.
        log_dir: the log is appended to ``<name>.log`` in it, over restarts.
        is_ready: asked until it says yes; exceptions of the network count as no.
        start_timeout_s: how long that may take.
        url: where it can be asked; empty where it cannot.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_dir: Path,
        is_ready: Callable[[], bool] = lambda: True,
        start_timeout_s: float = 120.0,
        url: str = "",
    ) -> None:
        self.name = name
        self.url = url
        self.command = tuple(command)
        self.log_path = log_dir / f"{name}.log"
        self._is_ready = is_ready
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id; None when not running."""
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """Return how the process ended; None while it runs or was stopped."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            ServiceError: it ended, or was not ready in time. It is ended.
        """
        if self._process is not None:
            raise RuntimeError(f"{self.name} is already running")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write((" ".join(self.command) + "\n").encode())
            log.flush()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        _RUNNING.add(self)
        try:
            self._wait(self._process)
        except BaseException:
            self.stop(grace_s=1.0)
            raise

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        if self._process is not None:
            signal_group(self._process, number)

    def stop(self, grace_s: float = 10.0) -> None:
        """End it and wait for it; does nothing when not running."""
        process, self._process = self._process, None
        _RUNNING.discard(self)
        if process is not None:
            end_group(process, grace_s)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        if not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            if process.poll() is not None:
                raise ServiceError(
                    f"{self.name} ended with code {process.returncode}:\n"
                    f"{self.log_tail()}"
                )
            with contextlib.suppress(OSError):
                if self._is_ready():
                    return
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{self.name} was not ready in {self._start_timeout_s:.0f} s:\n"
                    f"{self.log_tail()}"
                )
            time.sleep(_POLL_S)
