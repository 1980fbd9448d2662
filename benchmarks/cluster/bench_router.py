"""Five routers in front of the same servers, whose memory is too small for the load.

Our router by prompt tree, by session and by least load, and sglang-router's
``cache_aware`` and ``power_of_two``, take turns in front of three servers, tiered ones
or HiCache's; device pools together hold a quarter of the working set, hosts another.
Chats, documents and ReAct, mixed, at two rates below saturation; in the middle of each
run a server is killed, and later another one added.

Each call goes on with the runs that have no record yet, for so many minutes, and writes
each to ``records/`` when it is over. README.md says more. A table of all calls that add
up, and one JSON object as the last line; the exit code is 1 if it names
``targets_missed``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "baselines"))

import numpy as np
from against import model
from against.answers import Reference, judge, kept_reference, record_reference
from against.calling import Clock, run
from against.ports import Range
from against.records import ROOT, Call, busy_cores
from against.running import Running
from routers import arms, loads, report
from routers.arms import PAGE, Front
from routers.playing import ADDED_AT, KILLED_AT, Played, play
from routers.report import Run
from sgl_tiered_workloads.arrivals import ClosedLoop, poisson_arrivals
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.members import COLOCATED, Member, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.server import SglangServer, exit_on_signals

MINUTES = 45.0
_USERS = 32
"""So many keep the servers busy, though each pauses between its turns."""
_STOP_S = 90.0
"""Before the end: what it takes to stop, to write, and to draw intervals."""


def design() -> dict[str, Any]:
    """Return what is measured; calls of another design do not add up with ours."""
    return {
        "model": model.FACTS,
        "page": PAGE,
        "pool_tokens": arms.POOL_TOKENS,
        "servers": arms.NUM_SERVERS,
        "routers": arms.ROUTERS,
        "loads": {name: dict(each) for name, each in loads.SHARES.items()},
        "pauses_s": dict(loads.PAUSES_S),
        "max_turns": loads.MAX_TURNS,
        "shares": report.SHARES,
        "users": _USERS,
        "killed_at": KILLED_AT,
        "added_at": ADDED_AT,
    }


class Bench:
    """One call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = Clock("router", args.minutes, _STOP_S)
        self.out: Path = args.out.resolve()
        self.ports: Ports = Range(args.ports) if args.ports else Ports()
        peers = {"sglang-router": router_version(args.sglang_router)}
        sizes = {**design(), "requests": args.requests}
        self.call = Call("router", sizes, args.record, peers, busy_cores())

    async def run(self) -> None:
        """Measure runs until the time is up."""
        folder = await asyncio.to_thread(model.half_bench, self.args.models)
        while (run := self._next()) is not None:
            await self._with_servers(run.backend, folder)

    def _next(self) -> Run | None:
        """Return the run that is due; None if there is none, or no time for it."""
        left = report.runs_left(self.call.all_blocks, self.args.servers)
        return left[0] if left and self.clock.fits(self.call.all_blocks) else None

    async def _with_servers(self, backend: str, folder: Path) -> None:
        """Measure the runs before a kind of servers, while time is left.

        Plain SGLang is there besides and asleep but for the time in which it answers a
        schedule that is new.
        """
        logs = self.out / "logs" / backend
        members = arms.servers(backend, folder, self.ports, self.out / "plugins")
        device = arms.reference_device(folder)
        plain = new_member(device, COLOCATED, "plain", self.ports, events=False)
        cluster = Cluster([*members, plain], logs, ports=self.ports, say=self.clock.say)
        async with Running(cluster):
            while (run := self._next()) is not None and run.backend == backend:
                reference = await self._reference(
                    cluster.servers[plain.name], self._seed(run.repeat)
                )
                rate = await self._rate(cluster, members, reference)
                await self._run(cluster, members, run, reference, rate)

    async def _run(
        self,
        cluster: Cluster,
        members: list[Member],
        run: Run,
        reference: Reference,
        rate: float,
    ) -> None:
        """Play a schedule through a router, and keep what came of it."""
        began_s = time.monotonic()
        seed = self._seed(run.repeat)
        records = reference.records
        sessions = loads.scripts(records, loads.draw_pauses(records, seed))
        sessions_per_s = run.share * rate * len(sessions) / len(records)
        generator = np.random.default_rng(seed + 1)
        arrivals = poisson_arrivals(sessions_per_s, len(sessions), generator)
        front = self._front(run.router, members)
        prefix = f"{seed}.{run.share}."
        played = await play(cluster, front, members, sessions, arrivals, prefix)
        block = {
            **run._asdict(),
            "seed": seed,
            "capacity_per_s": rate,
            "sessions_per_s": sessions_per_s,
            "working_set_tokens": loads.working_set(records, PAGE),
            "requests": len(records),
            "added": members[-1].name,
            **self._judged(reference, played),
            "seconds": round(time.monotonic() - began_s, 1),
        }
        self.call.keep(block)
        self._say(run, block)

    def _judged(self, reference: Reference, played: Played) -> dict[str, Any]:
        wrong = judge(reference, played.records, PAGE)
        documents = {loads.document_of(each.key) for each in reference.records}
        struck = played.struck
        told = [*wrong.told, *(str(each.error)[:200] for each in played.lost[:3])]
        return {
            **report.arm_block(played.records, sorted(documents)),
            "lost": len(played.lost),
            "unsent": len(reference.records) - len(played.records),
            "broken": played.num_broken,
            "evicted_tokens": played.evicted_tokens,
            "served": played.served,
            "killed_s": struck.killed_s,
            "added_s": struck.added_s,
            "cached": played.cached,
            "wrong": len(wrong.keys),
            "judged": wrong.judged,
            "told": [*told, struck.why_not] if struck.why_not else told,
        }

    def _say(self, run: Run, block: dict[str, Any]) -> None:
        times = [t for each in block["ttft_ms"].values() for t in each] or [np.nan]
        cached = sum(block["cached"].values()) / max(block["prompt_tokens"], 1)
        self.clock.say(
            f"{run.backend} {run.share} repeat {run.repeat} {run.router}: "
            f"{block['seconds']:.0f} s, TTFT mean {np.mean(times):.0f} ms, P99 "
            f"{np.percentile(times, 99):.0f} ms, cached {cached:.1%}, evicted "
            f"{block['evicted_tokens']} tokens, waiting {block['waiting']}, "
            f"served {block['served']}, lost {block['lost']}, "
            f"unsent {block['unsent']}, broken {block['broken']}, wrong "
            f"{block['wrong']} of {block['judged']}"
        )
        for line in block["told"]:
            self.clock.say(f"  {line}")

    def _front(self, name: str, members: list[Member]) -> Front:
        logs = self.out / "logs" / "routers"
        return Front.before(
            name, members[:-1], self.ports, logs, self.args.sglang_router
        )

    # -- What plain SGLang answers, and what the servers can do ------------------------

    def _seed(self, repeat: int) -> int:
        return int(self.args.seed) * 1_000 + repeat

    async def _reference(self, plain: SglangServer, seed: int) -> Reference:
        """Return plain SGLang's answers to a schedule, recorded if there are none."""
        num = self.args.requests
        name = f"mixed-{num}-{seed}-{self.call.header['design']}.jsonl"
        path = self.out / "reference" / name
        made = kept_reference(path)
        if made is None:
            made = await record_reference(
                plain,
                loads.draw(seed, num),
                PAGE,
                path,
                lambda told: loads.cut(told, num),
            )
            size = loads.working_set(made.records, PAGE)
            self.clock.say(f"plain: schedule {seed}: {size} tokens, {made.spread}")
        return made

    async def _rate(
        self, cluster: Cluster, members: list[Member], reference: Reference
    ) -> float:
        """Return the requests/s that the servers can do: measured once, then kept.

        Many users send the schedule behind ``least-load``, with its pauses, from empty
        caches. What is answered counts until the last session begins: later some users
        have nothing to do. If so many users do not fill the servers, they can do more,
        and what is offered is a smaller share than is said.
        """
        for block in self.call.all_blocks:
            return float(block["capacity_per_s"])
        for member in members:
            server = cluster.servers[member.name]
            await asyncio.to_thread(server.flush_cache)
        front = self._front(arms.LEAST_LOAD, members)
        seed = self._seed(0)
        pauses_s = loads.draw_pauses(reference.records, seed)
        sessions = loads.scripts(reference.records, pauses_s)
        users = min(_USERS, len(sessions) // 2)
        await asyncio.to_thread(front.service.start)
        try:
            async with StreamingClient(front.service.url) as client:
                records = await run_sessions(client, sessions, ClosedLoop(users))
        finally:
            await asyncio.to_thread(front.service.stop)
        rate = loads.rate_of(records)
        self.clock.say(f"the servers do {rate:.2f} requests/s")
        return rate


def router_version(python: Path) -> str:
    """Return the version of the sglang-router that an interpreter has."""
    told = "import importlib.metadata as m; print(m.version('sglang-router'))"
    done = subprocess.run(
        [str(python), "-c", told], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> int:
    """Run a call; 1 if a target is missed."""
    full = os.environ.get("FULL") == "1"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-router"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument(
        "--record", type=Path, default=Path(__file__).with_name("records")
    )
    parser.add_argument("--minutes", type=float, default=600.0 if full else MINUTES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=loads.NUM_REQUESTS)
    parser.add_argument(
        "--servers", nargs="+", choices=arms.BACKENDS, default=list(arms.BACKENDS)
    )
    parser.add_argument("--ports", metavar="FIRST-LAST", help="default: any free ones")
    parser.add_argument(
        "--sglang-router",
        type=Path,
        default=ROOT / ".cache/sglang-router/bin/python",
        help="the Python that has sglang-router",
    )
    args = parser.parse_args()
    exit_on_signals()
    return run(Bench(args), report)


if __name__ == "__main__":
    raise SystemExit(main())
