"""What a look over the queue costs on the scheduler's thread.

512 requests wait with prompts of 2,048 tokens (128 pages of 16), whose first 1,024 are
on disk only; the prefetcher looks at the first 16. Timed: a look with nothing due, one
with reads under way, one that starts sixteen reads, and what a request asks whose turn
has come. Prints p50 and p99 in microseconds; the last line is one JSON object.

    python benchmarks/micro/prefetch.py [--repeats 300]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from _caches import PAGE_TOKENS, landed, make_cache

from sgl_tiered.cache.prefetcher import Prefetcher
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import PromotePlan, TransferResult
from sgl_tiered.policies.prefetch.base import Decoding, QueueFacts
from sgl_tiered.policies.prefetch.car import CarPrefetch

NUM_WAITING, WINDOW = 512, 16
PROMPT_TOKENS, KNOWN_TOKENS = 2_048, 1_024
NUM_DECODING = 64


class Sudden(CarPrefetch):
    """CaR's rule between passes; while one is put together everything is due."""

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        """Return 0 for each where a pass is under way."""
        starts_s = super().starts_s(facts)
        return (0.0,) * len(starts_s) if facts.busy_s else starts_s


class Read:
    """A read that ends when it is told to."""

    def __init__(self, plan: PromotePlan) -> None:
        self.plan = plan
        self.num_left = plan.num_pages

    def hurry(self) -> None:
        """Nothing to do."""

    def cancel(self) -> None:
        """Nothing to do."""


class Reader:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def submit(self, plan: PromotePlan) -> Read:
        """Take everything."""
        self.reads.append(Read(plan))
        return self.reads[-1]


def main() -> None:
    """Build the queue, time the looks, print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=300)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    num_pages = NUM_WAITING * PROMPT_TOKENS // PAGE_TOKENS
    cache = make_cache(num_pages, num_pages)
    digest = cache.open_namespace(Namespace("bench", "bfloat16", PAGE_TOKENS))
    states = []
    for _ in range(NUM_WAITING):
        tokens = rng.integers(32_000, size=PROMPT_TOKENS, dtype=np.int32)
        plan = cache.plan_offload(digest, tokens[:KNOWN_TOKENS])
        assert plan is not None, "a new prompt finds room"
        cache.finish_offload(plan, landed(len(plan.pages)))
        max_pages = (PROMPT_TOKENS - 1) // PAGE_TOKENS
        states.append(WaitingLoad(digest, tokens, max_pages))
    while (demote := cache.plan_demote(4096)) is not None:
        cache.finish_demote(demote, landed(len(demote.pages)))
    cache.drop_tier(TierId.HOST)
    reader = Reader()
    prefetcher = Prefetcher(cache, Sudden(), reader, SystemClock(), WINDOW)
    waiting = [(state, 0) for state in states[:WINDOW]]
    later = [Decoding(100_000, 0.0)] * NUM_DECODING
    times_ns: dict[str, list[int]] = defaultdict(list)

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter_ns()
        call()
        times_ns[name].append(time.perf_counter_ns() - start)

    def look(busy_s: float) -> None:
        prefetcher.advance(
            waiting,
            others=states[WINDOW:] if prefetcher.is_busy else (),
            busy_s=busy_s,
            is_blocked=True,
            tpot_s=0.02,
            decoding=later,
        )

    for _ in range(args.repeats):
        timed("look_nothing_due", lambda: look(0.0))
        assert not reader.reads, "nothing was due"
        timed("look_starts_16_reads", lambda: look(1.0))
        assert len(reader.reads) == WINDOW, f"{len(reader.reads)} reads"
        timed("look_while_reading", lambda: look(0.0))
        timed("hold", lambda: prefetcher.hold_s(states[3], 0, 0.0))
        for read in reader.reads:
            nothing = TransferResult(np.zeros(0, np.bool_), 0, 0.0)
            prefetcher.finished(read.plan, np.zeros(0, np.int32), nothing)
        reader.reads.clear()
    rows = {}
    for name, found in times_ns.items():
        p50, p99 = np.percentile(found, [50, 99]) / 1e3
        rows[name] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
        print(f"{name:22s} p50 {p50:8.1f} us   p99 {p99:8.1f} us")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
