"""What reading ahead is worth: none, at arrival, or by CaR's rule, under two orders.

The Berkeley report's text analysis at the sizes of its tiers: 128 prefixes of 512
tokens, bodies of 128, answers of 32, room for 8 prefixes (and the requests' own tokens)
on the device, 32 on the host and 128 on disk. The disk is throttled so that reading a
prefix takes a share of computing it. Device: Llama-2-7B on an RTX 3090 by data sheet.

Two loads: clients that always keep 32 requests in the server, and bursts (Poisson
arrivals of 16 requests at a time) at 0.7 of what the server can take. The last rows
have a device with room for 24 prefixes and still at most 8 requests that run: only
there can pages go on to it ahead of admission. Tables in Markdown, then one JSON
object.

    python benchmarks/sim/prefetch.py [--requests 1500] [--shares 0.25,0.5,1,2]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.sim.config import SchedulerConfig, ServerConfig, TierSetup
from sgl_tiered.sim.hardware import LinkSpeed, find_hardware
from sgl_tiered.sim.models import find_model
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.requests import SimWorkload, WorkloadBuilder
from sgl_tiered.sim.server import simulate
from sgl_tiered.sim.summary import summarize
from sgl_tiered.sim.synthetic import shared_prefixes
from sgl_tiered.sim.times import times_of_profile

PAGE = 16
NUM_PREFIXES, PREFIX, BODY, ANSWER = 128, 512, 128, 32
ON_DEVICE, ON_HOST = 8, 32
ON_DISK = 132
"""128 and the 64th part that a disk tier keeps free."""
CLIENTS, BURST = 32, 16
LOAD = 0.7
ORDERS = ("fcfs", "fpf", "cost")
TARGETS = {"none": "host", "arrival": "host", "car": "host", "car to device": "device"}
"""Ways of prefetch, by where they bring pages before a request is admitted."""
SPACE = 3
"""Times the device's room, in the rows where it has room to spare."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    Attributes:
        requests_per_s: of the whole run.
        ttft_s, ttft_p99_s: mean and 99th percentile.
        shares: of the prompts' tokens, by where they came from.
        read_bytes: read from disk.
    """

    requests_per_s: float
    ttft_s: float
    ttft_p99_s: float
    shares: dict[str, float]
    read_bytes: int


def server(
    share: float, prefetch: str, order: str, *, tiers: bool = True, space: int = 1
) -> ServerConfig:
    """Return the server.

    Args:
        share: time of a read over that of computing.
        prefetch: one of ``TARGETS``.
        order: of the queue.
        tiers: whether there are any below the device.
        space: times the device's room.
    """
    hardware, model = find_hardware("RTX-3090"), find_model("Llama-2-7B")
    times = times_of_profile(hardware, model)
    prefix_bytes = PREFIX * model.kv_token_bytes
    compute_s = times.prefill_s([(0, PREFIX)])
    disk = LinkSpeed(prefix_bytes / (share * compute_s), 1e-4, "throttled")
    # A disk that is slow to read, and fast enough to write.
    write = LinkSpeed(4 * disk.bytes_per_s, 1e-4, "throttled")
    own = -(-(BODY + ANSWER + PAGE) // PAGE) * PAGE
    below = (
        TierSetup(TierId.HOST, ON_HOST * prefix_bytes, hardware.host, hardware.host),
        TierSetup(TierId.DISK, ON_DISK * prefix_bytes, disk, write),
    )
    return ServerConfig(
        times=times,
        page_tokens=PAGE,
        num_layers=model.num_layers,
        kv_token_bytes=model.kv_token_bytes,
        device_tokens=space * ON_DEVICE * (PREFIX + own),
        tiers=below if tiers else (),
        prefetch=prefetch.split()[0],
        prefetch_to=TARGETS[prefetch],
        length_predictor="online" if tiers else "none",
        scheduler=SchedulerConfig(
            max_running=ON_DEVICE, ignore_eos=True, order=order, chunk_tokens=2_048
        ),
    )


def batched(num_requests: int, seed: int) -> SimWorkload:
    """Return requests of clients that are never without one."""
    return shared_prefixes(
        num_requests,
        float("inf"),
        NUM_PREFIXES,
        PREFIX,
        BODY,
        ANSWER,
        PAGE,
        np.random.default_rng(seed),
        num_clients=CLIENTS,
        keep_bodies=False,
    )


def streamed(num_requests: int, rate_per_s: float, seed: int) -> SimWorkload:
    """Return bursts of ``BURST`` requests at a mean rate."""
    rng = np.random.default_rng(seed)
    builder = WorkloadBuilder(PAGE)
    now_s = 0.0
    for number in range(num_requests):
        if number % BURST == 0:
            now_s += float(rng.exponential(BURST / rate_per_s))
        prefix = builder.prefix(int(rng.integers(NUM_PREFIXES)), PREFIX // PAGE)
        builder.add(now_s, PREFIX + BODY, ANSWER, prefix=prefix, own_pages=False)
    return builder.build(f"bursts of {BURST} at {rate_per_s:.2f}/s")


def point(result: SimResult) -> Point:
    """Return a run's figures."""
    found = summarize(result)
    return Point(
        found.requests_per_s,
        found.ttft.mean,
        found.ttft.p99,
        found.hit_ratio,
        result.link_bytes.get("disk>host", 0),
    )


def run_all(shares: list[float], num_requests: int, seeds: int) -> dict[str, Any]:
    """Print the tables; return their figures."""
    figures: dict[str, Any] = {}
    for share in shares:
        plain = _mean(
            [
                point(
                    simulate(
                        server(share, "none", "fcfs", tiers=False),
                        batched(num_requests, seed),
                    )
                )
                for seed in range(seeds)
            ]
        )
        print(f"\n### A read takes {share:g} of computing the same\n")
        print(
            "| clients | order | prefetch | requests/s | over plain | over fcfs/none "
            "| TTFT s | device | host | disk | GB read |"
        )
        print("|---" * 11 + "|")
        base: Point | None = None
        for order in ORDERS:
            for prefetch in TARGETS:
                found = _mean(
                    [
                        point(
                            simulate(
                                server(share, prefetch, order),
                                batched(num_requests, seed),
                            )
                        )
                        for seed in range(seeds)
                    ]
                )
                base = base or found
                over_plain = found.requests_per_s / plain.requests_per_s
                over_own = found.requests_per_s / base.requests_per_s
                _row(str(CLIENTS), order, prefetch, found, over_plain, over_own)
                figures[f"{share:g}/{order}/{prefetch}"] = {
                    "over_plain": over_plain,
                    "over_own": over_own,
                    "ttft_s": found.ttft_s,
                }
        assert base is not None
        figures |= _spacious(share, num_requests, seeds)
        rate = LOAD * base.requests_per_s
        first: Point | None = None
        for prefetch in TARGETS:
            found = _mean(
                [
                    point(
                        simulate(
                            server(share, prefetch, "fcfs"),
                            streamed(num_requests, rate, seed),
                        )
                    )
                    for seed in range(seeds)
                ]
            )
            first = first or found
            gain = 1.0 - found.ttft_s / first.ttft_s
            _row(f"{rate:.1f}/s", "fcfs", prefetch, found, 0.0, 0.0)
            figures[f"{share:g}/streamed/{prefetch}"] = {
                "ttft_s": found.ttft_s,
                "ttft_p99_s": found.ttft_p99_s,
                "ttft_gain": gain,
            }
    return figures


def _spacious(share: float, num_requests: int, seeds: int) -> dict[str, Any]:
    """Print the rows of a device with room to spare; return their figures."""
    figures: dict[str, Any] = {}
    base: Point | None = None
    for order in ("fcfs", "cost"):
        for prefetch in TARGETS:
            found = _mean(
                [
                    point(
                        simulate(
                            server(share, prefetch, order, space=SPACE),
                            batched(num_requests, seed),
                        )
                    )
                    for seed in range(seeds)
                ]
            )
            base = base or found
            over_own = found.requests_per_s / base.requests_per_s
            _row(f"{CLIENTS}, room", order, prefetch, found, 0.0, over_own)
            figures[f"{share:g}/room/{order}/{prefetch}"] = {
                "over_own": over_own,
                "ttft_s": found.ttft_s,
            }
    return figures


def _row(
    clients: str,
    order: str,
    prefetch: str,
    found: Point,
    over_plain: float,
    over_own: float,
) -> None:
    plain, own = f"{over_plain:.2f}", f"{over_own:.3f}"
    ratios = f"{plain if over_plain else '-'} | {own if over_own else '-'}"
    tiers = " | ".join(
        f"{found.shares.get(tier, 0.0):.3f}" for tier in ("device", "host", "disk")
    )
    print(
        f"| {clients} | {order} | {prefetch} | {found.requests_per_s:.2f} | {ratios} "
        f"| {found.ttft_s:.2f} | {tiers} | {found.read_bytes / 1e9:.0f} |",
        flush=True,
    )


def _mean(points: list[Point]) -> Point:
    num = len(points)
    return replace(
        points[0],
        requests_per_s=sum(p.requests_per_s for p in points) / num,
        ttft_s=sum(p.ttft_s for p in points) / num,
        ttft_p99_s=sum(p.ttft_p99_s for p in points) / num,
        shares={
            tier: sum(p.shares[tier] for p in points) / num for tier in points[0].shares
        },
        read_bytes=sum(p.read_bytes for p in points) // num,
    )


def main() -> int:
    """Print the tables and the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--shares", default="0.25,0.5,1,2")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    shares = [float(share) for share in args.shares.split(",")]
    print(json.dumps(run_all(shares, args.requests, args.seeds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
