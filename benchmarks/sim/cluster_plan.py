"""What a fleet asks of a router: events and pages per instance, simulated to 1,000.

Colocated instances (Llama-2-13B on two H800 each) with a cache, chat as ShareGPT's in
``memserve.py``, prompt-tree routing, at a share of what they can take. Counted: pages
that become historical, each an event of one block, per second and instance, and what
one copy of an instance's pool is in a router's index.

    python benchmarks/sim/cluster_plan.py [--instances 10 100 1000] [--requests 2]
        [--bytes-per-page 232]

``--requests`` is per instance; ``--bytes-per-page`` is what
``benchmarks/micro/routing.py`` measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from cluster_model import COLOCATED, simulate_cluster
from memserve import WORKLOADS, capacity, config, device, draw_sessions

from sgl_tiered.policies.routing.registry import make_routing

LOAD = 0.6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=2, help="per instance")
    parser.add_argument("--bytes-per-page", type=float, default=232.0)
    args = parser.parse_args()
    times, workload = device(2e-3), WORKLOADS["ShareGPT"]
    most, found = capacity(workload, times), []
    print(
        "| instances | requests/s | stored pages/s, each | all | P99 TTFT ms | cached |"
    )
    print("|---|---|---|---|---|---|")
    for num in args.instances:
        rate = LOAD * most * num
        rng = np.random.default_rng(3)
        requests = draw_sessions(workload, num * args.requests, rng, rate)
        made = config((COLOCATED,) * num, 1, times)
        began_s = time.perf_counter()
        result = simulate_cluster(made, requests, make_routing("prompt-tree"))
        # Over the time in which requests came, not the tail of the last answers.
        span_s = max(each.arrival_s for each in requests)
        pages = result.stored_pages / span_s
        tokens = sum(len(each.prompt) for each in requests)
        row = {
            "instances": num,
            "requests_per_s": round(len(requests) / span_s, 1),
            "stored_pages_per_s_each": round(pages / num, 1),
            "stored_pages_per_s": round(pages),
            "ttft_p99_ms": round(float(np.percentile(result.ttft_s, 99)) * 1e3, 1),
            "cached": round(float(result.cached_tokens.sum()) / tokens, 3),
            "index_bytes_per_instance": round(made.pool_pages * args.bytes_per_page),
            "wall_s": round(time.perf_counter() - began_s, 1),
        }
        found.append(row)
        print(
            f"| {num} | {row['requests_per_s']} | {row['stored_pages_per_s_each']} "
            f"| {row['stored_pages_per_s']} | {row['ttft_p99_ms']} | {row['cached']} |",
            flush=True,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
