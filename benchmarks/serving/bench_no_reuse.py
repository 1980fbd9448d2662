"""Prompts that never come again: what tiers cost where they cannot help.

Four servers stand side by side, asleep while another one is measured: plain SGLang
twice, sgl-tiered with host memory, and with a disk below it. ``no_reuse/windows.py``
says what is sent, ``no_reuse/figures.py`` how the figures come of it. First all of them
answer the same prompts alone, and answers must be equal bit for bit; a negative control
shows that the comparison can fail. The windows of the first minutes after a start are
counted apart: tiers fill, and a write policy that learns has not learned yet. All
servers are started anew three times, since a process may be faster or slower than its
twin for as long as it lives: ``by_start`` says how far starts are apart.

The last line is one JSON object; the exit code is 1 if ``targets_missed`` names one:

- ``no_reuse_throughput_vs_plain`` at least 0.985, the lower end of its interval at
  least 0.97; ``no_reuse_throughput_vs_plain_disk`` at least 0.98; the same with
  ``_first_minutes``;
- ``cpu_per_prompt_vs_plain`` at most 1.015 with a half-width of at most 0.005: CPU
  seconds of all processes of the server, what it copies after the last answer
  included; ``_disk`` beside it;
- ``plain_vs_plain``: the second plain server over the first, whose interval must
  contain 1 (one sound run in twenty fails this by chance); ``plain_vs_plain_cpu``;
- ``outputs_identical``; ``bytes_per_prompt``: moved between tiers, by phase, start,
  system and edge.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from movement.ending import run_to_end
from no_reuse.figures import (
    AGAIN,
    COMPARED,
    PLAIN,
    SYSTEMS,
    by_start,
    figures,
    missed,
    throughputs,
)
from no_reuse.windows import PARTS, USERS, Window, prompts, run_block
from reuse.reference import Reference
from reuse.results import Findings
from reuse.schedules import PAGE_SIZE
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.harness.keeping import keep_record, run_facts
from sgl_tiered_workloads.harness.turns import bytes_by_edge
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "sgl_tiered",
    "kernels",
    "platform_dist",
    "benchmarks/serving/bench_no_reuse.py",
    "benchmarks/serving/no_reuse",
)
PRESET = "bench"
POOL_TOKENS = 8192
HOST_POOLS = 2
"""HiCache's default. It is full after the first windows and then gives up pages."""
DISK_BYTES = 6_000_000_000
MIN_BLOCKS = 2
GATE_WINDOW = 1 << 20
"""No block comes that far."""
GATE_PROMPTS = 5
"""Of each part."""


class Bench:
    """One run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.findings = Findings()
        quick = (replace(part, num_prompts=USERS) for part in PARTS)
        self.parts = tuple(quick) if args.quick else PARTS
        self.num_blocks = 0
        # By phase, each start's: by system and edge.
        self.moved: dict[str, list[dict[str, dict[str, float]]]] = {}

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    async def run(self) -> dict[str, Any]:
        """Measure, keep a record if asked for one, and return the figures."""
        load_before = os.getloadavg()[0]
        out = self.args.out.resolve()
        shutil.rmtree(out / "store", ignore_errors=True)
        model = await asyncio.to_thread(make_model, PRESET, self.args.models.resolve())
        first: list[Window] = []
        steady: list[Window] = []
        for start in range(self.args.starts):
            share = (start + 1) / self.args.starts
            until_s = self.begin + 60 * self.args.minutes * share
            if not await self._start(out, model, start, until_s, first, steady):
                # No speed is claimed of wrong answers.
                name = "outputs_identical"
                return {name: False, "targets_missed": [name]}
        found: dict[str, Any] = figures(steady)
        found |= throughputs(first, "_first_minutes")
        found["first_blocks"] = len({window.block for window in first})
        found["starts"] = self.args.starts
        found["by_start"] = [
            {key: value for key, value in figures(windows).items() if key in COMPARED}
            for windows in by_start(steady)
        ]
        found["bytes_per_prompt"] = self.moved
        found["outputs_identical"] = True
        found["minutes"] = round((time.monotonic() - self.begin) / 60, 1)
        found["load_before"] = round(load_before, 2)
        found["targets_missed"] = missed(found)
        if self.args.record is not None:
            self._keep(found, [*first, *steady])
        return found

    async def _start(
        self,
        out: Path,
        model: Path,
        start: int,
        until_s: float,
        first: list[Window],
        steady: list[Window],
    ) -> bool:
        """Start all servers anew and add what is measured on them; False if wrong."""
        specs = _specs(model, out / "store")
        try:
            with Fleet(specs, out / "logs", self.args.first_port, self.say) as fleet:
                warm_up = PlannedRequest("warm", tuple(range(100, 1_700)), 4)
                await fleet.only(specs, warm_up)
                if start == 0:
                    await self._gate(fleet)
                if not self.findings.outputs_identical:
                    return False
                first_s = time.monotonic() + 60 * self.args.first_minutes
                first += await self._blocks(fleet, "first minutes", start, first_s)
                steady += await self._blocks(fleet, "steady", start, until_s)
        finally:
            shutil.rmtree(out / "store", ignore_errors=True)
        return True

    async def _gate(self, fleet: Fleet) -> None:
        """Compare answers of prompts sent alone, bit for bit."""
        reference = Reference(self.findings, self.say)
        window = prompts(self.args.seed, GATE_WINDOW)
        requests = [
            replace(request, key=f"gate.{part.name}.{request.key}")
            for part, every in zip(PARTS, window, strict=True)
            for request in every[:GATE_PROMPTS]
        ]
        await reference.answer(fleet.servers[PLAIN], "gate", requests)
        for name in (AGAIN, *SYSTEMS):
            await asyncio.to_thread(fleet.servers[name].flush_cache)
            async with StreamingClient(fleet.servers[name].url) as client:
                records = await client.run_sequential(requests)
            reference.check("gate", name, records, ())
        await reference.control(fleet.servers[PLAIN])

    async def _blocks(
        self, fleet: Fleet, phase: str, start: int, until_s: float
    ) -> list[Window]:
        """Measure blocks until the time is up, at least ``MIN_BLOCKS``."""
        before = {name: bytes_by_edge(fleet.servers[name]) for name in SYSTEMS}
        windows: list[Window] = []
        num_blocks, longest_s = 0, 0.0
        least = 1 if self.args.quick else MIN_BLOCKS
        while num_blocks < least or time.monotonic() + longest_s < until_s:
            began_s = time.monotonic()
            windows += await run_block(
                fleet.servers, start, self.num_blocks, self.args.seed, self.parts
            )
            longest_s = max(longest_s, time.monotonic() - began_s)
            self.num_blocks += 1
            num_blocks += 1
            told = throughputs(windows)
            rates = ", ".join(
                f"{key} {value}"
                for key, value in told.items()
                if not key.endswith(("_interval", "_half_width"))
            )
            self.say(f"  start {start}, {phase}: block {num_blocks}, {rates}")
        num = sum(window.prompts for window in windows if window.server == PLAIN)
        self.moved.setdefault(phase, []).append(
            {
                name: {
                    edge: round((now - before[name].get(edge, 0)) / num)
                    for edge, now in bytes_by_edge(fleet.servers[name]).items()
                }
                for name in SYSTEMS
            }
        )
        return windows

    def _keep(self, found: dict[str, Any], windows: list[Window]) -> None:
        facts = run_facts("make bench-no-reuse", ROOT, SOURCES)
        shape = {
            "preset": PRESET,
            "pool_tokens": POOL_TOKENS,
            "host_pools": HOST_POOLS,
            "disk_bytes": DISK_BYTES,
            "users": USERS,
            "parts": [asdict(part) for part in self.parts],
            "seed": self.args.seed,
        }
        record = {**facts, **found, "shape": shape}
        record["windows"] = [asdict(window) for window in windows]
        keep_record(self.args.record, "no-reuse", record)


def _specs(model: Path, store: Path) -> dict[str, ServerSpec]:
    """Return the four servers, with the same device pool and flags."""
    device = Device(model, POOL_TOKENS, PAGE_SIZE, CPU_FLAGS)
    host_bytes = HOST_POOLS * POOL_TOKENS * PRESETS[PRESET].kv_bytes_per_token
    host, host_and_disk = Tiers(host_bytes), Tiers(host_bytes, store, DISK_BYTES)
    store.mkdir(parents=True)
    host_name, disk_name = SYSTEMS
    specs = (
        plain_spec(device, PLAIN),
        plain_spec(device, AGAIN),
        tiered_spec(device, host, host_name),
        tiered_spec(device, host_and_disk, disk_name),
    )
    return {spec.name: spec for spec in specs}


def main() -> int:
    """Run the bench; 0 if every target was met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-no-reuse"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--minutes", type=float, default=44.0, help="of all")
    parser.add_argument(
        "--first-minutes", type=float, default=2.5, help="of windows, after each start"
    )
    parser.add_argument("--starts", type=int, default=3, help="of every server")
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    parser.add_argument("--record", type=Path, help="folder for the figures as a file")
    args = parser.parse_args()
    if args.quick:
        if args.record is not None:
            parser.error("a smoke run has no figures to keep")
        args.minutes, args.first_minutes, args.starts = 0.0, 0.0, 1
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
