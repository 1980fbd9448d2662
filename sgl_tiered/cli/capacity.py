"""``simulate --capacity-plan``: hits, TTFT and cost for a range of tier sizes.

Each size is one run of the simulated server on the same load. Of a trace two bounds
stand beside: what exclusive tiers under one LRU, and any eviction (OPT), could serve
from tiers of these sizes without any time passing. Costs are prices per decimal GB that
the user gives; the defaults are round figures, for comparison only. Which sizes to buy
is said at the end (``capacity_advice.py``).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import orjson
from sgl_tiered_workloads.traces.base import Trace

from sgl_tiered.cli.capacity_advice import (
    CapacityPoint,
    Recommendation,
    frontier,
    recommend,
)
from sgl_tiered.cli.progress import progress
from sgl_tiered.cli.simulate_workload import from_trace, make_workload, read_trace
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import Calibration
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.capacity import capacity_plan
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.settings import refusal
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.summary import Slo, summarize

__all__ = [
    "add_capacity_flags",
    "capacity_points",
    "check_capacity_flags",
    "run_capacity_plan",
]

_SIZES = {"host_sizes": "0,64,128,256,512", "disk_sizes": "0"}
_PRICES = {"host_price": 4.0, "disk_price": 0.1}
"""Dollars per GB of server DRAM and of data-centre NVMe, in round figures."""
_MIN_QUARTER, _MIN_WAIT_S = 8, 1.0


def add_capacity_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the capacity plan; unset they are None."""
    group = parser.add_argument_group("capacity plan: a run for each pair of sizes")
    group.add_argument(
        "--capacity-plan",
        action="store_true",
        help="simulate the load with each host and each disk size, and recommend one",
    )
    group.add_argument(
        "--host-sizes", metavar="GB,GB,...", help=f"(default: {_SIZES['host_sizes']})"
    )
    group.add_argument(
        "--disk-sizes",
        metavar="GB,GB,...",
        help=f"each with each host size but 0 (default: {_SIZES['disk_sizes']})",
    )
    for name, price in _PRICES.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(
            flag, type=float, metavar="PER_GB", help=f"(default: {price})"
        )
    group.add_argument("--currency", metavar="UNIT", help="of the prices (default: $)")


def check_capacity_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that would do nothing, with a plan or without one.

    Raises:
        ConfigError: there is one.
    """
    names = (*_SIZES, *_PRICES, "currency")
    reason, remedy = "does nothing without --capacity-plan", "give both or neither"
    if arguments.capacity_plan:
        names = ("host_gb", "disk_gb", "explain")
        reason, remedy = "says nothing of a capacity plan", "leave it out"
    for name in names:
        if getattr(arguments, name) is not None:
            raise refusal(name, reason, remedy)


def run_capacity_plan(
    arguments: argparse.Namespace, spec: SimSpec, calibration: Calibration | None
) -> int:
    """Run all sizes, print table and advice, and write them and a plot to ``--out``."""
    hosts, disks = (
        _numbers(name, getattr(arguments, name) or sizes)
        for name, sizes in _SIZES.items()
    )
    sizes = [(host, disk) for host in hosts for disk in disks if host or not disk]
    if not sizes:
        raise refusal("host_sizes", "a disk needs a host tier", "give one above 0")
    host_price, disk_price = (
        _price(name, getattr(arguments, name), price) for name, price in _PRICES.items()
    )
    unit = arguments.currency or "$"
    points = capacity_points(spec, calibration, sizes, (host_price, disk_price))
    advice = recommend(points, spec.ttft_s, unit)
    text = f"{_table(points, unit)}\n\nRecommended: {advice.reason}"
    told = orjson.dumps(
        {
            "currency": unit,
            "ttft_s": spec.ttft_s,
            "tpot_s": spec.tpot_s,
            "points": points,
            "frontier": [points.index(point) for point in frontier(points)],
            "recommended": None if advice.point is None else points.index(advice.point),
            "reason": advice.reason,
        },
        option=orjson.OPT_INDENT_2,
    )
    print(told.decode() if arguments.json else text)
    if arguments.out:
        _write(Path(arguments.out), told, text)
        picture = _draw(points, advice, spec.ttft_s, unit)
        (Path(arguments.out) / "capacity.png").write_bytes(picture)
    return 0 if frontier(points) else 1


def capacity_points(
    spec: SimSpec,
    calibration: Calibration | None,
    sizes: list[tuple[float, float]],
    prices: tuple[float, float],
) -> list[CapacityPoint]:
    """Simulate the same load with each (host, disk) size in decimal GB."""
    specs = [replace(spec, host_gb=host, disk_gb=disk) for host, disk in sizes]
    servers = [each.server(calibration) for each in specs]
    trace = read_trace(spec) if spec.trace else None
    workload = make_workload(spec) if trace is None else from_trace(trace, spec)
    bounds = _bounds(trace, servers, spec.page_size)
    points: list[CapacityPoint] = []

    def state() -> str:
        host, disk = sizes[min(len(points), len(sizes) - 1)]
        return (
            f"size {len(points) + 1} of {len(sizes)}: host {host:g}, disk {disk:g} GB"
        )

    with progress("simulating", state):
        for each, server, bound in zip(specs, servers, bounds, strict=True):
            points.append(_point(each, server, workload, prices, bound))
    return points


def _bounds(
    trace: Trace | None, servers: list[ServerConfig], page_tokens: int
) -> list[tuple[float, float]]:
    """Return the hits of exclusive LRU and of OPT for each server's tiers."""
    if trace is None:
        return [(math.nan, math.nan)] * len(servers)
    pages = PageTrace(
        [request.block_ids for request in trace.requests],
        [request.num_prompt_tokens for request in trace.requests],
        trace.block_tokens,
        page_tokens,
    )
    sizes = [
        {
            TierId.DEVICE: server.capacity_pages * server.page_bytes,
            **{setup.tier: setup.size_bytes for setup in server.tiers},
        }
        for server in servers
    ]
    rows = capacity_plan(pages, servers[0].kv_token_bytes, sizes)
    return [(row.token_hit_rate, row.opt_hit_rate) for row in rows]


def _point(
    spec: SimSpec,
    server: ServerConfig,
    workload: SimWorkload,
    prices: tuple[float, float],
    bound: tuple[float, float],
) -> CapacityPoint:
    result = simulate(server, workload)
    summary = summarize(result, Slo(spec.ttft_s, spec.tpot_s))
    return CapacityPoint(
        host_gb=spec.host_gb,
        disk_gb=spec.disk_gb,
        cost=spec.host_gb * prices[0] + spec.disk_gb * prices[1],
        device_hits=summary.hit_ratio["device"],
        host_hits=summary.hit_ratio["host"],
        disk_hits=summary.hit_ratio["disk"],
        ttft_mean_s=summary.ttft.mean,
        ttft_p99_s=summary.ttft.p99,
        slo_attainment=summary.slo_attainment,
        is_overloaded=_is_overloaded(result),
        lru_hits=bound[0],
        opt_hits=bound[1],
    )


def _is_overloaded(result: SimResult) -> bool:
    """Say whether the queue grew as long as requests came.

    The last quarter of them then waits longer than the second one by more than what a
    steady queue varies by, and seconds.
    """
    waits = [record.queue_s for record in result.records if not record.aborted]
    quarter = len(waits) // 4
    if quarter < _MIN_QUARTER:
        return False
    second = sum(waits[quarter : 2 * quarter]) / quarter
    last = sum(waits[-quarter:]) / quarter
    return last > 2.0 * second and last > _MIN_WAIT_S


def _table(points: list[CapacityPoint], unit: str) -> str:
    has_bounds = not all(math.isnan(point.opt_hits) for point in points)
    bounds = f"{'LRU':>8}{'OPT':>8}" if has_bounds else ""
    lines = [
        f"{'host GB':>8}{'disk GB':>9}{f'cost {unit}':>10}{'hits':>8}{'device':>8}"
        f"{'host':>8}{'disk':>8}{bounds}{'TTFT mean':>11}{'p99':>10}{'in SLO':>8}"
    ]
    best = frontier(points)
    for point in points:
        shares = [point.hits, point.device_hits, point.host_hits, point.disk_hits]
        shares += [point.lru_hits, point.opt_hits] if has_bounds else []
        marks = " *" if point in best else ""
        marks += " OVERLOADED" if point.is_overloaded else ""
        lines.append(
            f"{point.host_gb:8g}{point.disk_gb:9g}{point.cost:10.0f}"
            + "".join(_share(share) for share in shares)
            + _seconds(point.ttft_mean_s, 10, 3)
            + _seconds(point.ttft_p99_s, 9, 2)
            + f"{point.slo_attainment:8.1%}{marks}"
        )
    lines += [
        "",
        "Hits are shares of prompt tokens, simulated on the same load.",
        "*: no cheaper size has a lower mean TTFT (the Pareto frontier).",
    ]
    if has_bounds:
        lines += [
            "LRU and OPT are bounds without time for exclusive tiers; ours are",
            "inclusive, and answers take room in them.",
        ]
    return "\n".join(lines)


def _seconds(value: float, width: int, digits: int) -> str:
    text = "-" if math.isnan(value) else f"{value:.{digits}f}"
    return f"{text:>{width}}s"


def _share(value: float) -> str:
    return f"{'-':>8}" if math.isnan(value) else f"{value:8.3f}"


def _write(folder: Path, told: bytes, text: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "capacity.json").write_bytes(told + b"\n")
        (folder / "capacity.txt").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--out", f"{folder} cannot be written ({error.strerror})", "give another"
        ) from None


def _draw(
    points: list[CapacityPoint], advice: Recommendation, ttft_s: float, unit: str
) -> bytes:
    try:
        # Only here: it needs matplotlib.
        from sgl_tiered.cli.capacity_plot import draw

        return draw(points, advice, ttft_s, unit)
    except ModuleNotFoundError:
        raise ConfigError(
            "--out", "the plot needs matplotlib", "pip install 'sgl-tiered[bench]'"
        ) from None


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = sorted({float(word) for word in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 <= value < math.inf for value in values):
        raise refusal(name, f"{text!r} is no list of sizes", "such as 0,64")
    return values


def _price(name: str, given: float | None, price: float) -> float:
    if given is None:
        return price
    if not 0 <= given < math.inf:
        raise refusal(name, f"{given:g} is no price", "give 0 or more")
    return given
