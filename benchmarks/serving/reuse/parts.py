"""Measures: working sets, hits, and runs without reuse.

One request runs at a time, in one system; the systems take turns, and who begins
changes from turn to turn, so that drift of the machine falls on all alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from reuse.page_cache import drop_page_cache, residence
from reuse.schedules import PAGE_SIZE, HitSchedule, fresh_run
from reuse.statistics import median_interval
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.turns import bytes_by_edge, rotated, settle
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.report import tokens_by_source
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.usage import tokens_by_tier

__all__ = [
    "HitRun",
    "bytes_by_edge",
    "empty_above_disk",
    "make_cold",
    "pair_ratios",
    "rotated",
    "run_hits",
    "run_no_reuse",
    "run_rounds",
    "settle",
    "sources",
]

Say = Callable[[str], None]
Servers = Mapping[str, SglangServer]
Records = dict[str, list[RequestRecord]]


@dataclass(slots=True)
class HitRun:
    """Hits of several systems.

    Attributes:
        records: every request by system, those that brought the prompts in included.
        hits: the hits alone, by system and state.
        resident: largest share of a store found in the page cache before a cold hit.
    """

    records: Records = field(default_factory=dict)
    hits: dict[tuple[str, str], list[RequestRecord]] = field(default_factory=dict)
    resident: dict[str, float] = field(default_factory=dict)


def sources(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Return prompt tokens by where their KV came from.

    Records of former runs may name what the disk gave twice; it counts once.
    """
    once = [
        replace(record, cached_by_tier=tokens_by_tier(record.cached_by_tier))
        for record in records
    ]
    return tokens_by_source(once, PAGE_SIZE)


async def run_rounds(
    servers: Servers,
    rounds: Sequence[Sequence[PlannedRequest]],
    stores: Mapping[str, Path],
    say: Say,
) -> Records:
    """Send every round to every system; a new round begins when all had the last."""
    records: Records = {name: [] for name in servers}
    for server in servers.values():
        await asyncio.to_thread(server.flush_cache)
    for turn, requests in enumerate(rounds):
        for name in rotated(list(servers), turn):
            order = len(records[name])
            # A new client per round: an idle connection may have been closed.
            async with StreamingClient(servers[name].url) as client:
                for place, request in enumerate(requests):
                    record = await client.send(request, order + place)
                    records[name].append(_answered(name, record))
            await settle(servers[name], stores.get(name))
            seen = records[name][order:]
            mean_s = sum(record.ttft_s for record in seen) / len(seen)
            cached = sum(record.cached_tokens for record in seen)
            total = sum(len(record.prompt) for record in seen)
            say(
                f"    round {turn} {name}: {len(seen)} requests, mean TTFT "
                f"{mean_s * 1e3:.0f} ms, {cached / total:.0%} cached"
            )
    return records


async def run_hits(
    servers: Servers,
    schedule: HitSchedule,
    stores: Mapping[str, Path],
    states: Sequence[str],
    say: Say,
) -> HitRun:
    """Measure hits of a 6,000-token prompt.

    Args:
        servers: ``plain`` gives device hits, the others hits below the device.
        schedule: the prompts.
        stores: folders of the systems with a disk.
        states: taken in turn. In ``cold`` and ``warm``, device and host of a system
            with a disk are emptied before the hit, in ``cold`` the page cache too.
        say: takes progress lines.
    """
    run = HitRun({name: [] for name in servers})
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(StreamingClient(server.url))
            for name, server in servers.items()
        }

        async def send(name: str, request: PlannedRequest) -> RequestRecord:
            record = await clients[name].send(request, len(run.records[name]))
            run.records[name].append(_answered(name, record))
            return record

        for name, server in servers.items():
            await asyncio.to_thread(server.flush_cache)
            for request in schedule.cold():
                await send(name, request)
            if name == "plain":
                await send(name, schedule.hit(0, same=True))
            await settle(server, stores.get(name))
        for number in range(schedule.num_hits):
            state = states[number % len(states)]
            for name in rotated(list(servers), number // len(states)):
                if name in stores:
                    await asyncio.to_thread(empty_above_disk, servers[name])
                if name in stores and state == "cold":
                    share = await asyncio.to_thread(make_cold, stores[name])
                    run.resident[name] = max(run.resident.get(name, 0.0), share)
                record = await send(name, schedule.hit(number, same=name == "plain"))
                run.hits.setdefault((name, state), []).append(record)
            if (number + 1) % 20 == 0:
                say(f"    {number + 1} of {schedule.num_hits} hits each")
    return run


async def run_no_reuse(
    servers: Servers,
    num_prompts: int,
    min_pairs: int,
    max_pairs: int,
    half_width: float,
    out_of_time: Callable[[], bool],
    say: Say,
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]], Records]:
    """Measure throughput without reuse in runs that take turns.

    Runs go on after ``min_pairs`` until the interval of each ratio is as narrow as
    asked, ``max_pairs`` are done, or time is out. Only the width decides, never the
    value.

    Returns:
        prompt and answer tokens per second by system, one per run; bytes moved by
        system and edge; and the records.
    """
    rates: dict[str, list[float]] = {name: [] for name in servers}
    records: Records = {name: [] for name in servers}
    for server in servers.values():
        await asyncio.to_thread(server.flush_cache)
    before = {name: bytes_by_edge(server) for name, server in servers.items()}
    for number in range(max_pairs):
        requests = fresh_run(number, num_prompts)
        first = number * num_prompts
        for name in rotated(list(servers), number):
            async with StreamingClient(servers[name].url) as client:
                done = [
                    _answered(name, await client.send(request, first + place))
                    for place, request in enumerate(requests)
                ]
            records[name].extend(done)
            tokens = sum(len(r.prompt) + len(r.output) for r in done)
            spent_s = done[-1].token_times_s[-1] - done[0].started_s
            rates[name].append(tokens / spent_s)
            await settle(servers[name], None)
        if number + 1 >= min_pairs:
            widths = {
                name: median_interval(pair_ratios(rates, name)).half_width
                for name in servers
                if name != "plain"
            }
            text = ", ".join(f"{name} {w:.4f}" for name, w in widths.items())
            say(f"    {number + 1} paired runs, half-width {text}")
            if max(widths.values()) <= half_width or out_of_time():
                break
    moved = {}
    for name, server in servers.items():
        after = bytes_by_edge(server)
        moved[name] = {e: n - before[name].get(e, 0) for e, n in after.items()}
    return rates, moved, records


def pair_ratios(rates: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Return a system's throughput over plain's, run by run."""
    return [a / b for a, b in zip(rates[name], rates["plain"], strict=True)]


def empty_above_disk(server: SglangServer) -> None:
    """Empty device and host, and keep what is on disk."""
    if "tiered" in server.spec.flags:
        for tier in ("device", "host"):
            server.post(f"/tiered/drop?tier={tier}", {})
    else:
        # HiCache forgets device and host here and keeps its storage.
        server.flush_cache()


def make_cold(store: Path) -> float:
    """Drop a store from the page cache; return the share that stayed."""
    drop_page_cache(store)
    return residence(store).fraction


def _answered(name: str, record: RequestRecord) -> RequestRecord:
    if record.error is not None:
        raise RuntimeError(f"{name}: {record.key} failed: {record.error}")
    return record
