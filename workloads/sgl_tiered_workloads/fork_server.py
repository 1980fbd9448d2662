"""Starts SGLang servers by forking a process that has imported SGLang already.

A server by its command line is three processes or more, each of which imports the same
thousands of modules: 20 s of CPU time and more before the first of them does anything.
Here one process imports them once (``fork_image``), and every server is a fork of it.

It is for tests. ``fork_servers()`` makes every ``SglangServer`` of this process start so,
where that is the same thing: the usual program, and an environment that differs from
that of the first fork in names alone that nobody reads at import. Any other server, and
one whose spec says ``fork=False``, is started by its command line.

What differs: a forked main process has imported all that its children need before it
loads plugins (as a program that uses ``sglang.Engine`` has), and all processes have one
hash seed. So some tests of each kind of server keep the command line.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sgl_tiered_workloads.fork_image import _MESSAGE_BYTES

__all__ = ["ForkServer", "ForkedProcess", "fork_servers", "forked"]

MODULE = "sglang.launch_server"
MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sgl_tiered.engines.sglang.http",
    "sgl_tiered.engines.sglang.disagg.backend",
)
"""What a server imports in any case. None of them may import ``prometheus_client``,
which reads at import whether several processes share their metrics."""
_FREE_NAMES = ("SGL_TIERED_", "TIERED_", "PYTEST_")
"""Variables that begin so are read when they are needed, not at import."""
_RANK_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size", "--pp-size", "--dp-size")
_START_S = 300.0
_STEP_S = 0.25


class ForkedProcess:
    """A forked program, with what is used of ``subprocess.Popen``.

    Args:
        owner: tells the id, then the exit code; closing it kills the program.
        arguments: for messages.
    """

    def __init__(self, owner: socket.socket, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._owner = owner
        self.pid = int(self._receive()["pid"])

    def _receive(self) -> dict[str, Any]:
        data = self._owner.recv(_MESSAGE_BYTES)
        if data:
            told: dict[str, Any] = json.loads(data)
            return told
        if hasattr(self, "pid"):
            # Nobody is left who could say how it ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            return {"code": -signal.SIGKILL}
        raise RuntimeError("the fork server ended")

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, at most so many seconds, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            readable, _, _ = select.select([self._owner], [], [], timeout)
            if not readable:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._receive()["code"])
            self._owner.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal the program, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Owns the process that forks; a context manager that starts and ends it.

    Ending it ends all programs that it forked.

    Args:
        modules: imported once, before any fork.

    Raises:
        RuntimeError: on entering: an import failed; says the end of what it printed.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self.environment = dict(os.environ)
        self._modules = tuple(modules)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # One thread in the library of numpy: what runs at a fork is one thread only.
        env = {**self.environment, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "sgl_tiered_workloads.fork_image"]
        with theirs, tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            self._control = control
            readable, _, _ = select.select([control], [], [], _START_S)
            if not readable or not control.recv(_MESSAGE_BYTES):
                self.close()
                log.seek(0)
                said = log.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"the fork server did not start:\n{said}")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all that it forked; does nothing when not running."""
        process, control = self._process, self._control
        self._process = self._control = None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def is_running(self) -> bool:
        """Whether programs can be started."""
        return self._process is not None and self._process.poll() is None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        log: IO[bytes],
        env: Mapping[str, str],
        num_spares: int = 0,
    ) -> ForkedProcess:
        """Start ``python -m module arguments`` in a session of its own.

        Args:
            module: to run as the main one.
            arguments: for it.
            log: takes its output and that of its children.
            env: the whole environment.
            num_spares: how many processes it will spawn; more are spawned as usual.
        """
        if self._control is None:
            raise RuntimeError("the fork server does not run")
        request = {
            "module": module,
            "arguments": list(arguments),
            "env": dict(env),
            "cwd": os.getcwd(),
            "num_spares": num_spares,
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            data = json.dumps(request).encode()
            socket.send_fds(self._control, [data], [theirs.fileno(), log.fileno()])
        return ForkedProcess(ours, ["-m", module, *arguments])


class _Shared:
    """The fork server of this process, if it is to have one."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.server: ForkServer | None = None

    def get(self) -> ForkServer:
        """Return it, started now if it does not run."""
        if self.server is None or not self.server.is_running():
            self.close()
            self.server = ForkServer().__enter__()
        return self.server

    def close(self) -> None:
        """End it."""
        server, self.server = self.server, None
        if server is not None:
            server.close()


_SHARED = _Shared()
atexit.register(_SHARED.close)


def fork_servers(wanted: bool = True) -> None:
    """Let the servers of this process be forked where that makes no difference.

    ``TIERED_FORK=0`` in the environment forbids it, to see whether it does.
    """
    _SHARED.is_wanted = wanted and os.environ.get("TIERED_FORK") != "0"
    if not _SHARED.is_wanted:
        _SHARED.close()


def forked(
    command: Sequence[str], log: IO[bytes], env: Mapping[str, str]
) -> ForkedProcess | None:
    """Fork a server; None where it has to be started by its command line."""
    usual = [sys.executable, "-m", MODULE]
    if not _SHARED.is_wanted or list(command[:3]) != usual:
        return None
    server = _SHARED.get()
    if _fixed({**server.environment, "PYTHONUNBUFFERED": "1"}) != _fixed(env):
        return None
    arguments = command[3:]
    return server.start(MODULE, arguments, log, env, 1 + _num_ranks(arguments))


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import may read."""
    ignored = {"_", "PYTHONDONTWRITEBYTECODE"}
    return {
        name: value
        for name, value in env.items()
        if not name.startswith(_FREE_NAMES) and name not in ignored
    }


def _num_ranks(arguments: Sequence[str]) -> int:
    """Return how many schedulers these flags start."""
    words = [part for word in arguments for part in word.split("=", 1)]
    count = 1
    for flag, value in zip(words, words[1:], strict=False):
        if flag in _RANK_FLAGS:
            count *= int(value)
    return count
