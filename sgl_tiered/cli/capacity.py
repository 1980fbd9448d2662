"""``simulate --capacity-plan``: hits, TTFT and cost for a range of tier sizes.

Each size is one run of the simulated server on the same load. Costs are prices per
decimal GB that the user gives; the defaults are round figures, for comparison only.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sgl_tiered.cli.simulate_workload import make_workload
from sgl_tiered.cost.calibration import Calibration
from sgl_tiered.errors import ConfigError
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
    """One choice of sizes; ``cost`` is in the unit of the prices."""

    host_gb: float
    disk_gb: float
    cost: float
    device_hits: float
    host_hits: float
    disk_hits: float
    ttft_mean_s: float
    ttft_p99_s: float
    slo_attainment: float

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
        print(json.dumps([asdict(point) for point in points]))
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
    workload = make_workload(spec)
    return [
        _point(replace(spec, host_gb=host, disk_gb=disk), calibration, workload, prices)
        for host, disk in sizes
    ]


def _point(
    spec: SimSpec,
    calibration: Calibration | None,
    workload: SimWorkload,
    prices: tuple[float, float],
) -> CapacityPoint:
    result = simulate(spec.server(calibration), workload)
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
    )


def _table(points: list[CapacityPoint]) -> str:
    lines = [
        f"{'host GB':>8}{'disk GB':>9}{'cost':>10}{'hits':>8}{'device':>8}"
        f"{'host':>8}{'disk':>8}{'TTFT mean':>11}{'p99':>9}{'in SLO':>8}"
    ]
    for point in points:
        shares = (point.hits, point.device_hits, point.host_hits, point.disk_hits)
        lines.append(
            f"{point.host_gb:8g}{point.disk_gb:9g}{point.cost:10.0f}"
            + "".join(f"{share:8.3f}" for share in shares)
            + f"{point.ttft_mean_s:10.3f}s{point.ttft_p99_s:8.2f}s"
            + f"{point.slo_attainment:8.1%}"
        )
    lines += ["", "Hits are shares of prompt tokens. Simulated, on the same load."]
    return "\n".join(lines)


def _write(folder: Path, points: list[CapacityPoint]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps([asdict(point) for point in points], indent=2)
        (folder / "capacity.json").write_text(text + "\n", encoding="utf-8")
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
