"""``python -m tests.soak``: does a tiered server keep anything, slow down, or err?

    make soak ARGS="--minutes 45 [--record DIR]"

Three servers of the tiny model stand side by side: plain SGLang, a tiered one (host and
disk, metrics, KV events), and a tiered one that leaks 716 bytes a request on purpose.
All get the same rounds of requests at the same time (``load.py``); in some rounds the
tiers of the second and third fail or are slow, before some the device's pages are
forgotten. After each round, when nothing runs, a batch of four decodes on the first
two, one after the other, for the CPU seconds of the scheduler per step; and the
resident memory of every process is read. The first third of the time (longer if not
every fault was on by then) is warm-up: the tiers fill, tables and pools of threads get
their size. It ends with a drain, whose open files and threads are what those of the
last drain are compared with.

Every whole answer of the tiered server is judged against plain SGLang's by the gate's
rule for free concurrency. What plain SGLang's answers to a prompt that came again moved
against its own earlier ones widens what may move.

The last line is one JSON object, and the exit code is 0 if all is as it must be:

- ``rss_mb_per_hour``: slope of the tiered server's memory, all processes, less plain's,
  after warm-up (``figures.py`` says which slope); ``rss_half_width``: of its interval;
- ``flows``, ``pins``, ``empty_namespaces``: what is left of requests after the drain;
- ``fd_growth``, ``thread_growth``: over all processes that have more than before, and
  still have a minute later: a connection that is being closed is none;
- ``step_time_growth``: CPU seconds of the scheduler per decode step of four requests
  (their one prefill of 64 tokens included), the median of the last third of the rounds
  over that of the first, less 1; ``step_time_growth_plain`` is the machine's share, and
  ``step_time_growth_over_plain``, with its ``_half_width``, is what is judged;
- ``wrong``: answers that differ; ``errors``: failed requests of both tiered servers,
  and words of a broken invariant in a log;
- ``planted``: what the leak comes to at this rate, and was found to be; ``caught``
  where that is above the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.keeping import keep_record, run_facts
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import exit_on_signals

from tests.e2e.e2e_support import FORBIDDEN_IN_LOGS, drop, pinned, stats
from tests.faults.fault_support import switch_faults
from tests.soak.figures import (
    LEAK_BYTES,
    MAX_RSS_MB_PER_HOUR,
    Slope,
    expected_mb_per_hour,
    failures,
    growth,
    growth_over_plain,
    slope,
)
from tests.soak.judge import Judge, note
from tests.soak.load import STEPS, Drawer, Kind, Planned, decoders, send_round
from tests.soak.servers import Watched, running

ROOT = Path(__file__).parents[2]
SOURCES = ("sgl_tiered", "workloads/sgl_tiered_workloads", "tests/soak")
TIERED = ("tiered", "planted")
MB = 1e6
WARM_UP = 1 / 3
FAULT_EVERY, DROP_EVERY = 2, 3
FAULTS = (
    "host:delay=0.001..0.005",
    "disk:fault=error@0.3",
    "host:fault=error@0.3/load",
    "disk:delay=0.01..0.05",
    "disk:fault=partial@0.3/load,fault=corrupt@0.3",
    "host:fault=error@0.3/store",
    "disk:fault=full",
    "host:fault=hang/for=1",
    "disk:fault=hang/for=2",
)
"""One of them every other round, in turns."""
SLOW_DISK = "disk:delay=0.3..0.5"
"""Slow enough that all readers of the disk are busy at once, with ``CONCURRENCY``."""
NUM_SLOW = 40
LEAST_ROUNDS = 3
"""Of either part of a run, however short: a third of them has to be something."""
DRAIN_S = 60.0


@dataclass(slots=True)
class Sample:
    """What was read after a round.

    Attributes:
        at_s: from the start of the load.
        rss: bytes by server and process.
        step_s: CPU seconds of the scheduler per decode step, by server.
    """

    at_s: float
    rss: dict[str, dict[str, int]]
    step_s: dict[str, float]

    def total(self, server: str) -> int:
        """Return bytes of all processes of a server."""
        return sum(self.rss[server].values())


class Soak:
    """One run.

    Args:
        servers: plain, tiered and planted, running.
        seed: of what is sent.
    """

    def __init__(self, servers: Mapping[str, Watched], seed: int) -> None:
        self._servers = servers
        self._seed = seed
        self._drawer = Drawer(seed)
        self._number = 0
        self.judge = Judge()
        self.samples: list[Sample] = []
        self.sent = Counter[str]()
        self.num_faults = 0

    def run_until(self, end_s: float, num_faults: int = 0) -> None:
        """Send rounds, a few at least, and take a sample after each.

        Args:
            end_s: until when at least, on the monotonic clock.
            num_faults: that must have been on by then, since the start.
        """
        least = self._number + LEAST_ROUNDS
        while (
            time.monotonic() < end_s
            or self.num_faults < num_faults
            or self._number < least
        ):
            self._round()

    def use_all_threads(self) -> None:
        """Read from a slow disk for many requests at once.

        Pools of threads begin with none, and add one whenever all are busy: without
        this it depends on the load when the last one comes.
        """
        planned = self._drawer.next_round()
        self.judge.take(planned, asyncio.run(self._send(planned)))
        self.sent.update(each.kind.value for each in planned)
        for watched in self._servers.values():
            watched.become_quiet()
        for name in TIERED:
            drop(self._servers[name].server, "device", "host")
        again = [
            replace(each, request=replace(each.request, key=each.request.key + ".slow"))
            for each in planned
            if each.kind is Kind.FRESH
        ]
        self._switch(SLOW_DISK)
        slow = again[:NUM_SLOW]
        self.judge.take(slow, asyncio.run(self._send(slow)))
        self._switch("")

    def _round(self) -> None:
        number = self._number
        self._number += 1
        fault = ""
        if number % FAULT_EVERY == FAULT_EVERY - 1:
            fault = FAULTS[number // FAULT_EVERY % len(FAULTS)]
            self.num_faults += 1
        if number % DROP_EVERY == DROP_EVERY - 1:
            for name in TIERED:
                drop(self._servers[name].server, "device")
        planned = self._drawer.next_round()
        began_s = time.monotonic()
        self._switch(fault)
        answers = asyncio.run(self._send(planned))
        self._switch("")
        took_s = time.monotonic() - began_s
        self.sent.update(each.kind.value for each in planned)
        self.judge.take(planned, answers)
        for watched in self._servers.values():
            watched.server.get("/metrics")
            watched.become_quiet()
        order = ("plain", "tiered") if number % 2 else ("tiered", "plain")
        step_s = {name: self._step_s(self._servers[name]) for name in order}
        rss = {name: each.rss_bytes() for name, each in self._servers.items()}
        self.samples.append(Sample(time.monotonic(), rss, step_s))
        told = ", ".join(
            f"{name} {self.samples[-1].total(name) / MB:.2f} MB" for name in rss
        )
        steps = ", ".join(f"{n} {1e3 * s:.2f}" for n, s in step_s.items())
        note(
            f"round {number}: {len(planned) / took_s:.1f} requests/s, {told}, CPU ms "
            f"per step {steps}{', ' + fault if fault else ''}"
        )

    async def _send(self, planned: list[Planned]) -> dict[str, Any]:
        found = await asyncio.gather(
            *(send_round(each.server, planned) for each in self._servers.values())
        )
        return dict(zip(self._servers, found, strict=True))

    def _switch(self, fault: str) -> None:
        for name in TIERED:
            switch_faults(self._servers[name].server, fault)

    def _step_s(self, watched: Watched) -> float:
        """Return CPU seconds of the scheduler per decode step of one batch."""

        async def decode() -> list[RequestRecord]:
            async with StreamingClient(watched.server.url, logprobs=False) as client:
                return await client.send_batch(decoders(self._seed, self._number))

        before_s = watched.scheduler_cpu_s()
        records = asyncio.run(decode())
        cpu_s = watched.scheduler_cpu_s() - before_s
        name = watched.server.spec.name
        self.judge.errors[name] += sum(each.error is not None for each in records)
        watched.become_quiet()
        return cpu_s / STEPS

    def drain(self, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Wait until nothing is left of requests; return what there is then.

        Args:
            before: of an earlier drain: also until no more is open than there was.
        """
        for watched in self._servers.values():
            watched.become_quiet()
        left: dict[str, int] = {}
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            state = stats(self._servers["tiered"].server)
            left = {
                "flows": state["flows"],
                "pins": pinned(state),
                "empty_namespaces": state["empty_namespaces"],
            }
            found = {**left, **self._open()}
            if not any(left.values()) and not any(grown_by(before or found, found)):
                break
            time.sleep(1.0)
        return {**left, **self._open()}

    def _open(self) -> dict[str, Any]:
        every = self._servers.items()
        return {
            "fds": {name: each.num_fds() for name, each in every},
            "threads": {name: each.num_threads() for name, each in every},
        }


def grown_by(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[int]:
    """Return by how much open files and threads have grown, of each server."""
    return [
        grown(first[what][name], last[what][name])
        for what in ("fds", "threads")
        for name in last[what]
    ]


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return by how much those have grown that have."""
    return sum(max(0, after[name] - before[name]) for name in after)


def broken_logs(servers: Mapping[str, Watched]) -> int:
    """Return how many words of a broken invariant the tiered servers' logs hold."""
    num = 0
    for name in TIERED:
        log = servers[name].server.log_path.read_text(errors="replace")
        found = [text for text in FORBIDDEN_IN_LOGS if text in log]
        num += len(found)
        if found:
            note(f"{name}: the log has {found}")
    return num


def less_plain(samples: list[Sample], server: str, process: str = "") -> Slope:
    """Return MB per hour of a server less plain's; of one process, or of all."""

    def size(sample: Sample, name: str) -> float:
        return sample.rss[name][process] if process else sample.total(name)

    times_s = [sample.at_s for sample in samples]
    sizes = [(size(each, server) - size(each, "plain")) / MB for each in samples]
    return slope(times_s, sizes)


def soak(servers: Mapping[str, Watched], minutes: float, seed: int) -> dict[str, Any]:
    """Run for so many minutes; return the figures, and the samples as ``series``."""
    run = Soak(servers, seed)
    began_s = time.monotonic()
    run.use_all_threads()
    # A fault that strikes for the first time may start threads that stay.
    run.run_until(began_s + 60 * minutes * WARM_UP, num_faults=len(FAULTS))
    first = run.drain()
    num_warm, num_before = len(run.samples), sum(run.sent.values())
    note(f"warm after {num_warm} rounds: {first}")
    warm_s = time.monotonic()
    run.run_until(began_s + 60 * minutes)
    rate = (sum(run.sent.values()) - num_before) / (time.monotonic() - warm_s)
    last = run.drain(first)
    note(f"drained: {last}")
    samples = run.samples[num_warm:]
    own, leaky = less_plain(samples, "tiered"), less_plain(samples, "planted")
    times_s = [sample.at_s for sample in samples]
    plain = slope(times_s, [sample.total("plain") / MB for sample in samples])
    expected = expected_mb_per_hour(LEAK_BYTES, rate)
    errors = run.judge.errors
    steps = {
        name: [sample.step_s[name] for sample in run.samples]
        for name in ("plain", "tiered")
    }
    over_plain = growth_over_plain(steps["tiered"], steps["plain"])
    fds, threads = (
        {name: grown(first[what][name], last[what][name]) for name in servers}
        for what in ("fds", "threads")
    )
    return {
        "minutes": minutes,
        "rounds": len(run.samples),
        "sent": dict(run.sent),
        "fault_rounds": run.num_faults,
        "requests_per_s": round(rate, 2),
        "rss_mb_per_hour": round(own.per_hour, 2),
        "rss_half_width": round(own.half_width, 2),
        "rss_mb_per_hour_plain": round(plain.per_hour, 2),
        "rss_mb_per_hour_by_process": {
            process: round(less_plain(samples, "tiered", process).per_hour, 2)
            for process in samples[0].rss["plain"]
        },
        "flows": last["flows"],
        "pins": last["pins"],
        "empty_namespaces": last["empty_namespaces"],
        "fd_growth": fds["tiered"],
        "fd_growth_plain": fds["plain"],
        "thread_growth": threads["tiered"],
        "thread_growth_plain": threads["plain"],
        "step_time_growth": round(growth(steps["tiered"]), 4),
        "step_time_growth_plain": round(growth(steps["plain"]), 4),
        "step_time_growth_over_plain": round(over_plain.share, 4),
        "step_time_growth_over_plain_half_width": round(over_plain.half_width, 4),
        "wrong": run.judge.wrong,
        "judged": run.judge.judged,
        "largest_move_of_plain": round(run.judge.spread.max_logprob, 4),
        "errors": sum(errors[name] for name in TIERED) + broken_logs(servers),
        "errors_plain": errors["plain"],
        "reused": {tier: num for tier, num in run.judge.reused.items() if num},
        "planted": {
            "bytes_per_request": LEAK_BYTES,
            "expected_mb_per_hour": round(expected, 2),
            "rss_mb_per_hour": round(leaky.per_hour, 2),
            "rss_half_width": round(leaky.half_width, 2),
            "caught": leaky.per_hour > MAX_RSS_MB_PER_HOUR,
        },
        "series": [
            {"at_s": each.at_s - began_s, "rss": each.rss, "step_s": each.step_s}
            for each in run.samples
        ],
    }


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--minutes", type=float, default=45.0, help="of load")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="folder for the figures as a file")
    args = parser.parse_args()
    exit_on_signals()
    if args.record is not None:
        args.record = args.record.resolve()
    # Where the planted server finds its module.
    os.chdir(ROOT)
    out = ROOT / "out" / "soak"
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=out) as name,
        running(Path(name), out / "logs") as servers,
    ):
        figures = soak(servers, args.minutes, args.seed)
    series = figures.pop("series")
    figures["failures"] = failures(figures)
    figures["passed"] = not figures["failures"]
    figures |= {"seed": args.seed, **run_facts("make soak", ROOT, SOURCES)}
    if args.record is not None:
        keep_record(args.record, "soak", {**figures, "series": series})
    print(json.dumps(figures))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
