"""What is compared: five routers, and the two kinds of servers they stand before.

Servers of a kind are the same for all routers. All have one thread, sleep when idle,
publish KV events, and have as much device memory and as much host memory as each other.
A router is started anew for each measurement, with its own defaults.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from against.model import host_tier
from hicache_cpu.distribution import hicache_env
from sgl_tiered_workloads.cluster.members import COLOCATED, Member, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import router, sglang_router
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, hicache_spec

__all__ = [
    "BACKENDS",
    "LEAST_LOAD",
    "OURS",
    "PAGE",
    "POOL_TOKENS",
    "ROUTERS",
    "SESSION",
    "SGLANG",
    "Front",
    "add_instance",
    "reference_device",
    "servers",
]

BACKENDS = ("tiered", "hicache")
OURS, SESSION, LEAST_LOAD = "prompt-tree", "session", "least-load"
SGLANG = ("sglang-cache_aware", "sglang-power_of_two")
ROUTERS = (OURS, SESSION, LEAST_LOAD, *SGLANG)
NUM_SERVERS = 4
"""Three that serve at one time, and one that is added when another is gone."""
PAGE = 16
POOL_TOKENS = 3_072
"""Of a device; the host behind it holds as many. Three of them are a quarter of the
working set of each load."""
REFERENCE_TOKENS = 65_536
LAYOUT = "page_first_direct"
"""Of HiCache's host memory: the one that our hooks copy as fast as our own."""
_ASK_S = 10.0


def reference_device(model: Path) -> Device:
    """Return the device of plain SGLang that holds a whole schedule."""
    return Device(model, REFERENCE_TOKENS, PAGE, CPU_FLAGS)


def servers(kind: str, model: Path, ports: Ports, plugins: Path) -> list[Member]:
    """Return the servers of a kind, not started.

    Args:
        kind: one of ``BACKENDS``.
        model: folder of the model.
        ports: where ports come from.
        plugins: folder for the entry point of HiCache's hooks.
    """
    shared = Device(model, POOL_TOKENS, PAGE, (*CPU_FLAGS, "--enable-metrics"))
    members = []
    for number in range(NUM_SERVERS):
        name = f"{kind}{number}"
        if kind == "tiered":
            flags: Sequence[str] = host_tier(POOL_TOKENS)
            env = None
        else:
            bare = Device(model, 0, PAGE)
            spec = hicache_spec(bare, name, ("--hicache-ratio", "1"), LAYOUT)
            flags, env = spec.flags, hicache_env(plugins, asynchronous=True)
        members.append(new_member(shared, COLOCATED, name, ports, flags=flags, env=env))
    return members


@dataclass(frozen=True, slots=True)
class Front:
    """A router that can be started.

    Attributes:
        name: one of ``ROUTERS``.
        service: its process.
    """

    name: str
    service: Service

    @classmethod
    def before(
        cls,
        name: str,
        members: Sequence[Member],
        ports: Ports,
        logs: Path,
        sglang_python: Path,
    ) -> Front:
        """Return a router in front of servers, not started.

        Args:
            name: one of ``ROUTERS``.
            members: that it begins with.
            ports: where its ports come from.
            logs: folder of its log.
            sglang_python: the Python that has sglang-router.
        """
        if name in SGLANG:
            policy = name.removeprefix("sglang-")
            urls = [_url(member) for member in members]
            made = sglang_router(
                urls, ports.take(), ports.take(), logs, sglang_python, policy
            )
            return cls(name, made)
        words = [member.word(_url(member)) for member in members]
        flags = ("--policy", name)
        port = ports.take()
        return cls(name, router(words, port, logs, flags=flags, name=f"router-{name}"))


def add_instance(front: Front, member: Member) -> None:
    """Tell a running router of one more server, by its own interface.

    Raises:
        OSError: it refused, or did not answer.
    """
    if front.name in SGLANG:
        _post(f"{front.service.url}/workers", {"url": _url(member)})
    else:
        word = member.word(_url(member))
        _post(f"{front.service.url}/router/instances", {"instance": word})


def _url(member: Member) -> str:
    return f"http://127.0.0.1:{member.port}"


def _post(url: str, body: object) -> None:
    request = urllib.request.Request(
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_ASK_S) as response:
        response.read()
