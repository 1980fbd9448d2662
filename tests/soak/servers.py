"""The servers of a soak, and what the system tells of their processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import ServerSpec, SglangServer, free_port
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    MB,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)

from tests.e2e.e2e_support import MODELS, PATIENCE_S

__all__ = ["PAGE", "Watched", "running"]

PAGE = 16
POOL_TOKENS = 8192
HOST_BYTES, DISK_BYTES = 16 * MB, 64 * MB
"""1,000 and 4,000 pages of the tiny model: full after a minute or two."""
MAX_RUNNING, CONTEXT_TOKENS = 16, 2048
"""SGLang has a row of token numbers for each request that may run, as long as the
context; by default thousands of 131 kB, which requests touch one after the other: its
memory would grow for a long time."""
_LOOK_S = 0.3
_QUIET_CPU_S = 0.03
_SCHEDULER = "scheduler"


class Watched:
    """A running server and its processes, by what they do.

    Args:
        server: running.

    Raises:
        RuntimeError: it has no scheduler.
    """

    def __init__(self, server: SglangServer) -> None:
        self.server = server
        root = psutil.Process(server.pid)
        self.processes = {"http": root}
        for child in root.children(recursive=True):
            # SGLang gives its processes titles: sglang::scheduler_TP0.
            title = child.cmdline()[0].partition("sglang::")[2].partition("_")[0]
            self.processes[title or f"other-{len(self.processes)}"] = child
        if _SCHEDULER not in self.processes:
            raise RuntimeError(f"no scheduler among {self.processes}")

    def rss_bytes(self) -> dict[str, int]:
        """Return resident bytes by process, but for pages of files.

        Those (libraries, mostly) the system takes and gives as it likes.
        """
        return {n: _resident_bytes(p.pid) for n, p in self.processes.items()}

    def num_fds(self) -> dict[str, int]:
        """Return open files by process."""
        return {n: p.num_fds() for n, p in self.processes.items()}

    def num_threads(self) -> dict[str, int]:
        """Return threads by process."""
        return {n: p.num_threads() for n, p in self.processes.items()}

    def scheduler_cpu_s(self) -> float:
        """Return CPU seconds of the scheduler so far, all of its threads."""
        times = self.processes[_SCHEDULER].cpu_times()
        return float(times.user + times.system)

    def become_quiet(self) -> None:
        """Wait until the scheduler computes and copies nothing any more.

        Raises:
            RuntimeError: it does not stop.
        """
        deadline = time.monotonic() + PATIENCE_S
        before = self.scheduler_cpu_s()
        while time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            now = self.scheduler_cpu_s()
            if now - before < _QUIET_CPU_S:
                return
            before = now
        raise RuntimeError(f"{self.server.spec.name} is never idle")


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    return 1024 * (int(kib["RssAnon"]) + int(kib["RssShmem"]))


def _specs(scratch: Path) -> dict[str, ServerSpec]:
    device = Device(make_model("tiny", MODELS), POOL_TOKENS, PAGE, CPU_FLAGS)
    env = {"OMP_NUM_THREADS": "1", "SGL_TIERED_ALLOW_FAULTS": "1"}
    tiered_flags = (
        "--tiered-load-policy=always",
        "--tiered-disk-admission=all",
        "--tiered-staging-size=8MB",
    )

    def tiers(name: str) -> Tiers:
        return Tiers(HOST_BYTES, scratch / f"disk-{name}", DISK_BYTES)

    def tiered(name: str) -> ServerSpec:
        flags = (*_shared_flags(), *tiered_flags)
        return tiered_spec(device, tiers(name), name, flags, env)

    program = (sys.executable, "-m", "tests.soak.planted")
    return {
        "plain": replace(plain_spec(device, "plain", _shared_flags()), env=env),
        "tiered": tiered("tiered"),
        "planted": replace(tiered("planted"), program=program),
    }


def _shared_flags() -> tuple[str, ...]:
    """Return metrics, and events that nobody hears; and numbers of 32 bits.

    For products of bfloat16 oneDNN compiles a program for each number of rows where the
    processor has units for them, and keeps the last thousand: hundreds of megabytes
    that come and go, in which a leak of 20 MB per hour is not to be seen.
    """
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "bind": True,
        "topic": "kv-events",
        "buffer_steps": 100,
    }
    return (
        "--dtype=float32",
        "--enable-metrics",
        f"--max-running-requests={MAX_RUNNING}",
        f"--context-length={CONTEXT_TOKENS}",
        "--log-level-http=warning",
        "--kv-events-config",
        json.dumps(events),
    )


@contextmanager
def running(scratch: Path, logs: Path) -> Iterator[Mapping[str, Watched]]:
    """Start plain SGLang, a tiered server, and a tiered one that leaks."""
    with ExitStack() as stack:
        yield {
            name: Watched(stack.enter_context(SglangServer(spec, logs)))
            for name, spec in _specs(scratch).items()
        }
