"""``simulate --capacity-plan``: hits, TTFT and cost for a range of tier sizes.

Each size is one run of the simulated server on the same load. Of a trace two bounds
stand beside: what exclusive tiers under one LRU, and any eviction (OPT), could serve
from tiers of these sizes without any time passing. Costs are prices per decimal GB that
the user gives; the defaults are round figures, for comparison only.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sgl_tiered_workloads.traces.base import Trace

from sgl_tiered.cli.simulate_workload import from_trace, make_workload, read_trace
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import Calibration
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.capacity import capacity_plan
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.summary import Slo, summarize

__all__ = [
    "CapacityPoint",
    "add_capacity_flags",
    "capacity_points",
    "run_capacity_plan",
]

_HOST_PRICE, _DISK_PRICE = 4.0, 0.1
"""Dollars per GB of server DRAM and of data-centre NVMe, in round figures."""


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """One choice of sizes; ``cost`` is in the unit of the prices.

    ``lru_hits`` and ``opt_hits`` are the timeless bounds; NaN without a trace.
    """

    host_gb: float
    disk_gb: float
    cost: float
    device_hits: float
    host_hits: float
    disk_hits: float
    ttft_mean_s: float
    ttft_p99_s: float
    slo_attainment: float
    lru_hits: float
    opt_hits: float

    @property
    def hits(self) -> float:
        """Prompt tokens that were not computed over all."""
        return self.device_hits + self.host_hits + self.disk_hits


def add_capacity_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the capacity plan."""
    parser.add_argument(
        "--capacity-plan", action="store_true", help="a run for each tier size"
    )
    parser.add_argument(
        "--host-sizes", default="0,64,128,256,512", help="GB, for --capacity-plan"
    )
    parser.add_argument(
        "--disk-sizes",
        default="0",
        help="GB, for --capacity-plan; each with each host size but 0",
    )
    parser.add_argument("--host-price", type=float, default=_HOST_PRICE, help="per GB")
    parser.add_argument("--disk-price", type=float, default=_DISK_PRICE, help="per GB")


def run_capacity_plan(
    arguments: argparse.Namespace, spec: SimSpec, calibration: Calibration | None
) -> int:
    """Run all sizes, print the table, and write it and a plot with ``--out``."""
    sizes = [
        (host, disk)
        for host in _numbers("host-sizes", arguments.host_sizes)
        for disk in _numbers("disk-sizes", arguments.disk_sizes)
        if host or not disk
    ]
    prices = (arguments.host_price, arguments.disk_price)
    points = capacity_points(spec, calibration, sizes, prices)
    if arguments.json:
        print(_as_json(points))
    else:
        print(_table(points))
    if arguments.out:
        _write(Path(arguments.out), points)
    return 0


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
    return [
        _point(each, server, workload, prices, bound)
        for each, server, bound in zip(specs, servers, bounds, strict=True)
    ]


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
        lru_hits=bound[0],
        opt_hits=bound[1],
    )


def _as_json(points: list[CapacityPoint]) -> str:
    """Return a list of objects; a bound that is not known is null."""
    rows = [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(point).items()
        }
        for point in points
    ]
    return json.dumps(rows, indent=2)


def _table(points: list[CapacityPoint]) -> str:
    lines = [
        f"{'host GB':>8}{'disk GB':>9}{'cost':>10}{'hits':>8}{'device':>8}"
        f"{'host':>8}{'disk':>8}{'LRU':>8}{'OPT':>8}"
        f"{'TTFT mean':>11}{'p99':>9}{'in SLO':>8}"
    ]
    for point in points:
        shares = (
            point.hits,
            point.device_hits,
            point.host_hits,
            point.disk_hits,
            point.lru_hits,
            point.opt_hits,
        )
        lines.append(
            f"{point.host_gb:8g}{point.disk_gb:9g}{point.cost:10.0f}"
            + "".join(f"{share:8.3f}" for share in shares)
            + f"{point.ttft_mean_s:10.3f}s{point.ttft_p99_s:8.2f}s"
            + f"{point.slo_attainment:8.1%}"
        )
    lines += [
        "",
        "Hits are shares of prompt tokens, simulated on the same load. LRU and OPT are",
        "bounds without time for exclusive tiers; ours are inclusive, and answers",
        "take room in them.",
    ]
    return "\n".join(lines)


def _write(folder: Path, points: list[CapacityPoint]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = _as_json(points) + "\n"
        (folder / "capacity.json").write_text(text, encoding="utf-8")
        (folder / "capacity.txt").write_text(_table(points) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "out", f"{folder} cannot be written ({error.strerror})", "give another"
        ) from None
    _plot(folder / "capacity.png", points)


def _plot(path: Path, points: list[CapacityPoint]) -> None:
    """Draw hits and mean TTFT over the size of both tiers."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "out", "the plot needs matplotlib", "pip install sgl-tiered[bench]"
        ) from None
    ordered = sorted(points, key=lambda point: point.host_gb + point.disk_gb)
    total = [point.host_gb + point.disk_gb for point in ordered]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    hits = figure.subplots()
    hits.plot(total, [point.hits for point in ordered], "o-", label="token hit ratio")
    hits.set_xlabel("host + disk, GB")
    hits.set_ylabel("token hit ratio")
    hits.set_ylim(bottom=0)
    ttft = hits.twinx()
    means = [point.ttft_mean_s for point in ordered]
    ttft.plot(total, means, "s--", color="tab:red", label="mean TTFT")
    ttft.set_ylabel("mean TTFT, s")
    ttft.set_ylim(bottom=0)
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=120)


def _numbers(flag: str, text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not values or min(values) < 0:
        raise ConfigError(f"--{flag}", f"{text!r} is no list of sizes", "such as 0,64")
    return values
