"""etcd killed, and stopped, under pool nodes at work: they go on alone, and come back.

Without a lease nobody writes to others; without an answer of etcd's nobody is told that
others are gone. What must hold is what the other fault tests of pool nodes demand.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import etcd
from sgl_tiered_workloads.processes import Service

from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.transport.loopback import open_loopback
from tests.faults.pool_support import FEW, Node, settle

# Where make install puts it, or the system's.
UNPACKED = Path(__file__).parents[2] / ".cache/etcd/usr/bin/etcd"
PROGRAM = UNPACKED if UNPACKED.exists() else shutil.which("etcd")

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="etcd is not installed")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Service]:
    """etcd, alone."""
    ports = Ports()
    data = tmp_path / "etcd"
    service = etcd(PROGRAM, ports.take(), ports.take(), tmp_path, data)
    with service:
        yield service


@pytest.fixture
def nodes(registry: Service) -> Iterator[list[Node]]:
    """Three that know each other, at work."""
    try:
        open_loopback().close()
    except TransportUnavailableError as error:
        pytest.skip(f"not run: {error}")
    url = registry.url + "/faults"
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(Node(name, url, "loopback", seed=seed))
            for seed, name in enumerate(("one", "two", "three"))
        ]
        for node in nodes:
            node.knows(*(other for other in nodes if other is not node))
            node.tell("work 1000000")
        for node in nodes:
            node.until(lambda found: found["fetched"] >= FEW // 4)
        yield nodes


def go_on_alone(nodes: list[Node]) -> None:
    """All leases end, and everybody goes on working with what it has."""
    for node in nodes:
        node.until(lambda found: found["trouble"] != "" and not found["lease_left_s"])
        node.does_more(FEW)


def come_back(nodes: list[Node]) -> None:
    """All have leases and know each other; pages go between them again."""
    for node in nodes:
        node.until(lambda found: found["trouble"] == "")
        node.knows(*(other for other in nodes if other is not node))
        fetched = node.ask("check")["fetched"]
        node.until(lambda found, before=fetched: found["fetched"] > before)


def test_etcd_is_killed_and_comes_back(nodes: list[Node], registry: Service) -> None:
    """With what it has on its disk."""
    registry.signal(signal.SIGKILL)
    go_on_alone(nodes)
    registry.stop()
    registry.start()
    come_back(nodes)
    settle(*nodes)


def test_etcd_is_stopped_and_goes_on(nodes: list[Node], registry: Service) -> None:
    """Its port takes connections all the while, and answers nothing."""
    registry.signal(signal.SIGSTOP)
    go_on_alone(nodes)
    registry.signal(signal.SIGCONT)
    come_back(nodes)
    settle(*nodes)
