"""Clusters of the cluster tests: one at a time, kept while a module wants the same.

Every test prints the seconds that it needed with all that it started, and the sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, plain_spec

from tests.cluster.cluster_support import (
    PAGE,
    POOL_TOKENS,
    Reference,
    record_sessions,
    released,
    settled,
)
from tests.cluster.turns_support import AnsweredTurn, record_turns
from tests.e2e.conftest import Servers, model, servers

__all__ = ["model", "servers"]

_SPENT = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Print what a test needed."""
    began_s = time.monotonic()
    result = yield
    stash = item.config.stash
    needed_s = time.monotonic() - began_s
    stash[_SPENT] = stash.get(_SPENT, 0.0) + needed_s
    terminal = item.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        terminal.ensure_newline()
        terminal.write_line(
            f"  {item.name}: {needed_s:.0f} s, {stash[_SPENT] / 60:.1f} min in all"
        )
    return result


@pytest.fixture(scope="session")
def device(model: Path) -> Device:
    """What all servers of these tests share."""
    return Device(model, POOL_TOKENS, PAGE, CPU_FLAGS)


@pytest.fixture(scope="session")
def recorded(servers: Servers, device: Device) -> tuple[Reference, list[AnsweredTurn]]:
    """What one plain server says to all prompts; it is stopped then."""
    server = servers.get(plain_spec(device, "plain"))
    found = record_sessions(server), record_turns(server)
    servers.stop()
    return found


@pytest.fixture(scope="session")
def plain(recorded: tuple[Reference, list[AnsweredTurn]]) -> Reference:
    """The reference of the sessions that are played at once."""
    return recorded[0]


@pytest.fixture(scope="session")
def turns(recorded: tuple[Reference, list[AnsweredTurn]]) -> list[AnsweredTurn]:
    """The session that is asked turn by turn."""
    return recorded[1]


@pytest.fixture(scope="module")
def running(
    plain: Reference,
) -> Iterator[Callable[[str, Callable[[], Cluster]], Cluster]]:
    """Return a function that gives the cluster of a name, made if another one runs.

    In the end nothing may be held anywhere in it.
    """
    current: list[tuple[str, Cluster]] = []

    def stop() -> None:
        while current:
            _, cluster = current.pop()
            try:
                released(cluster)
            finally:
                cluster.stop()

    def get(name: str, make: Callable[[], Cluster]) -> Cluster:
        if not current or current[0][0] != name:
            stop()
            current.append((name, make().__enter__()))
            settled(current[0][1])
        return current[0][1]

    yield get
    stop()
