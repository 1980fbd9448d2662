"""What explaining costs on the scheduler's thread, and in memory.

The ledger with 512 requests that wait: a pass that ends its search, a request that is
passed over for a reason of its own, one that is admitted after many passes, and its
whole way. The cache: keys and tombstones of evicted pages, and the misses of a new
prompt. Prints p50 and p99 in microseconds; the last line is one JSON object.

    python benchmarks/micro/explain.py [--repeats 2000]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from _caches import PAGE_TOKENS, landed, make_cache

from sgl_tiered.cache.tombstones import cells_for
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.keys import Namespace
from sgl_tiered.metrics.ledger import RequestLedger, WaitReason

NUM_WAITING = 512
NUM_PASSES = 200
HOST_PAGES = 8_192
PROMPT_PAGES = 256
VOCABULARY = 32_000


class Stopwatch:
    """Collects times by name, per unit of work."""

    def __init__(self) -> None:
        self._times_us: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], Any], num: int = 1) -> Any:
        """Time one call, which does ``num`` units of work."""
        start = time.perf_counter_ns()
        value = call()
        elapsed_us = (time.perf_counter_ns() - start) / 1e3
        self._times_us[name].append(elapsed_us / num)
        return value

    def results(self) -> dict[str, dict[str, float]]:
        """Return p50 and p99 in microseconds by name."""
        rows = {}
        for name, times_us in self._times_us.items():
            p50, p99 = np.percentile(times_us, [50, 99])
            rows[name] = {"p50_us": round(p50, 3), "p99_us": round(p99, 3)}
        return rows


def time_ledger(watch: Stopwatch, repeats: int) -> None:
    """Time notes while 512 requests wait."""
    ledger = RequestLedger(1000, SystemClock())
    for number in range(NUM_WAITING):
        ledger.queued(f"w{number}", 1000, service_s=0.1)
    reasons = (WaitReason.BUDGET, WaitReason.PASS)
    for number in range(repeats):
        for name in ("pass_ended_other", "pass_ended_same"):
            reason = reasons[number % 2]
            watch.time(name, lambda r=reason: ledger.pass_ended(r))
    for _ in range(repeats):
        watch.time("waits", lambda: ledger.waits("w7", WaitReason.LOAD))
        ledger.pass_ended(WaitReason.BUDGET)
    for number in range(repeats):
        rid = f"r{number}"
        watch.time("queued", lambda r=rid: ledger.queued(r, 1000, service_s=0.1))
        watch.time("admitted", lambda r=rid: ledger.admitted(r))
        watch.time("first_token", lambda r=rid: ledger.first_token(r))
        watch.time("finished", lambda r=rid: ledger.finished(r, {"tokens": {}}))
        watch.time("get", lambda r=rid: ledger.get(r))
    for number in range(min(repeats, 100)):
        rid = f"late{number}"
        ledger.queued(rid, 1000)
        for step in range(NUM_PASSES):
            ledger.pass_ended(reasons[step % 2])
        # Per pass that it waited through, all of them with another reason.
        watch.time("admitted_per_pass", lambda r=rid: ledger.admitted(r), NUM_PASSES)


def time_cache(watch: Stopwatch, repeats: int, tombstones: int) -> None:
    """Time prompts that evict others, and why a new one is no hit."""
    suffix = "_remembered" if tombstones else "_forgotten"
    cache = make_cache(HOST_PAGES, 4 * HOST_PAGES, tombstones=tombstones)
    digest = cache.open_namespace(Namespace("bench", "bfloat16", PAGE_TOKENS))
    rng = np.random.default_rng(1)
    size = PROMPT_PAGES * PAGE_TOKENS
    old = []
    for number in range(HOST_PAGES // PROMPT_PAGES + repeats // 10):
        prompt = rng.integers(VOCABULARY, size=size, dtype=np.int32)
        old.append(prompt)
        is_full = number >= HOST_PAGES // PROMPT_PAGES
        name = f"plan_offload_256{suffix}" if is_full else "_filling"
        plan = watch.time(name, lambda p=prompt: cache.plan_offload(digest, p))
        cache.finish_offload(plan, landed(len(plan.pages)))
        # The slower tier takes only half, so that some pages have left both.
        while number % 2 and (demote := cache.plan_demote(PROMPT_PAGES)) is not None:
            cache.finish_demote(demote, landed(len(demote.pages)))
    if not tombstones:
        return
    for prompt in (old * repeats)[:repeats]:
        args = (digest, prompt, 0, PROMPT_PAGES)
        watch.time("explain_256_pages", lambda a=args: cache.misses.explain(*a))


def record_bytes() -> float:
    """Return the memory of a kept request with one miss, two edges and a decision."""
    ledger = RequestLedger(1000, SystemClock())
    gc.collect()
    tracemalloc.start()
    for number in range(1000):
        rid = f"{number:032x}"
        ledger.queued(rid, 1000, service_s=0.1)
        ledger.admitted(rid)
        ledger.first_token(rid)
        text = f"evicted from host by lru {number} s ago"
        spans = [{"first_page": n, "pages": 1, "action": "load"} for n in range(2)]
        details = {
            "missing": [{"first_token": number, "tokens": 1, "text": text}],
            "tokens": {"host": 1000 + number, "computed": 2000 + number},
            "edges": {w: {"bytes": 10**6 + number, "s": 0.1} for w in ("a->b", "b->a")},
            "decision": {
                "reason": "loading is cheaper",
                "spans": spans,
                "predicted": dict.fromkeys("abcde", number / 7),
                "replans": [],
                "actual": dict.fromkeys("abcdefg", number / 9),
            },
        }
        ledger.finished(rid, details)
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return traced / 1000


def main() -> None:
    """Time, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2000)
    args = parser.parse_args()
    watch = Stopwatch()
    time_ledger(watch, args.repeats)
    for tombstones in (0, cells_for(5 * HOST_PAGES)):
        time_cache(watch, args.repeats, tombstones)
    results = {n: row for n, row in watch.results().items() if n[0] != "_"}
    for name, row in results.items():
        print(f"{name:32s} p50 {row['p50_us']:9.2f} us   p99 {row['p99_us']:9.2f} us")
    bytes_each = round(record_bytes())
    print(f"{'bytes per kept request':32s} {bytes_each}")
    print(json.dumps({"bytes_per_request": bytes_each, **results}))


if __name__ == "__main__":
    main()
