"""Pool nodes in processes of their own: kills, stops, a lost registry, a taken port.

What must hold under all of it: no wrong byte anywhere, everybody goes on when the fault
is over, and in the end nothing is under way and no block is held.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.pool.local_registry import LocalRegistry
from sgl_tiered.transport.loopback import open_loopback
from sgl_tiered.transport.mooncake import import_mooncake
from tests.faults.pool_support import (
    FEW,
    LONG_GRACE_S,
    LONG_TTL_S,
    PATIENCE_S,
    Node,
    settle,
)


@pytest.fixture(params=["loopback", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each transport that works here."""
    try:
        if request.param == "mooncake":
            import_mooncake()
        else:
            open_loopback().close()
    except TransportUnavailableError as error:
        pytest.skip(f"not run: {error}")
    return request.param


@pytest.fixture
def registry(tmp_path: Path) -> str:
    """The URL of a registry for this test."""
    return f"file:{tmp_path / 'pool.json'}"


@pytest.fixture
def start(registry: str, transport: str) -> Iterator[Callable[..., Node]]:
    """What starts a node, which ends with the test."""
    with ExitStack() as stack:

        def start(name: str, **more: Any) -> Node:
            return stack.enter_context(Node(name, registry, transport, **more))

        yield start


def test_pages_go_both_ways(start: Callable[..., Node]) -> None:
    """A fetch brings what is there; a second sending sends nothing."""
    one, two = start("one"), start("two")
    one.knows(two)
    two.knows(one)
    assert one.ask("hold 0 20")["ok"]
    got = two.ask(f"fetch {one.instance} 0 24")
    assert got == {"error": "", "num_pages": 20, "right": True}
    assert one.ask(f"send {two.instance} 0 20") == {"error": "", "num_known": 0}
    assert one.ask(f"send {two.instance} 0 20") == {"error": "", "num_known": 20}
    assert two.ask("check")["wrong_kept"] == 0
    refused = two.ask(f"fetch {one.instance} 2 24")
    assert refused["error"]
    assert refused["num_pages"] == 0
    settle(one, two)


def test_a_killed_holder_fails_a_fetch_and_comes_back(
    start: Callable[..., Node],
) -> None:
    """As a value, in bounded time; its next start is another incarnation, and empty."""
    one, two = start("one"), start("two")
    one.knows(two)
    two.knows(one)
    assert one.ask("hold 0 20")["ok"]
    assert two.ask(f"fetch {one.instance} 0 20")["right"]
    one.stop()
    two.tell(f"fetch {one.instance} 0 20")
    one.process.kill()
    assert two.hear()["num_pages"] == 0
    again = start("one")
    assert (again.instance, again.incarnation) == (one.instance, 2)
    again.knows(two)
    two.knows(again)
    two.until(lambda _: again.ask("hold 0 20")["ok"])
    two.fetches(again, 20)
    settle(again, two)


def test_a_port_taken_over_is_not_taken_for_the_dead_one(
    start: Callable[..., Node], registry: str
) -> None:
    """Messages for the one that had it are refused, whatever the new one has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one, two = start("one", port=port), start("two")
    one.knows(two)
    two.knows(one)
    # Until two has seen its end, the dead one's entry names the port of the new one.
    one.process.kill()
    one.process.wait()
    three = start("three", port=port)
    assert three.instance != one.instance
    assert three.ask("hold 0 20")["ok"]
    got = two.ask(f"fetch {one.instance} 0 20")
    assert got["error"]
    assert got["num_pages"] == 0
    two.knows(three)
    three.knows(two)
    two.fetches(three, 20)
    settle(two, three)


@pytest.mark.faults_long
def test_random_work_under_kills_stops_and_a_lost_registry(
    start: Callable[..., Node], registry: str
) -> None:
    """Three at work with each other; each fault strikes in the middle of it."""
    path = Path(registry.removeprefix("file:"))
    times = {"ttl_s": LONG_TTL_S, "grace_s": LONG_GRACE_S}
    nodes = [
        start(name, seed=i, **times) for i, name in enumerate(("one", "two", "three"))
    ]
    for node in nodes:
        node.knows(*[other for other in nodes if other is not node])
    for node in nodes:
        node.tell("work 1000000")
    for node in nodes:
        node.until(lambda found: found["fetched"] >= FEW and found["sent"] >= FEW // 4)
    for round_ in range(2):
        # Killed, and started anew.
        nodes[0].process.kill()
        nodes[0].process.wait()
        for node in nodes[1:]:
            node.does_more(FEW)
        nodes[0] = start("one", seed=10 + round_, **times)
        nodes[0].tell("work 1000000")
        for node in nodes:
            node.does_more(FEW)
        # Stopped until its lease is over, and then going on.
        before = nodes[1].ask("check")["incarnation"]
        nodes[1].stop()
        wait_until_gone(path, nodes[1].instance)
        nodes[2].does_more(FEW)
        nodes[1].go_on()
        nodes[1].until(lambda found, before=before: found["incarnation"] > before)
        for node in nodes:
            node.does_more(FEW)
        # No registry: whoever has a lease works on until it is over, then waits.
        away = path.with_name("away")
        os.rename(path, away)
        path.mkdir()
        nodes[0].until(lambda found: found["trouble"] != "")
        path.rmdir()
        os.rename(away, path)
        for node in nodes:
            node.until(lambda found: found["trouble"] == "")
            node.does_more(FEW)
    settle(*nodes)


def wait_until_gone(path: Path, instance: int) -> None:
    """Wait until the registry has ended a lease."""
    registry = LocalRegistry(path)
    end_s = time.monotonic() + PATIENCE_S
    while registry.view().member(instance) is not None:
        assert time.monotonic() < end_s
        time.sleep(0.05)
