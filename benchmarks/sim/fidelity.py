"""How far the simulator is from a real server on this machine.

Calibrates a running server with ``sgl-tiered calibrate``, then plays three workloads
against SGLang with and without tiers: once in a closed loop, which gives the
saturation, then at two rates, one of them 0.9 of saturation. The simulator gets the
calibration file, the tokens of what was sent and when, and nothing else of the runs.
The table has both sides of every figure; the exit status is 1 where a difference is
larger than wanted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.driver import run_workload
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.records import (
    RequestRecord,
    make_header,
    read_records,
    write_records,
)
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.server import SglangServer, exit_on_signals
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

from sgl_tiered.cli.calibrate import render
from sgl_tiered.cost.calibration import Calibration, read_calibration
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.summary import summarize

PRESET = "bench"
POOL_TOKENS = 16384
PAGE_TOKENS = 16
HOST_POOLS = 4
USERS = 6
RATES = (0.5, 0.9)
CLOSED = "closed loop"
SEED = 11
LIMITS = {"mean TTFT": 0.20, "P99 TTFT": 0.35, "throughput": 0.10, "hits": 0.02}
"""Relative, but for hits: points of the prompt tokens, per tier."""

WORKLOADS: dict[str, tuple[str, dict[str, object]]] = {
    "templates": (
        "text_analysis",
        {
            "num_prefixes": 48,
            "prefix_tokens": 1024,
            "body_tokens": 96,
            "answer_tokens": 8,
        },
    ),
    "chat": (
        "chat",
        {
            "num_turns": 4,
            "system_tokens": 256,
            "first_tokens": 768,
            "user_tokens": 64,
            "answer_tokens": 16,
            "think_s": 2.0,
        },
    ),
    "no reuse": ("fixed_lengths", {"prompt_tokens": 1024, "answer_tokens": 16}),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures that are compared, of either side.

    Attributes:
        mean_s, p99_s: TTFT from the intended start.
        tokens_per_s: prompt and answer tokens over the run's time.
        hits: share of the prompt tokens by tier.
    """

    mean_s: float
    p99_s: float
    tokens_per_s: float
    hits: dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One run: what was seen and what was predicted."""

    system: str
    workload: str
    load: str
    num_requests: int
    seen: Measured
    predicted: Measured

    def differences(self) -> dict[str, float]:
        """Return the differences that count for this kind of run, by figure."""
        seen, predicted = self.seen, self.predicted
        found = {
            f"hits {tier}": abs(predicted.hits[tier] - seen.hits[tier])
            for tier in seen.hits
        }
        if self.load == CLOSED:
            found["throughput"] = abs(predicted.tokens_per_s / seen.tokens_per_s - 1)
        else:
            found["mean TTFT"] = abs(predicted.mean_s / seen.mean_s - 1)
            found["P99 TTFT"] = abs(predicted.p99_s / seen.p99_s - 1)
        return found

    def misses(self) -> list[str]:
        """Return the figures that are off by more than wanted."""
        limits = LIMITS
        return [
            name
            for name, value in self.differences().items()
            if value > limits[name.split()[0] if name.startswith("hits") else name]
        ]


def workload_params(
    name: str, seconds: float, per_s: float | None
) -> dict[str, object]:
    """Return a workload's parameters for a run of about ``seconds``.

    Args:
        name: in ``WORKLOADS``.
        seconds: length of the run.
        per_s: requests per second of an open loop; None for a closed one.
    """
    kind, params = WORKLOADS[name]
    turns = int(str(params.get("num_turns", 1)))
    guess_per_s = per_s if per_s is not None else 6.0
    starts = max(12, round(seconds * guess_per_s / turns))
    arrivals: dict[str, object] = {"process": "closed", "concurrency": USERS}
    if per_s is not None:
        arrivals = {"process": "poisson", "rate_per_s": per_s / turns}
    number = "num_sessions" if kind == "chat" else "num_requests"
    least = int(str(params.get("num_prefixes", 0))) + 1
    found = {**params, number: max(starts, least), "arrivals": arrivals}
    if per_s is None and "think_s" in found:
        found["think_s"] = 0.0
    return found


async def play(
    server: SglangServer, name: str, params: dict[str, object]
) -> list[RequestRecord]:
    """Run one workload against an emptied server."""
    await asyncio.to_thread(server.flush_cache)
    workload = make_workload(WORKLOADS[name][0], params, SEED, VOCAB_TOKENS)
    async with StreamingClient(server.url, logprobs=False) as client:
        records = await run_workload(client, workload)
    broken = [record for record in records if record.error is not None]
    if broken:
        raise RuntimeError(f"{name}: {broken[0].key} failed: {broken[0].error}")
    return records


def measured(records: Sequence[RequestRecord]) -> Measured:
    """Return the real side's figures."""
    ttft = [r.token_times_s[0] - r.started_s for r in records]
    begin = min(r.started_s for r in records)
    end = max(r.token_times_s[-1] for r in records)
    prompt = sum(len(r.prompt) for r in records)
    output = sum(len(r.output) for r in records)
    hits = {
        tier: sum(r.cached_by_tier.get(tier, 0) for r in records) / prompt
        for tier in ("device", "host")
    }
    mean, p99 = float(np.mean(ttft)), float(np.percentile(ttft, 99))
    return Measured(mean, p99, (prompt + output) / (end - begin), hits)


def sim_workload(
    name: str, records: Sequence[RequestRecord], closed: bool
) -> SimWorkload:
    """Return what was sent, as the simulator takes it.

    In a closed loop each user begins the next conversation when his own has ended;
    within a chat a turn follows the answer before it; all else leaves at its own time.
    """
    builder = WorkloadBuilder(PAGE_TOKENS)
    ordered = sorted(records, key=lambda r: r.started_s)
    begin_s = ordered[0].started_s
    last: dict[str, tuple[int, RequestRecord]] = {}
    for record in ordered:
        tokens = np.array([*record.prompt, *record.output[:-1]], np.int32)
        session = record.key.rpartition(".")[0] if name == "chat" else record.key
        after, before = last.get(session, (-1, None))
        starts_s = 0.0 if closed or before is not None else record.started_s - begin_s
        think_s = 0.0
        if before is not None:
            think_s = max(0.0, record.started_s - before.token_times_s[-1])
        number = builder.add(
            starts_s,
            len(record.prompt),
            len(record.output),
            prefix=builder.number_tokens(tokens),
            own_pages=False,
            after=after,
            think_s=think_s,
        )
        last[session] = (number, record)
    return builder.build(name, USERS if closed else 0)


def predicted(system: str, workload: SimWorkload, calibration: Calibration) -> Measured:
    """Return the simulator's figures for the same requests."""
    pool_gb = POOL_TOKENS * PRESETS[PRESET].kv_bytes_per_token / 1e9
    spec = SimSpec().with_values(
        {
            "page_size": PAGE_TOKENS,
            "device_gb": pool_gb,
            "host_gb": pool_gb * HOST_POOLS if system == "tiered" else 0.0,
            "ignore_eos": True,
        }
    )
    summary = summarize(simulate(spec.server(calibration), workload))
    tokens_per_s = summary.prompt_tokens_per_s + summary.output_tokens_per_s
    hits = {tier: summary.hit_ratio[tier] for tier in ("device", "host")}
    return Measured(summary.ttft.mean, summary.ttft.p99, tokens_per_s, hits)


def table(rows: Sequence[Row]) -> str:
    """Return the comparison as Markdown."""
    lines = [
        "| system | workload | load | requests | mean TTFT ms | P99 TTFT ms "
        "| tokens/s | device hits | host hits | off by more than wanted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seen, told = row.seen, row.predicted
        cells = [
            row.system,
            row.workload,
            row.load,
            str(row.num_requests),
            f"{seen.mean_s * 1e3:.0f} / {told.mean_s * 1e3:.0f}",
            f"{seen.p99_s * 1e3:.0f} / {told.p99_s * 1e3:.0f}",
            f"{seen.tokens_per_s:.0f} / {told.tokens_per_s:.0f}",
            f"{seen.hits['device']:.3f} / {told.hits['device']:.3f}",
            f"{seen.hits['host']:.3f} / {told.hits['host']:.3f}",
            ", ".join(row.misses()) or "nothing",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _document(text: str, seconds: float, misses: int, calibration: Calibration) -> str:
    """Return the table with what its reader must know."""
    preset = PRESETS[PRESET]
    fits = "\n".join(line.rstrip() for line in render(calibration, []))
    return f"""# The simulator against a real server

Written by `make bench-fidelity ARGS="--seconds {seconds:g}"`, on {os.cpu_count()} cores
without an accelerator. Model {PRESET!r} ({preset.kv_bytes_per_token} B of KV a token),
pages of {PAGE_TOKENS}, a pool of {POOL_TOKENS} tokens; the tiered server also has a
host tier of {HOST_POOLS} pools. The simulator knows the file of `sgl-tiered calibrate`,
the prompts, and of open loops when they were sent. Saturation is the throughput of the
closed loop of {USERS} users; an open loop of chats has more under way at a time.

Each cell: seen / predicted. Wanted: mean TTFT within {LIMITS["mean TTFT"]:.0%}, P99
within {LIMITS["P99 TTFT"]:.0%}, throughput of closed loops within
{LIMITS["throughput"]:.0%}, hits within {LIMITS["hits"] * 100:g} points of the prompt
tokens. Outside of that: {misses}.

{text}

What the simulator was given, by `sgl-tiered calibrate`:

```
{fits}
```
"""


async def run(args: argparse.Namespace) -> list[Row]:
    """Calibrate, play every run, and predict it."""
    model = await asyncio.to_thread(make_model, PRESET, args.models.resolve())
    device = Device(model, POOL_TOKENS, PAGE_TOKENS, CPU_FLAGS)
    host_bytes = HOST_POOLS * POOL_TOKENS * PRESETS[PRESET].kv_bytes_per_token
    specs = {
        "tiered": tiered_spec(device, Tiers(host_bytes)),
        "plain": plain_spec(device),
    }
    file = args.calibration or args.out / "calibration.json"
    if args.calibration is None:
        # The copies are measured even where this server would rather recompute.
        always = ("--tiered-load-policy", "always")
        spec = tiered_spec(device, Tiers(host_bytes), "calibrated", always)
        with SglangServer(spec, args.out / "logs") as server:
            calibrate(server.url, file)
    calibration = read_calibration(file)
    rows: list[Row] = []
    for system, spec in specs.items():
        with SglangServer(spec, args.out / "logs") as server:
            for name in WORKLOADS:
                rows += await runs_of(server, system, name, calibration, args)
                print(table(rows[-1 - len(RATES) :]), flush=True)
    return rows


async def runs_of(
    server: SglangServer,
    system: str,
    name: str,
    calibration: Calibration,
    args: argparse.Namespace,
) -> list[Row]:
    """Play one workload on one server, in a closed loop and at each rate."""
    rows: list[Row] = []
    saturation = 0.0
    for share in (None, *RATES):
        per_s = None if share is None else share * saturation
        params = workload_params(name, args.seconds, per_s)
        records = await play(server, name, params)
        load = CLOSED if share is None else f"{share:.0%} of saturation"
        if share is None:
            begin = min(r.started_s for r in records)
            end = max(r.token_times_s[-1] for r in records)
            saturation = len(records) / (end - begin)
        told = predicted(
            system, sim_workload(name, records, share is None), calibration
        )
        rows.append(Row(system, name, load, len(records), measured(records), told))
        path = args.out / "records" / f"{system}.{name}.{load}.jsonl".replace(" ", "-")
        facts = {"workload": name, "params": params, "seed": SEED, "load": load}
        write_records(path, make_header(system, facts), records)
    return rows


def again(out: Path) -> list[Row]:
    """Predict runs that were played before, from their records."""
    calibration = read_calibration(out / "calibration.json")
    rows: list[Row] = []
    for path in sorted((out / "records").glob("*.jsonl")):
        header, records = read_records(path)
        name, load = str(header.facts["workload"]), str(header.facts["load"])
        workload = sim_workload(name, records, load == CLOSED)
        told = predicted(header.system, workload, calibration)
        seen = measured(records)
        rows.append(Row(header.system, name, load, len(records), seen, told))
    return rows


def calibrate(url: str, file: Path) -> None:
    """Run ``sgl-tiered calibrate`` as a user would."""
    command = [sys.executable, "-m", "sgl_tiered.cli.main", "calibrate"]
    subprocess.run([*command, "--url", url, "--out", str(file)], check=True)


def main() -> int:
    """Run the comparison; 0 where every figure is as near as wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/fidelity"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--calibration", type=Path, help="a file made before")
    parser.add_argument(
        "--again", action="store_true", help="predict the runs in --out anew"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run")
    args = parser.parse_args()
    exit_on_signals()
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    rows = again(args.out) if args.again else asyncio.run(run(args))
    text = table(rows)
    misses = sum(len(row.misses()) for row in rows)
    print(f"\nEach cell: seen / predicted.\n\n{text}\n")
    calibration = read_calibration(args.calibration or args.out / "calibration.json")
    document = _document(text, args.seconds, misses, calibration)
    (args.out / "fidelity.md").write_text(document)
    found = {"runs": len(rows), "misses": misses, "limits": LIMITS}
    print(f"{time.monotonic() - begin:.0f} s")
    print(json.dumps(found))
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
