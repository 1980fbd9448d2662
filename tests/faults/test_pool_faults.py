"""Pool nodes in processes of their own: kills, stops, a lost registry, a taken port.

What must hold under all of it: no wrong byte anywhere, everybody goes on when the fault
is over, and in the end nothing is under way and no block is held.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
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

PROGRAM = Path(__file__).with_name("pool_process.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""For anything to happen at all; nothing is measured by it."""
TTL_S, GRACE_S = 4.0, 4.0
LONG_TTL_S, LONG_GRACE_S = 8.0, 30.0
"""A lease must outlive a loaded machine's pauses, and the grace time a process that is
stopped for as long as a lease; see the pool's README."""
FEW = 40


class Node:
    """A process with a node, as a context manager that kills it."""

    def __init__(
        self,
        name: str,
        registry: str,
        transport: str,
        ttl_s: float = TTL_S,
        grace_s: float = GRACE_S,
        port: int = 0,
        seed: int = 0,
    ) -> None:
        numbers = [str(value) for value in (ttl_s, grace_s, port, seed)]
        arguments = [name, registry, transport, *numbers]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        found = self.hear()
        self.instance, self.incarnation = found["instance"], found["incarnation"]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def tell(self, line: str) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # A library may write to stdout too.
            if line.startswith("pool: "):
                return json.loads(line.removeprefix("pool: "))
        raise EOFError(f"the node has ended with {self.process.wait()}")

    def ask(self, line: str) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(line)
        return self.hear()

    def stop(self) -> None:
        """Send SIGSTOP, and wait until it has been obeyed."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Ask how it is until it is so."""
        end_s = time.monotonic() + PATIENCE_S
        while not is_so(found := self.ask("check")):
            assert time.monotonic() < end_s, found
            time.sleep(0.05)
        return found

    def knows(self, *others: Node) -> None:
        """Wait until it sees exactly itself and these."""
        wanted = sorted(node.instance for node in (self, *others))
        self.until(lambda found: found["members"] == wanted)

    def fetches(self, holder: Node, num_pages: int) -> None:
        """Have pages of prompt 0 brought, until all come.

        Until it has seen the holder's new start, it asks the former one.
        """

        def all_came(_: dict[str, Any]) -> bool:
            got = self.ask(f"fetch {holder.instance} 0 {num_pages}")
            assert got["right"]
            return bool(got["num_pages"] == num_pages)

        self.until(all_came)

    def does_more(self, num: int) -> None:
        """Wait until it has ended so many operations more."""
        done = self.ask("check")["done"]
        self.until(lambda found: found["done"] >= done + num)


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


def settle(*nodes: Node) -> None:
    """Nothing is under way in the end, nothing held, nothing wrong."""
    for node in nodes:
        node.tell("settle")
    for node in nodes:
        found = node.hear()
        assert not any(found.pop("under_way").values())
        assert found == {"wrong": 0, "active": 0, "held": 0}
