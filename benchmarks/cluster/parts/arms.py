"""The systems that are compared: which servers each has, and what stands in front.

Every system gets the same model, page, device pool and number of servers, one thread
each, and servers that sleep when idle. A system's servers are named after it, so that
two systems can run side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_tiered_workloads.cluster.members import (
    COLOCATED,
    DECODE,
    PREFILL,
    Handover,
    Member,
    mooncake,
    new_member,
    tiered,
)
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import router, sglang_router
from sgl_tiered_workloads.processes import Service
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers

__all__ = [
    "CC",
    "FRONTS",
    "GROUPS",
    "PAIR",
    "PAIR_BASIC",
    "PAIR_CC",
    "PLAIN",
    "PREFIX_TREE",
    "SESSION",
    "SGLANG_PAIR",
    "SGLANG_ROUTER",
    "System",
    "fronts",
    "make_system",
    "plain_servers",
]

PLAIN, CC = "PD", "PD-CC"
PAIR_BASIC, PAIR_CC, SGLANG_PAIR = "1P1D", "1P1D-CC", "sglang-1P1D"
PAIR = (PAIR_BASIC, PAIR_CC, SGLANG_PAIR)
GROUPS: tuple[tuple[str, ...], ...] = (
    (PLAIN, CC),
    PAIR,
)
"""Systems that run side by side; each group shares the machine with nobody else."""
PREFIX_TREE, SESSION, SGLANG_ROUTER = "prompt-tree", "session", "sglang-router"
FRONTS = (PREFIX_TREE, SESSION, SGLANG_ROUTER)
PAGE = 16
POOL_TOKENS = 24_576
HOST_BYTES = 600_000_000
TIERS = Tiers(HOST_BYTES).flags


@dataclass(frozen=True, slots=True)
class System:
    """A system that can be started.

    Attributes:
        name: as in the table.
        members: its servers.
        front: its router.
    """

    name: str
    members: tuple[Member, ...]
    front: Service


def device(model: Path) -> Device:
    """Return what all servers share."""
    return Device(model, POOL_TOKENS, PAGE, CPU_FLAGS)


def make_system(
    name: str, model: Path, ports: Ports, logs: Path, pool: str, caching: int
) -> System:
    """Return one of the systems of ``GROUPS``.

    Args:
        name: of it.
        model: folder of the model.
        ports: where ports come from.
        logs: folder of logs.
        pool: URL of the registry, for our own pairs.
        caching: ``--tiered-pd-caching`` of our pair with caches.
    """
    shared = device(model)
    if name in (PLAIN, CC):
        flags = ("--disable-radix-cache",) if name == PLAIN else TIERS
        members = tuple(
            new_member(
                shared, COLOCATED, f"{name}-{n}", ports, flags=flags, events=False
            )
            for n in range(2)
        )
        policy = "least-load" if name == PLAIN else "prompt-tree"
    else:
        handover = _handover(name, pool, caching)
        members = tuple(
            new_member(
                shared, kind, f"{name}-{kind}", ports, handover=handover, events=False
            )
            for kind in (PREFILL, DECODE)
        )
        policy = "prompt-tree"
    words = [member.word(f"http://127.0.0.1:{member.port}") for member in members]
    front = router(
        words,
        ports.take(),
        logs,
        flags=("--policy", policy),
        name=f"router-{name}",
    )
    return System(name, members, front)


def _handover(name: str, pool: str, caching: int) -> Handover:
    if name == SGLANG_PAIR:
        return mooncake(caches=True)
    return tiered(0 if name == PAIR_BASIC else caching, pool, HOST_BYTES)


def plain_servers(model: Path, ports: Ports, count: int) -> list[Member]:
    """Return plain servers with KV events, for the comparison of routers."""
    shared = device(model)
    return [new_member(shared, COLOCATED, f"server{n}", ports) for n in range(count)]


def fronts(
    members: Sequence[Member], ports: Ports, logs: Path, program: Path
) -> Mapping[str, Service]:
    """Return the routers that are compared, all in front of the same servers.

    Args:
        members: the servers.
        ports: where ports come from.
        logs: folder of logs.
        program: the Python that has sglang-router.
    """
    words = [member.word(f"http://127.0.0.1:{member.port}") for member in members]
    ours = {
        name: router(
            words,
            ports.take(),
            logs,
            flags=("--policy", name),
            name=f"router-{name}",
        )
        for name in (PREFIX_TREE, SESSION)
    }
    urls = [f"http://127.0.0.1:{member.port}" for member in members]
    theirs = sglang_router(urls, ports.take(), ports.take(), logs, program)
    return {**ours, SGLANG_ROUTER: theirs}
