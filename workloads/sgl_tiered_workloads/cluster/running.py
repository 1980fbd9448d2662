"""A cluster that runs: started together, struck by faults, ended by process id.

Every server gets its port before anything starts, so a killed one comes back at the
same address, as a restarted machine does. Nothing here is ended by its name, and
nothing is left: what was killed or stopped in between is ended with the rest.
"""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sgl_tiered_workloads.cluster.members import Member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.server import Say, ServerStartError, SglangServer

__all__ = ["Cluster", "etcd", "forwarder", "read_json", "router", "sglang_router"]

_HOST = "127.0.0.1"
_STARTS = 2
"""At a time: a start is mostly imports on one core."""


def read_json(url: str, timeout_s: float = 10.0) -> Any:
    """GET a URL and return its JSON, None where it has no body.

    Raises:
        OSError: nobody answered, or with an error.
    """
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        body = response.read()
    return json.loads(body) if body.strip() else None


def _answers(url: str) -> bool:
    """Whether a GET gives 200; raises OSError where nobody listens."""
    with urllib.request.urlopen(url, timeout=5.0) as response:
        return bool(response.status == 200)


def router(
    instances: Sequence[str],
    port: int,
    log_dir: Path,
    *,
    flags: Sequence[str] = (),
    name: str = "router",
) -> Service:
    """Return our router, not started.

    Args:
        instances: words after ``--instance``.
        port: to listen on.
        log_dir: of its log.
        flags: further ones, such as ``--policy``.
        name: of its log.
    """
    command = [sys.executable, "-m", "sgl_tiered.cli.main", "router"]
    command += ["--host", _HOST, "--port", str(port)]
    for instance in instances:
        command += ["--instance", instance]
    url = f"http://{_HOST}:{port}"
    return Service(
        name,
        [*command, *flags],
        log_dir,
        lambda: _answers(url + "/router/state"),
        url=url,
    )


def etcd(
    program: Path, port: int, peer_port: int, log_dir: Path, data: Path
) -> Service:
    """Return a registry of one etcd node, not started; its URL is a pool's.

    Args:
        program: etcd itself.
        port: that clients are served on.
        peer_port: that other nodes would use.
        log_dir: of its log.
        data: folder of what it keeps over a restart.
    """
    at, peers = f"http://{_HOST}:{port}", f"http://{_HOST}:{peer_port}"
    command = [str(program), "--name", "only", "--data-dir", str(data)]
    command += ["--listen-client-urls", at, "--advertise-client-urls", at]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"only={peers}"]
    return Service(
        "etcd",
        command,
        log_dir,
        lambda: _answers(at + "/health"),
        url=f"etcd://{_HOST}:{port}",
    )


def sglang_router(
    urls: Sequence[str],
    port: int,
    metrics_port: int,
    log_dir: Path,
    python: Path,
    policy: str = "cache_aware",
) -> Service:
    """Return SGLang's own router with its defaults, not started.

    Args:
        urls: of colocated servers.
        port: to listen on.
        metrics_port: for Prometheus; it has a fixed one otherwise.
        log_dir: of its log.
        python: interpreter of an environment that has ``sglang_router``.
        policy: one of its policies.
    """
    command = [str(python), "-m", "sglang_router.launch_router", "--policy", policy]
    command += ["--host", _HOST, "--port", str(port)]
    command += ["--prometheus-host", _HOST, "--prometheus-port", str(metrics_port)]
    command += ["--worker-urls", *urls]
    url = f"http://{_HOST}:{port}"
    return Service(
        "sglang-router", command, log_dir, lambda: _answers(url + "/health"), url=url
    )


def forwarder(listen: int, target: int, log_dir: Path, name: str) -> Service:
    """Return a process between ``listen`` and ``target``, not started.

    It is ready when it listens; whether somebody listens behind it is another matter.
    """
    command = [sys.executable, "-m", "sgl_tiered_workloads.cluster.forwarder"]
    command += ["--listen", str(listen), "--to", str(target)]
    return Service(name, command, log_dir, lambda: _listens(listen))


def _listens(port: int) -> bool:
    """Whether a port of this machine is in state LISTEN; it is not connected to."""
    told = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in told]
    return any(row[3] == "0A" and int(row[1].split(":")[1], 16) == port for row in rows)


class Cluster:
    """Servers and services that run while it is entered.

    Args:
        members: the servers.
        log_dir: of all logs; a restarted server gets a folder of its own in it.
        services: what runs besides, in the order of starting: the first ones before the
            servers (a registry), and ``behind`` after them.
        behind: as said; a router.
        ports: where later ports come from.
        start_timeout_s: of each server.
        say: takes progress lines.
    """

    def __init__(
        self,
        members: Sequence[Member],
        log_dir: Path,
        *,
        services: Sequence[Service] = (),
        behind: Sequence[Service] = (),
        ports: Ports | None = None,
        start_timeout_s: float = 600.0,
        say: Say = print,
    ) -> None:
        self.members: Mapping[str, Member] = {each.name: each for each in members}
        self.ports = ports or Ports()
        self.log_dir = log_dir
        self.services = {each.name: each for each in (*services, *behind)}
        self.servers: dict[str, SglangServer] = {}
        self._before = tuple(services)
        self._behind = tuple(behind)
        self._start_timeout_s = start_timeout_s
        self._say = say
        self._num_starts = dict.fromkeys(self.members, 0)
        self._is_ending = False

    def __enter__(self) -> Self:
        pool = ThreadPoolExecutor(_STARTS)
        self._is_ending = False
        try:
            for service in self._before:
                service.start()
            started = [pool.submit(self._start, name) for name in self.members]
            for future in started:
                future.result()
            for service in self._behind:
                service.start()
        except BaseException:
            self.stop()
            # Whoever was starting one sees that it has ended.
            pool.shutdown(cancel_futures=True)
            self.stop()
            raise
        pool.shutdown()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything, whatever its state, also while another thread starts it."""
        self._is_ending = True
        for service in reversed(self._behind):
            service.stop()
        servers = list(self.servers.values())
        self.servers.clear()
        with ThreadPoolExecutor(max(len(servers), 1)) as pool:
            list(pool.map(lambda server: server.stop(), servers))
        for service in reversed(self._before):
            service.stop()

    def url(self, name: str) -> str:
        """Return the address of a server."""
        return f"http://{_HOST}:{self.members[name].port}"

    @property
    def routers(self) -> tuple[str, ...]:
        """Addresses of what runs behind the servers, in the order given."""
        return tuple(service.url for service in self._behind)

    def kill(self, name: str) -> None:
        """End all processes of a server or service at once, as a lost machine would."""
        self._named(name).signal(signal.SIGKILL)

    def pause(self, name: str) -> None:
        """Stop all processes of a server or service; its ports stay open."""
        self._named(name).signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a stopped server or service go on."""
        self._named(name).signal(signal.SIGCONT)

    def restart(self, name: str) -> None:
        """Start a killed server or service again, at the same address."""
        if name in self.services:
            service = self.services[name]
            service.stop(grace_s=1.0)
            service.start()
            return
        old = self.servers.pop(name, None)
        if old is not None:
            old.stop(grace_s=1.0)
        self._start(name)

    def _named(self, name: str) -> SglangServer | Service:
        return self.services.get(name) or self.servers[name]

    def _start(self, name: str) -> None:
        member = self.members[name]
        number = self._num_starts[name]
        self._num_starts[name] = number + 1
        folder = self.log_dir / f"restart-{number}" if number else self.log_dir
        server = SglangServer(
            member.spec, folder, member.port, self._start_timeout_s, self._say
        )
        # Known before it runs, so that it is ended if another one does not start.
        self.servers[name] = server
        if self._is_ending:
            raise ServerStartError(f"server {name} was called off", None, "")
        server.start()
