"""Starts an SGLang server as a subprocess and stops all of it.

The server runs in a process group of its own, so that a Ctrl-C in the terminal
reaches us first and we end it in order: SIGTERM to the root, then SIGKILL to
whatever is left of the group. Servers still running at interpreter exit are
ended too. Flags are data: a list of strings that goes to
``sglang.launch_server`` as it is. Not thread-safe; one owner per server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np

from sgl_tiered_workloads.fork_server import forked
from sgl_tiered_workloads.processes import Started, end_group, signal_group

__all__ = [
    "ServerSpec",
    "ServerStartError",
    "SglangServer",
    "exit_on_signals",
    "free_port",
    "shuffled_ports",
]

_HOST = "127.0.0.1"
_LOG_TAIL_LINES = 40
_LINE_CHARS = 400
"""SGLang logs its several hundred arguments in one line."""
_FIRST_PORT = 10_000
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_END_PORT = 32_768
_TAKEN = b"error while attempting to bind on address"
"""In the log of a server whose port somebody else has; some of it may run on."""
_POLL_S = 0.25
_PROGRESS_S = 5.0

Say = Callable[[str], None]


class ServerStartError(RuntimeError):
    """The server died or did not get ready in time.

    Attributes:
        exit_code: of the process; None if it still ran at the time-out.
        log_tail: last lines of its log.
    """

    def __init__(self, reason: str, exit_code: int | None, log_tail: str) -> None:
        super().__init__(f"{reason}\n--- end of the server's log ---\n{log_tail}")
        self.exit_code = exit_code
        self.log_tail = log_tail


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How to start one server.

    Attributes:
        name: appears in progress lines and in the log file's name.
        model: folder of the model.
        flags: further arguments of ``sglang.launch_server``.
        env: variables set over the caller's environment; None removes one.
        program: what is run, before the arguments; tests put a stand-in here.
        api_key: that the server demands, and that is sent with every request to it.
        fork: whether a fork server may start it, where the process has one.
    """

    name: str
    model: Path
    flags: tuple[str, ...] = ()
    env: Mapping[str, str | None] = field(default_factory=dict)
    program: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server")
    api_key: str = ""
    fork: bool = True

    def command(self, port: int) -> list[str]:
        """Return the whole command line for ``port``."""
        address = ["--host", _HOST, "--port", str(port)]
        key = ["--api-key", self.api_key] if self.api_key else []
        model = ["--model-path", str(self.model)]
        return [*self.program, *model, *address, *key, *self.flags]

    def headers(self) -> dict[str, str]:
        """Return the headers of a request to this server."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


def shuffled_ports(seed: int | None = None) -> Iterator[int]:
    """Return ports in random order, so that two programs at once do not choose alike.

    A server may bind its port half a minute after it was told. So they come from below
    the range that the system gives to outgoing connections.

    Args:
        seed: of the order; None for another one each time.
    """
    end = _DEFAULT_END_PORT
    with contextlib.suppress(OSError, ValueError, IndexError):
        end = int(_PORT_RANGE.read_text().split()[0])
    is_wide = end - _FIRST_PORT > 1_000
    ports = np.arange(_FIRST_PORT, end if is_wide else 65_536)
    return iter(np.random.default_rng(seed).permutation(ports).tolist())


def free_port(candidates: Iterable[int] | None = None) -> int:
    """Return a port of this machine that nobody listens on now.

    Args:
        candidates: ports to try in order; those of ``shuffled_ports`` if None.

    Raises:
        OSError: every candidate is taken.
    """
    for port in shuffled_ports() if candidates is None else candidates:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe,
            contextlib.suppress(OSError),
        ):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
            return int(probe.getsockname()[1])
    raise OSError("no free port among the candidates")


_RUNNING: weakref.WeakSet[SglangServer] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for server in list(_RUNNING):
        server.stop(grace_s=2.0)


def exit_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that servers are ended too.

    Call it once from the main thread of a program that owns servers.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


class SglangServer:
    """One running server; a context manager that starts and stops it.

    Args:
        spec: what to start.
        log_dir: the log goes to ``<name>-<port>.log`` in it.
        port: where to listen; a free one by default.
        start_timeout_s: how long it may take until it answers.
        say: takes progress lines.
    """

    def __init__(
        self,
        spec: ServerSpec,
        log_dir: Path,
        port: int | None = None,
        start_timeout_s: float = 600.0,
        say: Say = print,
    ) -> None:
        self.spec = spec
        self.port = free_port() if port is None else port
        self.log_path = log_dir / f"{spec.name}-{self.port}.log"
        self.url = f"http://{_HOST}:{self.port}"
        self._start_timeout_s = start_timeout_s
        self._say = say
        self._process: Started | None = None
        self.start_s = 0.0
        """Seconds from the start of the process to its first answer."""

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
        """Process id of the server's root process; None when not running."""
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """Return how the root process ended; None while it runs or was stopped."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the process and wait until it answers.

        Raises:
            ServerStartError: it died, or did not answer in time. It is ended.
        """
        if self._process is not None:
            raise RuntimeError(f"server {self.spec.name} is already running")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # Three processes import some thousands of modules each; where bytecode may
        # not be written, every start compiles them all.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for name, value in self.spec.env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        command = self.spec.command(self.port)
        with self.log_path.open("wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            if self.spec.fork:
                self._process = forked(command, log, env)
            if self._process is None:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=env,
                    start_new_session=True,
                )
        _RUNNING.add(self)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop(grace_s=2.0)
            raise

    def _wait_until_ready(self, process: Started) -> None:
        begin = time.monotonic()
        said = begin
        while True:
            elapsed_s = time.monotonic() - begin
            exit_code = process.poll()
            if exit_code is not None:
                reason = f"server {self.spec.name} ended with code {exit_code}"
                raise ServerStartError(
                    f"{reason} after {elapsed_s:.0f} s", exit_code, self.log_tail()
                )
            if self._answers():
                self.start_s = time.monotonic() - begin
                self._say(f"  {self.spec.name}: ready after {self.start_s:.0f} s")
                return
            if elapsed_s > self._start_timeout_s:
                reason = f"server {self.spec.name} gave no answer"
                raise ServerStartError(
                    f"{reason} in {elapsed_s:.0f} s", None, self.log_tail()
                )
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                if _TAKEN in self.log_path.read_bytes():
                    reason = f"server {self.spec.name}: port {self.port} is taken"
                    raise ServerStartError(reason, None, self.log_tail())
                self._say(f"  {self.spec.name}: starting, {elapsed_s:.0f} s")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Whether the server is up: /ready, which runs no request of its own."""
        request = urllib.request.Request(
            self.url + "/ready", headers=self.spec.headers()
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """Return the last lines of the server's log, each cut to a readable length."""
        if not self.log_path.exists():
            return ""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(line[:_LINE_CHARS] for line in text.splitlines()[-lines:])

    def stop(self, grace_s: float = 20.0) -> None:
        """End the process group and wait for it; does nothing when not running.

        Args:
            grace_s: time between SIGTERM and SIGKILL.
        """
        process = self._process
        if process is None:
            return
        self._process = None
        _RUNNING.discard(self)
        end_group(process, grace_s)

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server, as a lost machine would.

        A killed one is still to be ended by ``stop``, which then only cleans up.
        """
        if self._process is not None:
            signal_group(self._process, number)

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET ``path`` and return its JSON, or its text where it is not JSON."""
        return self._ask(path, None, timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 300.0) -> Any:
        """POST JSON to ``path`` and return the answer like ``get``."""
        return self._ask(path, body, timeout_s)

    def _ask(self, path: str, body: Any, timeout_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers=self.spec.headers()
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise RuntimeError(f"{path}: HTTP {error.code}: {detail}") from error
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Empty the server's caches; waits for running requests to end.

        Raises:
            RuntimeError: the server refused.
        """
        self.post(f"/flush_cache?timeout={timeout_s}", {}, timeout_s + 10.0)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 16,
        **fields: Any,
    ) -> dict[str, Any]:
        """Answer one prompt greedily, without streaming.

        Args:
            prompt: text, or token ids.
            max_new_tokens: length of the answer; the end token does not stop it.
            fields: further fields of the request, such as ``return_logprob``.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        body: dict[str, Any] = {
            key: prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": True,
            },
            **fields,
        }
        answer: dict[str, Any] = self.post("/generate", body)
        return answer

    def server_info(self) -> dict[str, Any]:
        """Return what the server says of its flags and state."""
        info: dict[str, Any] = self.get("/server_info")
        return info
