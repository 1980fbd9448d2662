"""Layer-wise KV against plain SGLang, on real CPU servers with a pool of four prompts.

Prompts of 900 tokens and answers of 200 arrive as a Poisson process at each rate of a
grid; nothing comes again. The knee is the lowest rate at which plain's mean TTFT
exceeds 15 times its TTFT alone. At the knee plain SGLang, our tiers without layer-wise
KV, with it, and with it and the SLO-aware admission serve the same arrivals; plain and
layer-wise KV several times, in turns. Below the knee only plain does (FULL=1: all of
them, and the next rate as well). Copies of layers run behind a throttle, both ways, at
the ratio of KV bytes over the link to prefill that Llama-2-7B has on an L20 (data
sheets); an unthrottled server stands beside at the knee, and does not count. Then
prompts of several lengths at one rate: plain's queue grows with them, ours should not.

Before any figure counts, answers are compared with plain SGLang's, many in flight and
under pressure; and a server whose staging is broken has to be caught.

The last line is one JSON object: ``mean_ttft_speedup_at_knee``,
``p99_ttft_speedup_at_knee``, ``throughput_vs_plain``, ``tpot_attainment_delta`` and
``slo_violation_reduction`` (fractions of the requests, targets as in the paper's
Figure 8), each at the knee.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from layers.equality import compare_answers
from movement.ending import run_to_end
from movement.tools import answered, stats
from reuse.parts import rotated
from sgl_tiered_workloads.arrivals import poisson_arrivals
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.sim.hardware import find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.times import times_of_profile

MODEL = "bench"
POOL_TOKENS, PROMPT, ANSWER = 4_096, 900, 200
RATES = (0.30, 0.45, 0.60, 0.75, 0.90, 1.05)
"""A faster machine has its knee beyond the first four."""
ARMS = ("plain", "tiered", "layerkv", "layerkv, SLO")
COMPARED = ("plain", "layerkv")
KNEE = 15.0
"""Times the TTFT alone that plain's mean has to exceed."""
LENGTHS = (450, 900, 1_800)
LENGTH_RATE = 0.40
TTFT_SLO_S, TPOT_SLO_S = 3.0, 0.2
"""As in the paper's Figure 8."""
HOST_BYTES = 200_000_000
LOGICAL_TOKENS = 65_536
"""That the host region has rows for."""
ALONE = 5
PARTS = ("equality", "rates", "lengths")


@dataclass(frozen=True, slots=True)
class Run:
    """One server under one load, or several. Seconds, shares of requests, tokens/s."""

    num_requests: int
    ttft_s: float
    ttft_p99_s: float
    tpot_s: float
    tpot_p99_s: float
    tokens_per_s: float
    tpot_attained: float
    violations: float


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin_s = time.monotonic()
        self.rng = np.random.default_rng(args.seed)
        self.problems: list[str] = []
        self.num_loads = 0

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin_s:5.0f} s] {text}", flush=True)

    @property
    def left_s(self) -> float:
        """Time until the last run should begin."""
        return 60.0 * self.args.minutes - (time.monotonic() - self.begin_s)

    async def run(self) -> dict[str, Any]:
        """Measure the parts asked for, and return the result."""
        args = self.args
        models = args.models.resolve()
        result: dict[str, Any] = {}
        if "equality" in args.part:
            tiny = await asyncio.to_thread(make_model, "tiny", models)
            result["equality"] = await compare_answers(
                tiny,
                args.out.resolve() / "logs",
                args.first_port,
                self.say,
                self.problems,
                args.equal,
            )
        if "rates" in args.part or "lengths" in args.part:
            model = await asyncio.to_thread(make_model, MODEL, models)
            result |= await self._loads(Device(model, POOL_TOKENS, flags=CPU_FLAGS))
        return result | {"problems": self.problems}

    async def _loads(self, device: Device) -> dict[str, Any]:
        args, logs = self.args, self.args.out.resolve() / "logs"
        warm_up = PlannedRequest("warm", tuple(range(100, 900)), 16)
        plain = {"plain": plain_spec(device)}
        with Fleet(plain, logs, args.first_port, self.say) as first:
            await first.only(plain, warm_up)
            server = first.servers["plain"]
            alone_s = await self._alone_s(server)
            bandwidth = link_bytes_per_s(alone_s)
            self.say(
                f"alone: TTFT {alone_s * 1e3:.0f} ms; link of layers throttled to "
                f"{bandwidth / 1e6:.0f} MB/s (L20 and Llama-2-7B's ratio)"
            )
            ours = our_specs(device, bandwidth)
            port = None if args.first_port is None else args.first_port + 1
            with Fleet(ours, logs, port, self.say) as rest:
                await rest.only(ours, warm_up)
                servers = {"plain": server, **rest.servers}
                result: dict[str, Any] = {
                    "ttft_alone_s": alone_s,
                    "link_bytes_per_s": bandwidth,
                }
                if "rates" in args.part:
                    result |= await self._rates(servers, alone_s)
                if "lengths" in args.part:
                    result["lengths"] = await self._lengths(servers)
                result["layerkv"] = stats(servers["layerkv"]).get("layerkv")
        return result

    async def _rates(
        self, servers: Mapping[str, SglangServer], alone_s: float
    ) -> dict[str, Any]:
        """Find the knee, and serve there and at the next rate; the figures."""
        found: dict[float, dict[str, Run]] = {}
        knee: float | None = None
        for rate in self.args.rates:
            if self.left_s < 0:
                self.say("no time for more rates")
                break
            if knee is not None and not self.args.full:
                break
            self.say(f"{rate:.2f} requests/s")
            if knee is not None:
                found[rate] = await self._in_turns(servers, rate, 1)
                break
            load = self._load(rate, PROMPT, self.args.requests)
            arms = ARMS if self.args.full else ARMS[:1]
            found[rate] = {
                arm: _judged([await self._serve(servers[arm], load)]) for arm in arms
            }
            if found[rate]["plain"].ttft_s > KNEE * alone_s:
                knee = rate
                self.say("  this is the knee")
                found[rate] = await self._in_turns(servers, rate, self.args.repeats)
                half = load[: len(load) // 2]
                await self._serve(servers["layerkv, no throttle"], half)
        result: dict[str, Any] = {
            "rates": {
                str(rate): {arm: asdict(run) for arm, run in runs.items()}
                for rate, runs in found.items()
            },
            "knee_rate_per_s": knee,
        }
        if knee is None:
            self.problems.append("plain SGLang has no knee in this grid")
            return result
        plain, ours = found[knee]["plain"], found[knee]["layerkv"]
        result |= {
            "mean_ttft_speedup_at_knee": plain.ttft_s / ours.ttft_s,
            "p99_ttft_speedup_at_knee": plain.ttft_p99_s / ours.ttft_p99_s,
            "throughput_vs_plain": ours.tokens_per_s / plain.tokens_per_s,
            "tpot_attainment_delta": ours.tpot_attained - plain.tpot_attained,
            "slo_violation_reduction": plain.violations - ours.violations,
        }
        slo = found[knee]["layerkv, SLO"]
        return result | {
            "slo_violation_reduction_slo": plain.violations - slo.violations
        }

    async def _in_turns(
        self, servers: Mapping[str, SglangServer], rate: float, repeats: int
    ) -> dict[str, Run]:
        """Serve fresh arrivals, several times; an arm's runs as one."""
        runs: dict[str, list[list[RequestRecord]]] = {arm: [] for arm in ARMS}
        for number in range(repeats):
            load = self._load(rate, PROMPT, self.args.requests)
            # The two that are compared in every turn, in the other order each time.
            arms = ARMS if number == 0 or self.args.full else COMPARED
            for arm in arms[:: -1 if number % 2 else 1]:
                runs[arm].append(await self._serve(servers[arm], load))
        return {arm: _judged(served) for arm, served in runs.items()}

    async def _lengths(
        self, servers: Mapping[str, SglangServer]
    ) -> dict[str, dict[str, Any]]:
        """Serve prompts of several lengths at one rate."""
        found: dict[str, dict[str, Any]] = {}
        for number, length in enumerate(LENGTHS):
            if self.left_s < 0:
                self.say("no time for more lengths")
                break
            self.say(f"prompts of {length} tokens, {LENGTH_RATE:.2f} requests/s")
            load = self._load(LENGTH_RATE, length, self.args.requests // 3)
            found[str(length)] = {
                arm: asdict(_judged([await self._serve(servers[arm], load)]))
                for arm in rotated(COMPARED, number)
            }
        return found

    async def _alone_s(self, server: SglangServer) -> float:
        """Return the median TTFT of a prompt that is alone."""
        load = self._load(1.0, PROMPT, ALONE)
        async with StreamingClient(server.url, logprobs=False) as client:
            records = await client.run_sequential(
                [replace(request, max_new_tokens=2) for request in load]
            )
        return float(np.median([answered(record).ttft_s for record in records]))

    def _load(self, rate: float, length: int, num: int) -> list[PlannedRequest]:
        """Return requests that were never sent before."""
        self.num_loads += 1
        starts = np.array(poisson_arrivals(rate, num, self.rng).times_s)
        # Exactly this rate: near saturation what chance adds would decide.
        starts *= num / rate / starts[-1]
        return [
            PlannedRequest(
                f"l{self.num_loads}.{place}",
                random_tokens(self.rng, length, VOCAB_TOKENS),
                ANSWER,
                start_s=float(start_s),
            )
            for place, start_s in enumerate(starts)
        ]

    async def _serve(
        self, server: SglangServer, load: Sequence[PlannedRequest]
    ) -> list[RequestRecord]:
        await asyncio.to_thread(server.flush_cache)
        async with StreamingClient(server.url, logprobs=False) as client:
            records = await client.run_open_loop(load)
        served = [answered(record) for record in records]
        run = _judged([served])
        self.say(
            f"  {server.spec.name}: TTFT {run.ttft_s:.2f} s, P99 {run.ttft_p99_s:.2f} "
            f"s; TPOT {run.tpot_s * 1e3:.0f} ms, P99 {run.tpot_p99_s * 1e3:.0f} ms; "
            f"{run.tokens_per_s:.0f} tokens/s; {run.violations:.0%} missed a target"
        )
        return served


def _judged(runs: Sequence[Sequence[RequestRecord]]) -> Run:
    """Return the figures of runs one after the other, the gaps left out."""
    records = [record for run in runs for record in run]
    ttft = np.array([record.ttft_s for record in records])
    tpot = np.array([record.tpot_s for record in records])
    span_s = sum(
        max(record.token_times_s[-1] for record in run)
        - min(record.started_s for record in run)
        for run in runs
    )
    return Run(
        len(records),
        float(ttft.mean()),
        float(np.percentile(ttft, 99)),
        float(tpot.mean()),
        float(np.percentile(tpot, 99)),
        sum(record.num_output_tokens for record in records) / span_s,
        float((tpot <= TPOT_SLO_S).mean()),
        float(((ttft > TTFT_SLO_S) | (tpot > TPOT_SLO_S)).mean()),
    )


def link_bytes_per_s(prefill_s: float) -> float:
    """Return the link that is to this prefill what the L20's is to its own.

    Args:
        prefill_s: of ``PROMPT`` tokens here.
    """
    hardware, model = find_hardware("L20"), find_model("Llama-2-7B")
    theirs_s = times_of_profile(hardware, model).prefill_s([(0, PROMPT)])
    moved_s = PROMPT * model.kv_token_bytes / hardware.host.bytes_per_s
    num_bytes = PROMPT * PRESETS[MODEL].kv_bytes_per_token
    return num_bytes / (prefill_s * moved_s / theirs_s)


def our_specs(device: Device, bandwidth: float) -> dict[str, ServerSpec]:
    """Return our servers: tiers alone, and with layer-wise KV, throttled or not."""
    tiers = Tiers(HOST_BYTES)
    region = LOGICAL_TOKENS * PRESETS[MODEL].kv_bytes_per_token
    throttle = (f"--tiered-emulate=host:bandwidth={bandwidth / 1e6:.0f}MB",)
    layered = (
        "--tiered-layerkv=on",
        f"--tiered-layerkv-host-size={region // 1_000_000}MB",
    )
    targets = (
        "--tiered-admission=slo",
        f"--tiered-slo-ttft={TTFT_SLO_S}",
        f"--tiered-slo-tpot={TPOT_SLO_S}",
    )
    return {
        "tiered": tiered_spec(device, tiers, "tiered", throttle),
        "layerkv": tiered_spec(device, tiers, "layerkv", (*layered, *throttle)),
        "layerkv, SLO": tiered_spec(
            device, tiers, "layerkv-slo", (*layered, *throttle, *targets)
        ),
        "layerkv, no throttle": tiered_spec(device, tiers, "layerkv-free", layered),
    }


def main() -> int:
    """Run the bench; 0 unless a server failed or answers differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-layerkv"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--requests", type=int, default=60, help="per rate and arm")
    parser.add_argument("--repeats", type=int, default=2, help="at the knee")
    parser.add_argument("--equal", type=int, default=780, help="answers to compare")
    parser.add_argument("--minutes", type=float, default=38.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    args = parser.parse_args()
    args.part = args.part or list(PARTS)
    args.full = os.environ.get("FULL") == "1"
    if args.quick:
        args.requests, args.rates, args.equal = 8, (0.75,), 12
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
