"""A prefix computed on one server and asked of another: from where, and how fast.

Our pool over Mooncake's transfer engine (TCP) and over NIXL, HiCache with Mooncake
Store (its master and its store process), and plain SGLang, which computes it anew. All
run side by side with the same memory, and one more pool of ours with less; the shared
memory is a quarter of the working set; in the middle a server of each pair is killed
and started again, empty.

Each call plays repeats of 300 asks until its time is up, and writes each to
``records/`` when it is whole; calls add up. README.md says more. A table of all calls
that add up, and one JSON object as the last line; the exit code is 1 if it names
``targets_missed``.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parents[1] / "baselines"))

import numpy as np
from against import model
from against.answers import Reference, judge, whole
from against.calling import Clock, run
from against.ports import Range
from against.records import Call, busy_cores
from against.running import Running
from sgl_tiered_workloads.cluster.ports import Ports
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.harness.control import rounding_spread
from sgl_tiered_workloads.server import exit_on_signals
from stores import arms, loads, report
from stores.arms import PAGE, RECOMPUTE
from stores.playing import REST_S, Played, play, warm_up

MINUTES = 45.0
_STOP_S = 90.0
"""Before the end: what it takes to stop, and to write."""
_WARM_SEED = 500_000
_ROUNDED = 8
"""Prompts that are computed in parts, to see how plain SGLang rounds."""


def design(asks: int) -> dict[str, Any]:
    """Return what is measured; calls of another design do not add up with ours."""
    return {
        "model": model.FACTS,
        "page": PAGE,
        "pool_tokens": arms.POOL_TOKENS,
        "host_tokens": {name: arms.host_tokens(name) for name in arms.POOLS},
        "shared_tokens": arms.shared_tokens(),
        "working_set_tokens": loads.working_set_tokens(),
        "lengths": loads.LENGTHS,
        "alive": loads.ALIVE,
        "restart_at": loads.RESTART_AT,
        "rest_s": REST_S,
        "asks": asks,
    }


class Bench:
    """One call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = Clock("store", args.minutes, _STOP_S)
        self.out: Path = args.out.resolve()
        sizes = design(args.asks) | {"arms": args.arms}
        self.call = Call("store", sizes, args.record, peer_versions(), busy_cores())

    async def run(self) -> None:
        """Play repeats until the time is up."""
        if len(self.call.before) >= self.args.repeats:
            return
        folder = await asyncio.to_thread(model.half_bench, self.args.models)
        logs = self.out / "logs"
        # A registry of before names servers that are gone.
        shutil.rmtree(logs, ignore_errors=True)
        ports = Range(self.args.ports) if self.args.ports else Ports()
        made = arms.make_arms(self.args.arms, folder, ports, logs)
        members = [member for arm in made.values() for member in arm.members]
        services = [service for arm in made.values() for service in arm.services]
        cluster = Cluster(
            members, logs, services=services, ports=ports, say=self.clock.say
        )
        async with Running(cluster):
            while len(self.call.all_blocks) < self.args.repeats and self.clock.fits(
                self.call.blocks
            ):
                await self._repeat(cluster, made)

    async def _repeat(self, cluster: Cluster, made: dict[str, arms.Arm]) -> None:
        began_s = time.monotonic()
        repeat = len(self.call.all_blocks)
        seed = self.args.seed * 1_000 + repeat
        for server in cluster.servers.values():
            await asyncio.to_thread(server.flush_cache)
        generator = np.random.default_rng(seed + _WARM_SEED)
        for arm in made.values():
            await warm_up(cluster, arm, generator)
        steps = loads.draw(seed, self.args.asks)
        self.clock.say(f"repeat {repeat}: {self.args.asks} asks each")
        played = await play(cluster, made, steps, generator, self.clock.say)
        plain = cluster.servers[made[RECOMPUTE].members[0].name]
        asked = [whole(record) for record in played[RECOMPUTE].asked]
        spread = await rounding_spread(plain, asked, PAGE, _ROUNDED)
        reference = Reference(tuple(asked), spread)
        told = {
            name: self._judged(reference, name, each) for name, each in played.items()
        }
        self.call.keep(
            {
                "repeat": repeat,
                "seed": seed,
                "seconds": round(time.monotonic() - began_s, 1),
                "arms": told,
            }
        )

    def _judged(
        self, reference: Reference, name: str, played: Played
    ) -> dict[str, Any]:
        """Return what is written down of an arm."""
        told = report.arm_block(played.asked)
        records = [*played.computed, *played.asked]
        lost = [record for record in records if record.error is not None]
        # Plain SGLang's answers are what others are judged by.
        wrong = judge(reference, played.asked, PAGE)
        reasons = [*wrong.told, *(f"{each.key}: {each.error}" for each in lost[:3])]
        self.clock.say(
            f"{name}: {len(told['ttft_ms'])} asks, {told['by_tier']} tokens, "
            f"{len(lost)} lost, {len(wrong.keys)} wrong, {reasons}"
        )
        return {
            **told,
            "lost": len(lost),
            "wrong": len(wrong.keys),
            "judged": 0 if name == RECOMPUTE else wrong.judged,
            "restarts": played.num_restarts,
            "told": [reason[:300] for reason in reasons],
        }


def peer_versions() -> dict[str, str]:
    """Return the versions of the two transports' packages."""
    names = ("mooncake-transfer-engine-non-cuda", "nixl")
    return {name: importlib.metadata.version(name) for name in names}


def main() -> int:
    """Run a call; 1 if a target is missed."""
    full = os.environ.get("FULL") == "1"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-store"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument(
        "--record", type=Path, default=Path(__file__).with_name("records")
    )
    parser.add_argument("--minutes", type=float, default=600.0 if full else MINUTES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--asks", type=int, default=loads.NUM_ASKS)
    parser.add_argument("--repeats", type=int, default=report.WANTED_REPEATS)
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=arms.ARMS,
        default=list(arms.ARMS),
        help=f"some of them; {RECOMPUTE} is needed, as the others are judged by it",
    )
    parser.add_argument("--ports", metavar="FIRST-LAST", help="default: any free ones")
    args = parser.parse_args()
    if RECOMPUTE not in args.arms:
        parser.error(f"--arms needs {RECOMPUTE}")
    exit_on_signals()
    return run(Bench(args), report)


if __name__ == "__main__":
    raise SystemExit(main())
