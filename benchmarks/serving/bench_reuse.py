"""Reuse of KV: plain SGLang, HiCache and sgl-tiered on the same work.

Parts (``--part`` picks; by default all but ``beyond``, with ``FULL=1`` all):

- ``sets``: working sets of several device pools, in turns; TTFT of what could hit.
- ``host``: hits of a 6,000-token prompt in host memory.
- ``beyond``: a working set beyond host memory, for the systems with a disk.
- ``disk``: hits of the same prompt on disk, page cache cold and warm.

A hit's penalty is its TTFT over plain SGLang's device hit of the same length, and no
TTFT can be lower than that hit's: ``ttft_speedup_of_bound`` is the share of the best
possible speed-up over recomputing that ours reaches. Before anything is claimed, every
answer is compared with those of plain SGLang whose device pool holds everything, and a
negative control shows that the comparison can fail. Records, table and picture go to
``--out``; the last line is one JSON object, and the exit code is 1 if its ``problems``
or ``targets_missed`` name something. One run swings with the machine: ``--judge
FOLDER`` measures nothing and judges the medians of three records on today's source.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# The baselines are a folder beside, used by the micro benchmarks too.
sys.path.append(str(Path(__file__).parents[1] / "baselines"))

from reuse.fleet import Sizes, Stores, system_specs
from reuse.parts import (
    HitRun,
    Records,
    run_hits,
    run_rounds,
    sources,
)
from reuse.picture import draw
from reuse.reference import Reference
from reuse.results import Findings, good_hits, markdown, summary
from reuse.schedules import (
    FULL,
    NORMAL,
    QUICK,
    HitSchedule,
    Scale,
    set_rounds,
)
from reuse.targets import judged, missed
from sgl_tiered_workloads.gate import NegativeControlError
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.harness.keeping import keep_record, read_kept, run_facts
from sgl_tiered_workloads.harness.machine import NOT_IN_SERVERS, source_hash
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records
from sgl_tiered_workloads.server import ServerStartError, exit_on_signals
from sgl_tiered_workloads.sessions import PlannedRequest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "sgl_tiered",
    "kernels",
    "platform_dist",
    "benchmarks/serving/bench_reuse.py",
    "benchmarks/serving/reuse",
)
PARTS = ("sets", "host", "beyond", "disk")
NAME, COMMAND = "reuse", "make bench-reuse"
PRESET = "bench"
POOL_TOKENS = 8192
DISK_BYTES = 6_000_000_000
MIN_HITS = 50
DISK_SYSTEMS = ("hicache-file", "tiered-disk")
HOST_SYSTEMS = ("hicache-sync", "hicache-async", "tiered")


class Bench:
    """One run of the benchmark: servers, findings and the reference's answers."""

    def __init__(self, args: argparse.Namespace, scale: Scale) -> None:
        self.args = args
        self.scale = scale
        self.begin = time.monotonic()
        self.findings = Findings()
        self.reference = Reference(self.findings, self.say)
        self.stores: dict[str, Path] = {}

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    async def run(self) -> dict[str, Any]:
        """Measure all parts and return the result."""
        out, parts = self.args.out.resolve(), self.args.part
        self.say(f"making the {PRESET} model (random weights, cached)")
        model = await asyncio.to_thread(make_model, PRESET, self.args.models.resolve())
        self.stores = {
            "tiered-disk": out / "store" / "tiered",
            "hicache-file": out / "store" / "hicache",
        }
        for folder in self.stores.values():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        most = max(*self.scale.pools, self.scale.beyond_pools)
        sizes = Sizes(
            PRESETS[PRESET].kv_bytes_per_token,
            POOL_TOKENS,
            self.scale.host_pools,
            self.scale.small_host_pools,
            DISK_BYTES,
            int((most + 3) * POOL_TOKENS),
        )
        stores = Stores(self.stores["tiered-disk"], self.stores["hicache-file"])
        specs = system_specs(model, sizes, stores, out / "plugin", self.args.layout)
        first_port = self.args.first_port
        try:
            with Fleet(specs, out / "logs", first_port, self.say) as fleet:
                await self._reference(fleet)
                if {"sets", "host"} & set(parts):
                    await self._host_parts(fleet)
                if {"beyond", "disk"} & set(parts):
                    await self._disk_parts(fleet)
        finally:
            shutil.rmtree(out / "store", ignore_errors=True)
        return summary(self.findings)

    async def _reference(self, fleet: Fleet) -> None:
        self.say("reference: plain SGLang whose device pool holds everything")
        await fleet.only(["reference"], self._warm_up())
        server = fleet.servers["reference"]
        for label, requests in self._schedules().items():
            records = await self.reference.answer(server, label, requests)
            self._write(fleet, label, "reference", records)
        await self.reference.control(server)
        await self.reference.measure_rounding(server)

    def _schedules(self) -> dict[str, list[PlannedRequest]]:
        """Return all schedules that a gate needs, by label."""
        found: dict[str, list[PlannedRequest]] = {}
        if "sets" in self.args.part:
            for pools in self.scale.pools:
                found[_label(pools)] = _flat(self._rounds(pools))
        if "beyond" in self.args.part:
            found["beyond host"] = _flat(self._rounds(self.scale.beyond_pools))
        for kind in {"host", "disk"} & set(self.args.part):
            found[kind] = self._hits(kind).every()
        return found

    def _rounds(self, pools: float) -> list[list[PlannedRequest]]:
        return set_rounds(POOL_TOKENS, pools, self.scale.rounds + 1)

    def _hits(self, kind: str) -> HitSchedule:
        # On disk every second hit is a cold one.
        return HitSchedule(self.scale.hits * (2 if kind == "disk" else 1), kind)

    def _warm_up(self) -> PlannedRequest:
        return PlannedRequest("warm", tuple(range(100, 1700)), 4)

    async def _host_parts(self, fleet: Fleet) -> None:
        self.say("device and host: plain, both forms of HiCache, tiered")
        names = ("plain", *HOST_SYSTEMS)
        await fleet.only(names, self._warm_up())
        servers = {name: fleet.servers[name] for name in names}
        if "sets" in self.args.part:
            for pools in self.scale.pools:
                self.say(f"  working set of {pools} device pools")
                records = await run_rounds(
                    servers, self._rounds(pools), self.stores, self.say
                )
                self._take_set(fleet, _label(pools), records)
        if "host" in self.args.part:
            self.say("  host hits of a 6,000-token prompt")
            run = await run_hits(servers, self._hits("host"), {}, ("host",), self.say)
            self._take_hits(fleet, "host", run)

    async def _disk_parts(self, fleet: Fleet) -> None:
        self.say("disk: plain, HiCache with files, tiered with a disk; small host")
        names = ("plain", *DISK_SYSTEMS)
        await fleet.only(names, self._warm_up())
        servers = {name: fleet.servers[name] for name in names}
        if "beyond" in self.args.part:
            pools, small = self.scale.beyond_pools, self.scale.small_host_pools
            self.say(f"  working set of {pools} device pools, host memory of {small}")
            records = await run_rounds(
                servers, self._rounds(pools), self.stores, self.say
            )
            self._take_set(fleet, "beyond host", records)
        if "disk" in self.args.part:
            self.say("  disk hits of a 6,000-token prompt, page cache cold and warm")
            schedule, states = self._hits("disk"), ("cold", "warm")
            run = await run_hits(servers, schedule, self.stores, states, self.say)
            self._take_hits(fleet, "disk", run)

    def _take_set(self, fleet: Fleet, label: str, records: Records) -> None:
        """Check and keep what a working set gave."""
        for name, every in records.items():
            self._write(fleet, label, name, every)
            if name != "plain":
                self.reference.check(label, name, every, (), records["plain"])
            later = [record for record in every if not record.key.startswith("r0.")]
            times = self.findings.sets.setdefault(label, {})
            times[name] = [record.ttft_s for record in later]
            self.findings.sources.setdefault(label, {})[name] = sources(every)

    def _take_hits(self, fleet: Fleet, kind: str, run: HitRun) -> None:
        """Check and keep what a series of hits gave."""
        for name, every in run.records.items():
            self._write(fleet, kind, name, every)
            if name != "plain":
                # HiCache calls its disk "storage".
                tier = "storage" if name == "hicache-file" else kind
                self.reference.check(kind, name, every, (tier,))
        self.findings.recompute_s += [
            record.ttft_s for record in run.records["plain"] if not record.cached_tokens
        ]
        for (name, state), records in run.hits.items():
            if name == "plain":
                self.findings.device_s += good_hits(records, "device")
                continue
            tier = "storage" if name == "hicache-file" else kind
            label = name if state == "host" else f"{name} {state}"
            found = good_hits(records, tier)
            self.findings.hits_s[label] = found
            if len(found) < min(MIN_HITS, self.scale.hits):
                self.findings.problems.append(
                    f"{label}: only {len(found)} of {len(records)} requests found all "
                    f"their KV in {tier}"
                )
        self.findings.resident |= run.resident
        for name, share in run.resident.items():
            if share > 0:
                self.findings.problems.append(
                    f"{name}: {share:.1%} of its store stayed in the page cache"
                )

    def _write(
        self, fleet: Fleet, label: str, name: str, records: Iterable[RequestRecord]
    ) -> None:
        spec = fleet.servers[name].spec
        # Headers name no path of the machine.
        flags = [Path(f).name if f.startswith("/") else f for f in spec.flags]
        facts = {"part": label, "flags": flags, "scale": asdict(self.scale)}
        facts |= {"preset": PRESET, "pool_tokens": POOL_TOKENS}
        path = self.args.out / "records" / f"{label.replace(' ', '-')}.{name}.jsonl"
        write_records(path, make_header(name, facts), records)


def main() -> int:
    """Run the benchmark; 0 if the gate is green and nothing else failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-reuse"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    parser.add_argument(
        "--layout",
        choices=("page_first", "page_first_direct"),
        default="page_first_direct",
        help="of HiCache's host memory; the default copies as fast as ours",
    )
    parser.add_argument("--record", type=Path, help="folder for the figures as a file")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="of the records")
    args = parser.parse_args()
    if args.judge is not None:
        return _judge(args.judge)
    if args.record is not None and (args.part or args.quick):
        parser.error("a record is of the usual parts and no smoke run")
    full = os.environ.get("FULL") == "1"
    # Without it a run takes less than 20 minutes on two idle cores.
    args.part = args.part or [part for part in PARTS if full or part != "beyond"]
    scale = QUICK if args.quick else FULL if full else NORMAL
    exit_on_signals()
    bench = Bench(args, scale)
    try:
        result = asyncio.run(bench.run())
    except ServerStartError as error:
        print(error, file=sys.stderr)
        return 1
    except NegativeControlError as error:
        print(f"the gate cannot fail, so it proves nothing: {error}", file=sys.stderr)
        return 1
    if not args.quick:
        result["targets_missed"] = missed(result)
    result["minutes"] = round((time.monotonic() - bench.begin) / 60, 1)
    if args.record is not None:
        facts = run_facts(COMMAND, ROOT, SOURCES)
        record = {**facts, "scale": asdict(scale), **result}
        keep_record(args.record, NAME, record)
    return _finish(args.out, bench, result)


def _judge(folder: Path) -> int:
    """Print what the medians of the records on today's source say."""
    source = source_hash(ROOT, SOURCES, NOT_IN_SERVERS)
    result = judged(read_kept(folder, NAME, source))
    print(json.dumps(result))
    return 1 if result["targets_missed"] else 0


def _finish(out: Path, bench: Bench, result: Mapping[str, Any]) -> int:
    """Write and print table, picture and result."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(bench.findings, result)
    (out / "summary.md").write_text(text)
    (out / "result.json").write_text(json.dumps(result, indent=1))
    if bench.findings.outputs_identical:
        draw(out / "reuse.png", bench.findings, result)
    print("\n" + text)
    bench.say(f"records, logs, table and picture are in {out}")
    print(json.dumps(result))
    return 1 if bench.findings.problems or result.get("targets_missed") else 0


def _flat(rounds: Iterable[Sequence[PlannedRequest]]) -> list[PlannedRequest]:
    return [request for requests in rounds for request in requests]


def _label(pools: float) -> str:
    return f"{pools:g} pools"


if __name__ == "__main__":
    raise SystemExit(main())
