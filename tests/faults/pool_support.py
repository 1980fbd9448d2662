"""Pool nodes as processes, as the fault tests command them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = [
    "FEW",
    "GRACE_S",
    "LONG_GRACE_S",
    "LONG_TTL_S",
    "PATIENCE_S",
    "TTL_S",
    "Node",
    "settle",
]

PROGRAM = Path(__file__).with_name("pool_process.py")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""For anything to happen at all; nothing is measured by it."""
TTL_S, GRACE_S = 4.0, 4.0
TIMEOUT_S = 3.0
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
        timeout_s: float = TIMEOUT_S,
        port: int = 0,
        seed: int = 0,
    ) -> None:
        numbers = [str(value) for value in (ttl_s, grace_s, timeout_s, port, seed)]
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


def settle(*nodes: Node) -> None:
    """Nothing is under way in the end, nothing held, nothing wrong."""
    # Who is idle first may have blocks that others are still to free: asked again when
    # all are, nobody has.
    for _ in range(2):
        for node in nodes:
            node.tell("settle")
        told = [node.hear() for node in nodes]
    for found in told:
        under_way = found.pop("under_way")
        assert not any(under_way.values()), under_way
        assert found == {"wrong": 0, "active": 0, "held": 0}
