"""Clusters of the cluster tests: one at a time, kept while a module wants the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, plain_spec

from tests.cluster.cluster_support import (
    PAGE,
    POOL_TOKENS,
    Reference,
    record_sessions,
)
from tests.e2e.conftest import Servers, model, servers

__all__ = ["model", "servers"]


@pytest.fixture(scope="session")
def device(model: Path) -> Device:
    """What all servers of these tests share."""
    return Device(model, POOL_TOKENS, PAGE, CPU_FLAGS)


@pytest.fixture(scope="session")
def plain(servers: Servers, device: Device) -> Reference:
    """The reference, recorded on one plain server, which is stopped then."""
    found = record_sessions(servers.get(plain_spec(device, "plain")))
    servers.stop()
    return found


@pytest.fixture(scope="module")
def running(
    plain: Reference,
) -> Iterator[Callable[[str, Callable[[], Cluster]], Cluster]]:
    """Return a function that gives the cluster of a name, made if another one runs."""
    current: list[tuple[str, Cluster]] = []

    def stop() -> None:
        while current:
            current.pop()[1].stop()

    def get(name: str, make: Callable[[], Cluster]) -> Cluster:
        if not current or current[0][0] != name:
            stop()
            current.append((name, make().__enter__()))
        return current[0][1]

    yield get
    stop()
