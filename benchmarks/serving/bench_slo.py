"""SLO admission off and on, on real CPU servers: violations and throughput.

Prompts that share nothing and answers of many lengths arrive as a Poisson process. The
targets are multiples of what one request takes on an idle server: 30 times its median
TTFT and 8 times its median TPOT. First the rate is looked for at which the server
without admission violates them in 30 to 60 % of its requests, by runs as long as those
that follow: near saturation a longer run violates more. Then both servers serve the
same arrivals at that rate in turns, and once each at a lower and a higher one.

The last line is one JSON object: ``slo_violation_off`` (share of requests that miss
either target), ``slo_violation_reduction`` (by how much fewer miss the TPOT target, as
a fraction of all), ``throughput_vs_off`` (tokens per second, median of the pairs), and
the violations of each target.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from movement.ending import run_to_end
from movement.tools import answered, stats
from sgl_tiered_workloads.arrivals import bursty_arrivals
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

TTFT_FACTOR, TPOT_FACTOR = 30.0, 8.0
WANTED = (0.30, 0.60)
MIDDLE = 0.45
SIDE_RATES = (0.8, 1.25)
POOL_TOKENS = 32_768
HOST_BYTES = 200_000_000
CHUNK_TOKENS = 2_048
PROMPTS = (600.0, 0.6, 128, 2_048)
ANSWERS = (20.0, 0.7, 6, 80)
"""Median, sigma of the logarithm, least and most tokens. Prompts are long beside the
answers, as in code completion, so that prefill delays answers before the server is
full: at its limit any admission only moves the delay."""
CV = 1.0
ADMISSIONS = ("slo", "goodput")
ALONE = 15


@dataclass(frozen=True, slots=True)
class Run:
    """One server under one load; shares of requests, tokens per second."""

    ttft: float
    tpot: float
    either: float
    tokens_per_s: float
    mean_ttft_s: float
    mean_tpot_s: float


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin_s = time.monotonic()
        self.rng = np.random.default_rng(args.seed)
        self.num_runs = 0
        self.slo = (0.0, 0.0)

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin_s:5.0f} s] {text}", flush=True)

    @property
    def left_s(self) -> float:
        """Time until the last run should begin."""
        return 60.0 * self.args.minutes - (time.monotonic() - self.begin_s)

    async def run(self) -> dict[str, Any]:
        """Measure, and return the result."""
        args = self.args
        model = await asyncio.to_thread(make_model, "bench", args.models.resolve())
        flags = (*CPU_FLAGS, "--chunked-prefill-size", str(CHUNK_TOKENS))
        device = Device(model, POOL_TOKENS, flags=flags)
        tiers, logs = Tiers(HOST_BYTES), args.out.resolve() / "logs"
        port = args.first_port
        warm_up = PlannedRequest("warm", tuple(range(100, 900)), 16)
        off = {"off": tiered_spec(device, tiers, "off")}
        with Fleet(off, logs, port, self.say) as plain:
            await plain.only(off, warm_up)
            server = plain.servers["off"]
            alone = await self._alone(server)
            self.slo = (TTFT_FACTOR * alone[0], TPOT_FACTOR * alone[1])
            self.say(
                f"alone: TTFT {alone[0]:.3f} s, TPOT {alone[1] * 1e3:.1f} ms; targets "
                f"{self.slo[0]:.2f} s, {self.slo[1] * 1e3:.0f} ms"
            )
            on = {"on": tiered_spec(device, tiers, "on", self._flags())}
            with Fleet(on, logs, None if port is None else port + 1, self.say) as ours:
                await ours.only(on, warm_up)
                servers = {"off": server, "on": ours.servers["on"]}
                rate = args.rate or await self._find_rate(server, alone)
                found = await self._pairs(servers, rate)
                found["admission"] = stats(servers["on"])["admission"]
        return {"rate_per_s": rate, "alone": alone, "slo": self.slo, **found}

    def _flags(self) -> tuple[str, ...]:
        return (
            "--tiered-admission",
            self.args.admission,
            "--tiered-slo-ttft",
            f"{self.slo[0]:.6f}",
            "--tiered-slo-tpot",
            f"{self.slo[1]:.6f}",
        )

    async def _alone(self, server: SglangServer) -> tuple[float, float]:
        """Return the median TTFT and TPOT of requests that are alone."""
        async with StreamingClient(server.url, logprobs=False) as client:
            records = await client.run_sequential(self._requests(ALONE))
        ttft = [answered(record).ttft_s for record in records]
        return float(np.median(ttft)), float(np.median([r.tpot_s for r in records]))

    def _requests(self, num: int) -> list[PlannedRequest]:
        """Return requests that were never sent before."""
        prompts, answers = _draw(self.rng, PROMPTS, num), _draw(self.rng, ANSWERS, num)
        self.num_runs += 1
        return [
            PlannedRequest(
                f"r{self.num_runs}.{n}",
                random_tokens(self.rng, int(prompt), VOCAB_TOKENS),
                int(answer),
            )
            for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def _load(self, rate: float, num: int) -> list[PlannedRequest]:
        drawn = bursty_arrivals(rate, self.args.cv, num, self.rng).times_s
        # Exactly this rate: by chance alone it would be off by a tenth, and so much
        # near saturation is more than what the admission changes.
        starts = np.array(drawn) * (num / rate / drawn[-1])
        return [
            replace(request, start_s=float(start_s))
            for request, start_s in zip(self._requests(num), starts, strict=True)
        ]

    async def _serve(self, server: SglangServer, load: Sequence[PlannedRequest]) -> Run:
        await asyncio.to_thread(server.flush_cache)
        async with StreamingClient(server.url, logprobs=False) as client:
            records = await client.run_open_loop(load)
        found = self._judged([answered(record) for record in records])
        self.say(
            f"    {server.spec.name}: TPOT {found.tpot:.0%}, TTFT {found.ttft:.0%}, "
            f"either {found.either:.0%} missed; {found.tokens_per_s:.0f} tokens/s, "
            f"TTFT {found.mean_ttft_s:.2f} s, TPOT {found.mean_tpot_s * 1e3:.0f} ms"
        )
        return found

    def _judged(self, records: Sequence[RequestRecord]) -> Run:
        ttft = np.array([record.ttft_s for record in records])
        tpot = np.array([record.tpot_s for record in records])
        late, slow = ttft > self.slo[0], tpot > self.slo[1]
        tokens = sum(r.num_prompt_tokens + r.num_output_tokens for r in records)
        first_s = min(record.started_s for record in records)
        span_s = max(record.token_times_s[-1] for record in records) - first_s
        return Run(
            float(late.mean()),
            float(slow.mean()),
            float((late | slow).mean()),
            tokens / span_s,
            float(ttft.mean()),
            float(tpot.mean()),
        )

    async def _find_rate(
        self, server: SglangServer, alone: tuple[float, float]
    ) -> float:
        """Return a rate at which about 45 % of the requests miss a target."""
        # Between half of what prefill alone could do, and twice that.
        low, high = 0.25 / alone[0], 2.0 / alone[0]
        best, best_gap = low, 1.0
        for _ in range(self.args.probes):
            rate = float(np.sqrt(low * high))
            self.say(f"  {rate:.2f} requests/s without admission")
            missed = (
                await self._serve(server, self._load(rate, self.args.requests))
            ).either
            if abs(missed - MIDDLE) < best_gap:
                best, best_gap = rate, abs(missed - MIDDLE)
            if best_gap < (WANTED[1] - WANTED[0]) / 4:
                break
            low, high = (rate, high) if missed < MIDDLE else (low, rate)
        return best

    async def _pairs(
        self, servers: dict[str, SglangServer], rate: float
    ) -> dict[str, Any]:
        """Serve the same loads with both, in turns."""
        runs: dict[str, list[Run]] = {name: [] for name in servers}
        for number in range(self.args.pairs):
            if number >= self.args.min_pairs and self.left_s < 0:
                break
            load = self._load(rate, self.args.requests)
            self.say(f"  pair {number} at {rate:.2f} requests/s")
            names = list(servers) if number % 2 == 0 else list(servers)[::-1]
            for name in names:
                runs[name].append(await self._serve(servers[name], load))
        beside = []
        for factor in self.args.side_rates:
            if self.left_s < 0:
                break
            load = self._load(rate * factor, self.args.requests)
            self.say(f"  {rate * factor:.2f} requests/s")
            found = {n: asdict(await self._serve(s, load)) for n, s in servers.items()}
            beside.append({"rate_per_s": rate * factor, **found})
        off, on = ({k: _mean(runs[n], k) for k in _SHARES} for n in ("off", "on"))
        ratios = [
            b.tokens_per_s / a.tokens_per_s
            for a, b in zip(runs["off"], runs["on"], strict=True)
        ]
        return {
            "admission_name": self.args.admission,
            "slo_violation_off": off["either"],
            "slo_violation_on": on["either"],
            "slo_violation_reduction": off["tpot"] - on["tpot"],
            "throughput_vs_off": float(np.median(ratios)),
            "throughput_vs_off_of_pairs": ratios,
            "tpot_violation_off": off["tpot"],
            "tpot_violation_on": on["tpot"],
            "ttft_violation_off": off["ttft"],
            "ttft_violation_on": on["ttft"],
            "num_requests": self.args.requests * len(ratios),
            "num_pairs": len(ratios),
            "runs": {
                name: [asdict(run) for run in made] for name, made in runs.items()
            },
            "other_rates": beside,
        }


_SHARES = ("ttft", "tpot", "either")


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(np.mean([getattr(run, name) for run in runs]))


def _draw(
    rng: np.random.Generator, shape: tuple[float, float, int, int], num: int
) -> np.ndarray:
    median, sigma, least, most = shape
    return np.clip(rng.lognormal(np.log(median), sigma, num), least, most).astype(int)


def main() -> int:
    """Run the bench; 0 unless a server failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-slo"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--rate", type=float, help="requests/s; default: it is found")
    parser.add_argument("--admission", choices=ADMISSIONS, default="slo")
    parser.add_argument("--cv", type=float, default=CV, help="of the arrivals' gaps")
    parser.add_argument("--requests", type=int, default=200, help="of each run")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--min-pairs", type=int, default=2)
    parser.add_argument("--probes", type=int, default=6, help="rates to try at most")
    parser.add_argument("--side-rates", type=float, nargs="*", default=SIDE_RATES)
    parser.add_argument(
        "--minutes", type=float, default=28.0, help="until the last run"
    )
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="smoke: a few requests")
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.pairs, args.probes = 12, 1, 2
        args.min_pairs, args.side_rates = 1, ()
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
