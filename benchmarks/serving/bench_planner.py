"""The planner against "always load" and "always recompute", on the same requests.

One server, whose load policy takes turns: auto, always, never. Host memory and disk are
emulated links (the figures say so); each request's prefix is where the workload wants
it, and nowhere faster, when the request is sent. Workloads:

- ``wins``: long prefixes in host memory;
- ``loses``: short prefixes on a disk with a latency;
- ``mixed``: one long prefix on that disk for every three short ones;
- ``busy``: several long prefixes on that disk at once, so that their reads queue.

A round's figure is its mean TTFT; each round's ratio to the better baseline is a pair,
and the median of the pairs counts. Before that, the answers under ``auto`` and
``always`` are compared with those under ``never``. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from movement.ending import run_to_end
from movement.tools import (
    Prompts,
    answered,
    drop,
    interval,
    send,
    stats,
    use_policy,
    wait_for_pages,
)
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import check_equality, measure_spread
from sgl_tiered_workloads.harness.turns import rotated
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import (
    SglangServer,
)
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers, tiered_spec

POOL_TOKENS = 16_384
PAGE = 16
HOST_BYTES = 600_000_000
DISK_BYTES = 2_000_000_000
LINKS = "host:bandwidth=1GB;disk:bandwidth=60MB,latency=0.15"
NEW_TOKENS = 64
GATE_TOKENS = 8
POLICIES = ("auto", "always", "never")
MIXED = ("mixed", "busy")


@dataclass(frozen=True, slots=True)
class Workload:
    """Prefix lengths in tokens, where they are, and whether all come at once."""

    name: str
    lengths: tuple[int, ...]
    tier: str
    at_once: bool = False


WORKLOADS = (
    Workload("wins", (4_000, 4_000), "host"),
    Workload("loses", (256, 256, 256, 256), "disk"),
    Workload("mixed", (256, 4_000, 256, 256), "disk"),
    Workload("busy", (2_000, 2_000, 2_000), "disk", at_once=True),
)


@dataclass(slots=True)
class Findings:
    """Mean TTFT per workload, policy and round; what the planner decided; problems."""

    means: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    decisions: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.findings = Findings()
        self.prompts = Prompts(np.random.default_rng(4))
        self.prefixes = {
            w.name: [self.prompts.tokens(n) for n in w.lengths] for w in WORKLOADS
        }
        self.num_pages = sum(n // PAGE for w in WORKLOADS for n in w.lengths)

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    async def run(self) -> dict[str, Any]:
        """Measure all workloads and return the result."""
        out = self.args.out.resolve()
        model = await asyncio.to_thread(make_model, "bench", self.args.models.resolve())
        device = Device(model, POOL_TOKENS, flags=CPU_FLAGS)
        store = out / "store"
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir(parents=True)
        tiers = Tiers(HOST_BYTES, store, DISK_BYTES)
        spec = tiered_spec(device, tiers, flags=("--tiered-emulate", LINKS))
        server = SglangServer(spec, out / "logs", self.args.port, say=self.say)
        try:
            with server:
                await self._fill(server)
                await self._compare_answers(server)
                for workload in WORKLOADS:
                    await self._measure(server, workload)
        finally:
            shutil.rmtree(store, ignore_errors=True)
        return self._result()

    async def _fill(self, server: SglangServer) -> None:
        """Let the server compute all prefixes once, down to the disk."""
        self.say("computing the prefixes once")
        await send(server, [self.prompts.after((), 1_600, "warm")] * 2)
        for prefixes in self.prefixes.values():
            for prefix in prefixes:
                await send(server, [self.prompts.after(prefix, NEW_TOKENS, "fill")])
        await wait_for_pages(server, "disk", self.num_pages)

    async def _compare_answers(self, server: SglangServer) -> None:
        """Compare the answers to the same prompts, loaded and computed."""
        requests = [
            replace(request, max_new_tokens=GATE_TOKENS)
            for name, prefixes in self.prefixes.items()
            for place, prefix in enumerate(prefixes)
            for request in [
                self.prompts.after(prefix, NEW_TOKENS, f"gate.{name}{place}")
            ]
        ]

        async def answers(
            policy: str, *, in_parts: bool = False
        ) -> list[RequestRecord]:
            use_policy(server, policy)
            records = []
            for place, request in enumerate(requests):
                await asyncio.to_thread(drop, server, "device", "host")
                num_pages = (len(request.prompt) - 1) // PAGE
                for end in (num_pages // 2, num_pages) if in_parts else ():
                    part = replace(request, prompt=request.prompt[: end * PAGE])
                    await send(server, [part])
                async with StreamingClient(server.url) as client:
                    records.append(answered(await client.send(request, place)))
            return records

        computed = await answers("never")
        # A prompt computed in several passes is rounded otherwise, without tiers too.
        spread = measure_spread(computed, await answers("never", in_parts=True))
        for policy in ("auto", "always"):
            result = check_equality(
                computed,
                await answers(policy),
                page_size=PAGE,
                spread=spread,
                forced=False,
            )
            self.say(f"{policy}: {result.summary()}")
            if not result.passed:
                self.findings.problems.append(f"{policy}: {result.summary()}")

    async def _measure(self, server: SglangServer, workload: Workload) -> None:
        means: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        decisions: Counter[str] = Counter()
        # The first rounds teach the costs.
        for number in range(-self.args.warm_rounds, self.args.rounds):
            requests = [
                self.prompts.after(prefix, NEW_TOKENS, f"{workload.name}.{number}")
                for prefix in self.prefixes[workload.name]
            ]
            for policy in rotated(POLICIES, number):
                use_policy(server, policy)
                before = Counter(stats(server)["counters"])
                ttfts = await self._round(server, workload, requests)
                if number >= 0:
                    means[policy].append(sum(ttfts) / len(ttfts))
                    if policy == "auto":
                        decisions += Counter(stats(server)["counters"]) - before
        self.findings.means[workload.name] = means
        self.findings.decisions[workload.name] = {
            name: round(count)
            for name, count in decisions.items()
            if name.startswith("decisions_")
        }
        text = ", ".join(f"{p} {np.median(means[p]) * 1e3:.0f} ms" for p in POLICIES)
        self.say(f"{workload.name}: {text}; {self.findings.decisions[workload.name]}")

    async def _round(
        self,
        server: SglangServer,
        workload: Workload,
        requests: Sequence[PlannedRequest],
    ) -> list[float]:
        if workload.at_once:
            await self._place(server, workload)
            return await send(server, requests)
        ttfts = []
        for request in requests:
            await self._place(server, workload)
            ttfts += await send(server, [request])
        return ttfts

    async def _place(self, server: SglangServer, workload: Workload) -> None:
        """Leave the prefixes where the workload wants them, and nowhere faster."""
        if workload.tier == "disk":
            await asyncio.to_thread(drop, server, "device", "host")
            return
        await asyncio.to_thread(drop, server, "device")
        wanted = sum(length // PAGE for length in workload.lengths)
        if stats(server)["occupancy"]["host"]["used"] < wanted:
            for prefix in self.prefixes[workload.name]:
                await send(server, [self.prompts.after(prefix, NEW_TOKENS, "place")])
            await wait_for_pages(server, "host", wanted)
            await asyncio.to_thread(drop, server, "device")

    def _result(self) -> dict[str, Any]:
        regrets, table = {}, {}
        for name, means in self.findings.means.items():
            best = min(("always", "never"), key=lambda policy: np.median(means[policy]))
            pairs = [
                ours / theirs
                for ours, theirs in zip(means["auto"], means[best], strict=True)
            ]
            ratio = interval(pairs)
            regrets[name] = ratio.value - 1
            table[name] = {
                "ttft_s": {p: float(np.median(m)) for p, m in means.items()},
                "best_baseline": best,
                "ratio": ratio.value,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "decisions": self.findings.decisions[name],
            }
        return {
            "planner_regret_worst": max(regrets.values()),
            "planner_gain_mixed": -max(regrets[name] for name in MIXED),
            "workloads": table,
            "rounds": self.args.rounds,
            "emulated_links": LINKS,
            "workload_facts": [asdict(workload) for workload in WORKLOADS],
            "problems": self.findings.problems,
        }


def main() -> int:
    """Run the bench; 0 unless an answer differed or a server failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-planner"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm-rounds", type=int, default=2)
    parser.add_argument("--port", type=int, help="default: any free port")
    args = parser.parse_args()
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
