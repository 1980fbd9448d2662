"""A call from its start to its last line: what time is left, and how it ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from against.records import Call
from sgl_tiered_workloads.fork_server import fork_servers
from sgl_tiered_workloads.server import ServerStartError

__all__ = ["Bench", "Clock", "Report", "run"]

Blocks = Sequence[dict[str, Any]]


class Clock:
    """What time a call has.

    Args:
        name: of the benchmark.
        minutes: that the call may take.
        stop_s: before the end, what it takes to stop, and to write.
    """

    def __init__(self, name: str, minutes: float, stop_s: float) -> None:
        self._name = name
        self._began_s = time.monotonic()
        self._end_s = self._began_s + 60.0 * minutes - stop_s

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        minutes = (time.monotonic() - self._began_s) / 60.0
        print(f"[{self._name} {minutes:5.1f} min] {text}", file=sys.stderr, flush=True)

    def fits(self, blocks: Blocks) -> bool:
        """Whether one more block ends in time, by the longest of these."""
        taken = [float(block["seconds"]) for block in blocks]
        return time.monotonic() + max(taken, default=0.0) < self._end_s


class Bench(Protocol):
    """What is measured."""

    call: Call
    clock: Clock

    async def run(self) -> None:
        """Measure blocks until the time is up."""


class Report(Protocol):
    """What is made of all blocks."""

    def table(self, blocks: Blocks) -> Iterable[str]:
        """Return lines for people."""

    def summary(self, blocks: Blocks) -> Mapping[str, Any]:
        """Return the last line; ``targets_missed`` names what is not as wanted."""


def run(bench: Bench, report: Report) -> int:
    """Run a call and tell what all calls came to.

    Returns:
        0 if no target is missed.
    """
    fork_servers()
    try:
        asyncio.run(bench.run())
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        bench.clock.say("interrupted: what was measured until then is kept")
    finally:
        fork_servers(False)
    blocks = bench.call.all_blocks
    for line in report.table(blocks):
        print(line)
    told = report.summary(blocks)
    bench.call.end(told)
    print(json.dumps(told))
    return 1 if told["targets_missed"] else 0
