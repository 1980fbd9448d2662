"""Starts SGLang servers by forking a process that has imported SGLang already.

A server by its command line is three processes or more, each of which imports the same
thousands of modules: 20 s of CPU time and more before the first of them does anything.
Here one process imports them once (``fork_image``), and every server is a fork of it.

It is for tests. ``fork_servers()`` makes every ``SglangServer`` of this process start
so, but those with another program than the usual one and those whose spec says
``fork=False``. Modules read variables of the environment when they are imported; so
there is one such process for each environment, names apart that are read later.

What differs: a forked main process has imported all that its children need before it
loads plugins (as a program that uses ``sglang.Engine`` has), and all processes have one
hash seed. So some tests of each kind of server keep the command line.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
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
    "sgl_tiered.engines.sglang.args",
    "sgl_tiered.engines.sglang.factory",
    "sgl_tiered_kernels.page_copy.cpu",
)
"""What a server imports in any case. None of them may import ``prometheus_client``,
which reads at import whether several processes share their metrics."""
_FREE_NAMES = (
    "SGL_TIERED_",
    "TIERED_",
    "PYTEST_",
    "HOST_IP",
    "SGLANG_HOST_IP",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
)
"""Variables that begin so are read when they are needed, not at import."""
_MOST_SERVERS = 2
"""Each holds 1 GB; more are kept only while they are in use."""
_RANK_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size", "--pp-size", "--dp-size")
_START_S = 300.0


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
        self._reads = threading.Lock()
        told = self._receive()
        if "pid" not in told:
            raise RuntimeError(f"the program ended with {told['code']} as it began")
        self.pid = int(told["pid"])

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
            try:
                readable, _, _ = select.select([self._owner], [], [], timeout)
            except ValueError:
                # Another thread has just read the code.
                readable = []
            with self._reads:
                if self.returncode is None and not readable:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                if self.returncode is None:
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
        env: the environment that they see; this process's own if None.

    Raises:
        RuntimeError: on entering: an import failed; says the end of what it printed.
    """

    def __init__(
        self, modules: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self._modules = tuple(modules)
        self._env = dict(os.environ if env is None else env)
        self._programs: list[ForkedProcess] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # One thread in the library of numpy: what runs at a fork is one thread only.
        env = {**self._env, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
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

    def is_used(self) -> bool:
        """Whether a program of it runs."""
        self._programs = [each for each in self._programs if each.poll() is None]
        return bool(self._programs)

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
        self._programs.append(ForkedProcess(ours, ["-m", module, *arguments]))
        return self._programs[-1]


class _Shared:
    """The fork servers of this process, one for each environment."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.lock = threading.Lock()
        """Servers are started by several threads at a time."""
        self._servers: dict[frozenset[tuple[str, str]], ForkServer] = {}

    def get(self, env: Mapping[str, str]) -> ForkServer:
        """Return the one whose imports saw this environment, started now if need be."""
        read = frozenset(
            (name, value)
            for name, value in env.items()
            if not name.startswith(_FREE_NAMES)
        )
        server = self._servers.pop(read, None)
        if server is not None and not server.is_running():
            server = None
        idle = [key for key, each in self._servers.items() if not each.is_used()]
        if server is None and idle and len(self._servers) >= _MOST_SERVERS:
            self._servers.pop(idle[0]).close()
        self._servers[read] = server or ForkServer(MODULES, env).__enter__()
        return self._servers[read]

    def close(self) -> None:
        """End all of them, and what they forked."""
        while self._servers:
            self._servers.popitem()[1].close()


_SHARED = _Shared()
atexit.register(_SHARED.close)


def fork_servers(wanted: bool = True) -> None:
    """Let the servers of this process be forked from now on, or started as usual.

    ``TIERED_FORK=0`` in the environment forbids it, to see whether it makes a
    difference.
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
    arguments = command[3:]
    num_spares = 1 + _num_ranks(arguments)
    with _SHARED.lock:
        return _SHARED.get(env).start(MODULE, arguments, log, env, num_spares)


def _num_ranks(arguments: Sequence[str]) -> int:
    """Return how many schedulers these flags start."""
    words = [part for word in arguments for part in word.split("=", 1)]
    count = 1
    for flag, value in itertools.pairwise(words):
        if flag in _RANK_FLAGS and value.isdigit():
            count *= int(value)
    return count
