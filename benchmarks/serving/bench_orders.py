"""Orders of the queue, and reading ahead over it, on real servers.

Orders: four loads (decode pressure with host hits, a queue with long prompts among
short ones, chat, text analysis), open loop at a share of what the fcfs server does in a
closed loop. ``fcfs``, ``cost`` and a second ``fcfs`` take turns with the same requests;
the second one says how far two servers of one kind are apart.

Text analysis: 64 prefixes of 512 tokens (``FULL=1``: 128, and twice the requests),
bodies of 128, answers of 32; room for a 16th, a quarter and all of the prefixes on
device, host and disk, as in the Berkeley report; the disk throttled so that a reload
takes half as long as computing the prefix on this machine. A model whose time goes into
computing prompts, as it does where such loads are served. Plain SGLang, our server
with fcfs and no prefetch, with ``cost``, and with ``cost`` and prefetch take turns:
throughput of a stream (a client for every two prefixes), and latency of requests sent
at once.

Answers of the orders are compared with those of fcfs before any figure counts; those of
text analysis's streams are not. A table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from layers.equality import FLOOR
from movement.ending import run_to_end
from movement.tools import answered, send
from orders.findings import AGAIN, BASE, LoadFindings, order_summary
from orders.loads import BODY, PREFIX, Load, at_rate, mixed_loads, text_analysis
from reuse.parts import rotated, sources
from sgl_tiered_workloads.arrivals import ClosedLoop
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.gate import check_equality, measure_spread
from sgl_tiered_workloads.harness.control import rounding_spread
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.systems import (
    CPU_FLAGS,
    Device,
    Tiers,
    plain_spec,
    tiered_spec,
)
from sgl_tiered_workloads.turns import RequestSession

PARTS = ("orders", "text")
PAGE = 16
MODEL, TEXT_MODEL = "bench", "wide"
"""Of the orders, and of text analysis, which is about computing prompts."""
TOKEN_BYTES = PRESETS[MODEL].kv_bytes_per_token
PREFIX_BYTES = PREFIX * PRESETS[TEXT_MODEL].kv_bytes_per_token
POOL_TOKENS, HOST_TOKENS, DISK_TOKENS = 8_192, 32_768, 131_072
STREAM_SHARE, TEXT_SHARE = 0.4, 0.6
"""Of the time, after which no stream, and no repeat of text analysis, begins."""
DEVICE_PART, HOST_PART, DISK_PART = 1 / 16, 1 / 4, 33 / 32
"""Of the prefixes, what each place has room for; a disk tier keeps a 64th part free."""
LEAST_ON_DEVICE = 4
"""Prefixes: so many requests run at once at least."""
OWN_TOKENS = 192
"""Of a text analysis: body, answer and what page sizes round up."""
NEW_ONLY = ("--tiered-write-policy=selective",)
"""Bodies never come again: only what was seen twice goes below the device."""


class Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.rng = np.random.default_rng(11)
        self.problems: list[str] = []
        is_null = args.candidate == BASE
        self.arm = "null" if is_null else args.candidate
        self.order_flags = () if is_null else (f"--tiered-order={args.candidate}",)

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def out_of_time(self, share: float) -> bool:
        """Whether this share of the budget is spent."""
        return time.monotonic() - self.begin > share * self.args.minutes * 60

    async def run(self) -> dict[str, Any]:
        """Measure the parts asked for and return the result."""
        models = self.args.models.resolve()
        loads: dict[str, LoadFindings] = {}
        result: dict[str, Any] = {}
        try:
            if "text" in self.args.part:
                model = await asyncio.to_thread(make_model, TEXT_MODEL, models)
                result |= await self._text(model, loads)
            if "orders" in self.args.part:
                model = await asyncio.to_thread(make_model, MODEL, models)
                await self._orders(model, loads)
        finally:
            shutil.rmtree(self._store(""), ignore_errors=True)
        if loads:
            result |= order_summary(loads, self.arm)
        return result | {"problems": self.problems}

    # -- Orders ----------------------------------------------------------------

    async def _orders(self, model: Path, loads: dict[str, LoadFindings]) -> None:
        device = Device(model, POOL_TOKENS, PAGE, CPU_FLAGS)
        tiers = {
            arm: Tiers(
                HOST_TOKENS * TOKEN_BYTES, self._store(arm), DISK_TOKENS * TOKEN_BYTES
            )
            for arm in (BASE, self.arm, AGAIN)
        }
        specs = {
            arm: tiered_spec(
                device,
                tiers[arm],
                arm,
                flags=self.order_flags if arm == self.arm else (),
            )
            for arm in tiers
        }
        async with _Running(self, specs) as servers:
            wanted = mixed_loads(self.rng)
            for number, load in enumerate(wanted):
                until = TEXT_SHARE + (1 - TEXT_SHARE) * (number + 1) / len(wanted)
                loads[load.name] = await self._compare(load, servers, until)

    async def _compare(
        self, load: Load, servers: Mapping[str, SglangServer], until: float
    ) -> LoadFindings:
        """Let the arms take turns with a load."""
        warm = load.draw(self.rng, "warm", self.args.warm)
        rate = 0.0
        for arm, server in servers.items():
            await asyncio.to_thread(server.flush_cache)
            began_s = time.monotonic()
            await self._closed_loop(server, warm, 8)
            if arm == BASE:
                rate = load.utilisation * len(warm) / (time.monotonic() - began_s)
        self.say(f"{load.name}: {rate:.2f} requests/s")
        found = LoadFindings(rate)
        arms = (BASE, self.arm, AGAIN)
        num = -(-self.args.requests // self.args.repeats)
        for repeat in range(self.args.repeats):
            if repeat and self.out_of_time(until):
                self.say(f"  no time for more than {repeat} repeats")
                break
            name = f"r{repeat}"
            requests = at_rate(load.draw(self.rng, name, num), rate, self.rng)
            for arm in rotated(arms, repeat):
                async with StreamingClient(servers[arm].url) as client:
                    records = await client.run_open_loop(requests)
                found.records.setdefault(arm, []).extend(map(answered, records))
        found.sources = {arm: sources(found.records[arm]) for arm in arms}
        mean, p99 = found.ratios(self.arm)
        again = found.ratios(AGAIN)
        self.say(
            f"  {len(found.records[BASE])} requests each; TTFT of {self.arm} over "
            f"fcfs: mean {mean:.3f}, p99 {p99:.3f}; fcfs over itself: "
            f"{again[0]:.3f}, {again[1]:.3f}"
        )
        await self._gate(load.name, servers[BASE], found.records)
        return found

    async def _gate(
        self,
        label: str,
        server: SglangServer,
        records: Mapping[str, Sequence[RequestRecord]],
    ) -> None:
        """Demand equal answers, up to what batches and parts of prompts round to."""
        base = records[BASE]
        # Both servers of fcfs run the same batches, where another order runs others.
        beside = (measure_spread(base, records[AGAIN]), FLOOR)
        spread = await rounding_spread(server, base, PAGE, beside=beside)
        result = check_equality(
            base,
            records[self.arm],
            page_size=PAGE,
            spread=spread,
            forced=False,
        )
        self.say(f"  {result.summary()}")
        if not result.passed:
            self.problems.append(f"{label}: {result.summary()}")

    # -- Text analysis ---------------------------------------------------------

    async def _text(
        self, model: Path, loads: dict[str, LoadFindings]
    ) -> dict[str, Any]:
        num = self.args.prefixes
        on_device = max(LEAST_ON_DEVICE, int(num * DEVICE_PART))
        pool = on_device * (PREFIX + OWN_TOKENS)
        device = Device(model, pool, PAGE, CPU_FLAGS)
        compute_s = await self._prefix_s(device)
        bandwidth = PREFIX_BYTES / (0.5 * compute_s)
        self.say(
            f"a prefix is computed in {compute_s * 1e3:.0f} ms; disk reads throttled "
            f"to {bandwidth / 1e6:.1f} MB/s"
        )
        order = self.order_flags
        flags = {
            BASE: ("--tiered-prefetch=none",),
            AGAIN: ("--tiered-prefetch=none",),
            self.arm: ("--tiered-prefetch=none", *order),
            "ahead": ("--tiered-prefetch=car", *order),
        }
        specs = {"plain": plain_spec(device)} | {
            arm: tiered_spec(
                device,
                Tiers(
                    int(num * HOST_PART) * PREFIX_BYTES,
                    self._store(f"text-{arm}"),
                    int(num * DISK_PART) * PREFIX_BYTES,
                ),
                arm,
                flags=(
                    *extra,
                    *NEW_ONLY,
                    f"--tiered-emulate=disk:read-bandwidth={bandwidth / 1e3:.0f}KB",
                ),
            )
            for arm, extra in flags.items()
        }
        load = text_analysis(self.rng, num)
        async with _Running(self, specs) as servers:
            known = _every_prefix_twice(load, self.rng, num, on_device)
            for name, server in servers.items():
                if name != "plain":
                    await self._closed_loop(server, known, on_device)
            self.say("  every prefix is known")
            arms = ("plain", BASE, self.arm, "ahead")
            result = await self._throughput(load, {arm: servers[arm] for arm in arms})
            ours = {arm: servers[arm] for arm in (BASE, self.arm, AGAIN)}
            loads[load.name] = await self._compare(load, ours, TEXT_SHARE)
        return result | {"text_analysis_compute_s": compute_s}

    async def _throughput(
        self, load: Load, servers: Mapping[str, SglangServer]
    ) -> dict[str, Any]:
        """Return streamed throughput and batched latency of every arm."""
        num = -(-self.args.requests // self.args.repeats)
        clients = self.args.prefixes // 2
        rates: dict[str, list[float]] = {arm: [] for arm in servers}
        latencies: dict[str, list[float]] = {arm: [] for arm in servers}
        records: dict[str, list[RequestRecord]] = {arm: [] for arm in servers}
        for repeat in range(self.args.repeats):
            if repeat and self.out_of_time(STREAM_SHARE):
                self.say(f"  no time for more than {repeat} streams")
                break
            requests = load.draw(self.rng, f"stream{repeat}", num)
            batch = load.draw(self.rng, f"batch{repeat}", min(num, clients))
            for arm in rotated(list(servers), repeat):
                began_s = time.monotonic()
                records[arm] += await self._closed_loop(servers[arm], requests, clients)
                rates[arm].append(num / (time.monotonic() - began_s))
                async with StreamingClient(servers[arm].url) as client:
                    sent = await client.run_open_loop(batch)
                latencies[arm] += [_latency_s(answered(record)) for record in sent]
            self.say(
                f"  stream {repeat}: "
                + ", ".join(f"{arm} {rates[arm][-1]:.2f}/s" for arm in servers)
            )
        served = {arm: float(np.median(found)) for arm, found in rates.items()}
        by_tier = {arm: sources(found) for arm, found in records.items()}
        return {
            "text_analysis_throughput_vs_plain": served["ahead"] / served["plain"],
            "text_analysis_throughput_vs_own_fcfs": served["ahead"] / served[BASE],
            "text_analysis_throughput": served,
            "text_analysis_latency_s": {
                arm: float(np.mean(found)) for arm, found in latencies.items()
            },
            "text_analysis_sources": by_tier,
            "text_analysis_miss_rate": _miss_rates(by_tier),
        }

    async def _prefix_s(self, device: Device) -> float:
        """Return how long plain SGLang computes a prefix's worth of tokens."""
        async with _Running(self, {"plain": plain_spec(device)}) as servers:
            load = text_analysis(self.rng, 12)
            requests = [
                PlannedRequest(r.key, r.prompt[:PREFIX], 1)
                for r in load.draw(self.rng, "probe", 12)
            ]
            unique = {r.prompt: r for r in requests}
            times = [
                (await send(servers["plain"], [request]))[0]
                for request in unique.values()
            ]
        return float(np.median(times))

    # -- Sending ---------------------------------------------------------------

    async def _closed_loop(
        self, server: SglangServer, requests: Sequence[PlannedRequest], clients: int
    ) -> list[RequestRecord]:
        sessions = [RequestSession(request) for request in requests]
        async with StreamingClient(server.url, logprobs=False) as client:
            records = await run_sessions(client, sessions, ClosedLoop(clients))
        return [answered(record) for record in records]

    def _store(self, name: str) -> Path:
        return self.args.out.resolve() / "store" / name.replace(" ", "-")


class _Running:
    """Servers that run while it is entered, warmed up."""

    def __init__(self, bench: Bench, specs: Mapping[str, ServerSpec]) -> None:
        args = bench.args
        logs = args.out.resolve() / "logs"
        self._fleet = Fleet(specs, logs, args.first_port, bench.say)
        self._names = list(specs)

    async def __aenter__(self) -> Mapping[str, SglangServer]:
        self._fleet.__enter__()
        warm_up = PlannedRequest("warm", tuple(range(100, 1_100)), 4)
        try:
            await self._fleet.only(self._names, warm_up)
        except BaseException:
            self._fleet.__exit__(None, None, None)
            raise
        return self._fleet.servers

    async def __aexit__(self, *details: object) -> None:
        await asyncio.to_thread(self._fleet.__exit__, None, None, None)


def _every_prefix_twice(
    load: Load, rng: np.random.Generator, num_prefixes: int, apart: int
) -> list[PlannedRequest]:
    """Return two short requests for each prefix, ``apart`` prefixes between them.

    Where the device holds as many, the second ones cost little; what was seen twice
    goes below the device.
    """
    firsts, seconds = (_every_prefix(load, rng, f"w{n}", num_prefixes) for n in (0, 1))
    requests: list[PlannedRequest] = []
    for begin in range(0, num_prefixes, apart):
        block = list(firsts)[begin : begin + apart]
        requests += [firsts[prefix] for prefix in block]
        requests += [seconds[prefix] for prefix in block]
    return requests


def _every_prefix(
    load: Load, rng: np.random.Generator, name: str, num_prefixes: int
) -> dict[str, PlannedRequest]:
    """Return a request with one token of answer for each prefix."""
    found: dict[str, PlannedRequest] = {}
    while len(found) < num_prefixes:
        for request in load.draw(rng, name, num_prefixes):
            prefix = request.key.rpartition(".")[2]
            found.setdefault(prefix, replace(request, max_new_tokens=1))
    return found


def _latency_s(record: RequestRecord) -> float:
    return record.token_times_s[-1] - record.started_s


def _miss_rates(by_tier: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the share of prefix tokens that no place down to each one had."""
    rates: dict[str, Any] = {}
    for arm, tokens in by_tier.items():
        total = sum(tokens.values()) * PREFIX / (PREFIX + BODY)
        left = total
        rates[arm] = {}
        for tier in ("device", "host", "disk"):
            left -= tokens.get(tier, 0)
            rates[arm][tier] = max(left, 0.0) / total
    return rates


def main() -> int:
    """Run the bench; 0 unless a server failed or answers differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-orders"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument(
        "--candidate", default="cost", help="the order to compare; fcfs for a null run"
    )
    scale = 2 if os.environ.get("FULL") == "1" else 1
    parser.add_argument(
        "--requests", type=int, default=150 * scale, help="per load and arm"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--warm", type=int, default=30 * scale, help="requests before a load"
    )
    parser.add_argument(
        "--prefixes", type=int, default=64 * scale, help="of text analysis"
    )
    parser.add_argument(
        "--minutes", type=float, default=40.0 * scale**2, help="of repeats"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    args = parser.parse_args()
    args.part = args.part or list(PARTS)
    if args.quick:
        args.requests, args.repeats, args.warm, args.prefixes = 16, 2, 8, 12
    return run_to_end(Bench(args).run(), args.out)


if __name__ == "__main__":
    raise SystemExit(main())
