"""What it costs to ask the served model for the lengths of its answers.

Two real CPU servers serve the same requests in turns, as many at a time as clients:
one predicts lengths with ``online``, the other one asks (``llm``). Prompts share
nothing. The models here answer nonsense, so this measures the cost and not the worth.

The last line is one JSON object: per question its prompt's tokens, those not found in
the cache, the reply's tokens and the seconds until it came; ``asked_share`` of the
requests that were asked about; ``throughput_vs_online``, the median over the pairs.

    python benchmarks/serving/bench_asking.py [--preset tiny] [--pairs 3]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from movement.ending import run_to_end
from movement.tools import answered, stats
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

NAMES = ("online", "llm")
HOST_BYTES = 200_000_000
PROMPT_TOKENS = 400
ANSWERS = (48, 129)
"""Least tokens, and one more than the most."""
SPACING_S = 0.2
"""Between two arrivals: more than is served, so that somebody waits."""
POOL_REQUESTS = 6


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin_s = time.monotonic()
        self.rng = np.random.default_rng(args.seed)

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin_s:5.0f} s] {text}", flush=True)

    async def run(self) -> dict[str, Any]:
        """Measure, and return the result."""
        args = self.args
        model = await asyncio.to_thread(make_model, args.preset, args.models.resolve())
        pool = POOL_REQUESTS * (PROMPT_TOKENS + ANSWERS[1])
        device = Device(model, pool, flags=CPU_FLAGS)
        specs = {
            name: tiered_spec(
                device, Tiers(HOST_BYTES), name, (f"--tiered-length-predictor={name}",)
            )
            for name in NAMES
        }
        warm_up = PlannedRequest("warm", tuple(range(100, 500)), 8)
        logs, port = args.out.resolve() / "logs", args.first_port
        with Fleet(specs, logs, port, self.say) as fleet:
            await fleet.only(specs, warm_up)
            ratios = []
            for number in range(args.pairs):
                load = self._load(number)
                speeds = {}
                for name in NAMES[:: 1 if number % 2 else -1]:
                    speeds[name] = await self._serve(fleet.servers[name], load)
                ratios.append(speeds["llm"] / speeds["online"])
            told = stats(fleet.servers["llm"])["lengths"]
        return {**self._per_question(told), "throughput_vs_online": _median(ratios)}

    def _load(self, number: int) -> list[PlannedRequest]:
        answers = self.rng.integers(*ANSWERS, size=self.args.requests).tolist()
        return [
            PlannedRequest(
                f"r{number}.{n}",
                random_tokens(self.rng, PROMPT_TOKENS, VOCAB_TOKENS),
                answer,
                start_s=n * SPACING_S,
            )
            for n, answer in enumerate(answers)
        ]

    async def _serve(
        self, server: SglangServer, load: Sequence[PlannedRequest]
    ) -> float:
        """Return the tokens per second of one run."""
        async with StreamingClient(server.url, logprobs=False) as client:
            records = [answered(r) for r in await client.run_open_loop(load)]
        span_s = max(record.token_times_s[-1] for record in records)
        span_s -= min(record.started_s for record in records)
        tokens = sum(r.num_prompt_tokens + r.num_output_tokens for r in records)
        self.say(f"{server.spec.name}: {tokens / span_s:.0f} tokens/s")
        return tokens / span_s

    def _per_question(self, told: dict[str, Any]) -> dict[str, Any]:
        asking = told["asking"]
        replied = max(asking["num_asked"] - asking["num_failed"], 1)
        computed = asking["prompt_tokens"] - asking["cached_tokens"]
        return {
            **{key: asking[key] for key in asking if key.startswith("num_")},
            "asked_share": asking["num_asked"] / max(told["num_answers"], 1),
            "prompt_tokens": asking["prompt_tokens"] / replied,
            "computed_tokens": computed / replied,
            "output_tokens": asking["output_tokens"] / replied,
            "seconds": asking["seconds"] / max(asking["num_asked"], 1),
        }


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def main() -> int:
    """Run the bench; 0 unless a server failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-asking"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--preset", default="bench", help="of the model")
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    args = parser.parse_args()
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
