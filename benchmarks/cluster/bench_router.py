"""Five routers in front of the same servers, whose memory is too small for the load.

Our router by prompt tree, by session and by least load, and sglang-router's
``cache_aware`` and ``power_of_two``, take turns in front of three servers, tiered ones
or HiCache's; device pools together hold a quarter of the working set, hosts another.
Chats, documents and ReAct, at two loads below saturation; in the middle of each
measurement a server is killed, and later another one added.

Each call measures the cells that were measured least, for so many minutes, and writes
each to ``records/`` when all routers have had it. README.md says more. A table of all
calls that add up, and one JSON object as the last line.
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
from sgl_tiered_workloads.arrivals import ClosedLoop, poisson_arrivals
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.members import COLOCATED, Member, new_member
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.harness.turns import rotated
from sgl_tiered_workloads.server import exit_on_signals

MINUTES = 45.0
_MANY_USERS = 8
_CALIBRATION_REQUESTS = 100
_CALIBRATION_SEED = 90_000
_STOP_S = 60.0
"""Before the end: what it takes to stop, and to write."""


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
        self.call = Call("router", sizes, args.records, peers, busy_cores())

    async def run(self) -> None:
        """Measure cells until the time is up."""
        folder = await asyncio.to_thread(model.half_bench, self.args.models)
        while True:
            cells = report.next_cells(
                self.call.all_blocks, self.args.servers, self.args.loads
            )
            (backend, _, _), repeat = cells[0]
            if repeat >= self.args.repeats or not self.clock.fits(self.call.blocks):
                return
            wanted = [cell for cell, n in cells if (cell[0], n) == (backend, repeat)]
            seeds = {self._seed(load, repeat) for _, load, _ in wanted}
            await self._references(folder, seeds)
            await self._with_servers(backend, folder, repeat)

    async def _with_servers(self, backend: str, folder: Path, repeat: int) -> None:
        """Measure one repeat of the cells of a kind of servers, while time is left."""
        logs = self.out / "logs" / backend
        members = arms.servers(backend, folder, self.ports, self.out / "plugins")
        cluster = Cluster(members, logs, ports=self.ports, say=self.clock.say)
        async with Running(cluster):
            while self.clock.fits(self.call.blocks):
                (cell, number), *_ = report.next_cells(
                    self.call.all_blocks, self.args.servers, self.args.loads
                )
                if cell[0] != backend or number != repeat:
                    return
                await self._block(cluster, members, cell, repeat)

    async def _block(
        self,
        cluster: Cluster,
        members: list[Member],
        cell: report.Cell,
        repeat: int,
    ) -> None:
        """Let the routers take turns with one schedule, and keep what came of it."""
        backend, load, share = cell
        began_s = time.monotonic()
        seed = self._seed(load, repeat)[1]
        reference = kept_reference(self._path(load, seed))
        assert reference is not None, "recorded before the servers were started"
        rate = await self._rate(cluster, members, load)
        records = reference.records
        pauses_s = np.random.default_rng(seed).exponential(
            loads.PAUSES_S[load], len(records)
        )
        count = len(loads.scripts(records, pauses_s))
        sessions_per_s = share * rate * count / len(records)
        arrivals = poisson_arrivals(
            sessions_per_s, count, np.random.default_rng(seed + 1)
        )
        turn = len(self.call.all_blocks)
        told: dict[str, Any] = {}
        for name in rotated(arms.ROUTERS, turn):
            front = Front.before(
                name,
                members[:-1],
                self.ports,
                self.out / "logs" / "routers",
                self.args.sglang_router,
            )
            sessions = loads.scripts(records, pauses_s)
            played = await play(cluster, front, members, sessions, arrivals, f"{seed}.")
            told[name] = self._judged(reference, played)
            self._say_arm(cell, name, told[name])
        self.call.keep(
            {
                "backend": backend,
                "load": load,
                "share": share,
                "repeat": repeat,
                "seed": seed,
                "capacity_per_s": rate,
                "sessions_per_s": sessions_per_s,
                "working_set_tokens": loads.working_set(records, PAGE),
                "requests": len(records),
                "order": list(rotated(arms.ROUTERS, turn)),
                "seconds": round(time.monotonic() - began_s, 1),
                "arms": told,
            }
        )

    def _judged(self, reference: Reference, played: Played) -> dict[str, Any]:
        wrong = judge(reference, played.records, PAGE)
        documents = {loads.document_of(each.key) for each in reference.records}
        return {
            **report.arm_block(played.records, sorted(documents)),
            "lost": len(played.lost),
            "unsent": len(reference.records) - len(played.records),
            "broken": played.num_broken,
            "evicted_tokens": played.evicted_tokens,
            "cached": played.cached,
            "wrong": len(wrong.keys),
            "judged": wrong.judged,
            "told": [*wrong.told, *(str(each.error)[:200] for each in played.lost[:3])],
        }

    def _say_arm(self, cell: report.Cell, name: str, told: dict[str, Any]) -> None:
        times = np.concatenate([np.asarray(t) for t in told["ttft_ms"].values()])
        cached = sum(told["cached"].values()) / max(told["prompt_tokens"], 1)
        backend, load, share = cell
        self.clock.say(
            f"{backend} {load} {share} {name}: TTFT mean {np.mean(times):.0f} ms, P99 "
            f"{np.percentile(times, 99):.0f} ms, cached {cached:.1%}, evicted "
            f"{told['evicted_tokens']} tokens, lost {told['lost']}, unsent "
            f"{told['unsent']}, broken {told['broken']}, wrong {told['wrong']} of "
            f"{told['judged']}"
        )
        for line in told["told"]:
            self.clock.say(f"  {line}")

    # -- What plain SGLang answers, and what the servers can do ------------------------

    def _seed(self, load: str, repeat: int) -> tuple[str, int]:
        number = self.args.seed * 1_000 + repeat * 10 + loads.LOADS.index(load)
        return load, number

    def _path(self, load: str, seed: int) -> Path:
        name = f"{load}-{self.args.requests}-{seed}-{self.call.header['design']}.jsonl"
        return self.out / "reference" / name

    async def _references(self, folder: Path, seeds: set[tuple[str, int]]) -> None:
        """Record plain SGLang's answers to schedules that have none yet."""
        missing = sorted(each for each in seeds if not self._path(*each).exists())
        if not missing:
            return
        device = arms.reference_device(folder)
        member = new_member(device, COLOCATED, "plain", self.ports, events=False)
        logs = self.out / "logs" / "plain"
        cluster = Cluster([member], logs, ports=self.ports, say=self.clock.say)
        num = self.args.requests
        async with Running(cluster):
            (server,) = cluster.servers.values()
            for load, seed in missing:
                made = await record_reference(
                    server,
                    loads.draw(load, seed, num),
                    PAGE,
                    self._path(load, seed),
                    lambda told: loads.cut(told, num),
                )
                size = loads.working_set(made.records, PAGE)
                self.clock.say(f"plain: {load} {seed}: {size} tokens, {made.spread}")

    async def _rate(self, cluster: Cluster, members: list[Member], load: str) -> float:
        """Return the requests/s that the servers can do: measured once, then kept.

        Eight users without pauses behind ``least-load``; by Little's law, and not by
        the time that it took: in the end few still run.
        """
        known = [b for b in self.call.all_blocks if b["load"] == load]
        if known:
            return float(known[0]["capacity_per_s"])
        for member in members:
            server = cluster.servers[member.name]
            await asyncio.to_thread(server.flush_cache)
        front = Front.before(
            arms.LEAST_LOAD,
            members[:-1],
            self.ports,
            self.out / "logs" / "routers",
            self.args.sglang_router,
        )
        sessions = loads.draw(load, _CALIBRATION_SEED, _CALIBRATION_REQUESTS)
        await asyncio.to_thread(front.service.start)
        try:
            async with StreamingClient(front.service.url) as client:
                records = await run_sessions(client, sessions, ClosedLoop(_MANY_USERS))
        finally:
            await asyncio.to_thread(front.service.stop)
        rate = _MANY_USERS / float(np.mean([record.e2e_s for record in records]))
        self.clock.say(f"{load}: the servers do {rate:.2f} requests/s")
        return rate


def router_version(python: Path) -> str:
    """Return the version of the sglang-router that an interpreter has."""
    told = "import importlib.metadata as m; print(m.version('sglang-router'))"
    done = subprocess.run(
        [str(python), "-c", told], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def main() -> int:
    """Run a call; 0 unless an answer was wrong, ours was lost, or nothing evicted."""
    full = os.environ.get("FULL") == "1"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-router"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument(
        "--records", type=Path, default=Path(__file__).with_name("records")
    )
    parser.add_argument("--minutes", type=float, default=600.0 if full else MINUTES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=loads.NUM_REQUESTS)
    parser.add_argument("--repeats", type=int, default=report.WANTED_REPEATS)
    parser.add_argument(
        "--servers", nargs="+", choices=arms.BACKENDS, default=list(arms.BACKENDS)
    )
    parser.add_argument(
        "--loads", nargs="+", choices=loads.LOADS, default=list(loads.LOADS)
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
