"""What a decision of the cache costs on the scheduler's thread.

200 sequences share their first 1,024 tokens and fill a table of 200,000 pages; prompts
of 4,096 tokens (256 pages of 16) are looked up among them. Tokens are compared in
every lookup. Key derivation is timed apart: it happens once per page, when pages are
demoted. Prints p50 and p99 in microseconds; the last line is one JSON object.

    python benchmarks/micro/lookup.py [--repeats 2000] [--pages 200000]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from _caches import PAGE_TOKENS, landed, make_cache

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.plans import Int32s

NUM_SEQUENCES = 200
SHARED_TOKENS = 1024
PROMPT_TOKENS = 4096
PROMPT_PAGES = PROMPT_TOKENS // PAGE_TOKENS
VOCABULARY = 32_000
NUM_FRESH = 500

T = TypeVar("T")


class Stopwatch:
    """Collects the time of single calls by name."""

    def __init__(self) -> None:
        self._times_ns: dict[str, list[int]] = defaultdict(list)

    def time(self, name: str, call: Callable[[], T]) -> T:
        """Run and time one call; return what it returns."""
        start = time.perf_counter_ns()
        value = call()
        self._times_ns[name].append(time.perf_counter_ns() - start)
        return value

    def results(self) -> dict[str, dict[str, float]]:
        """Return p50 and p99 in microseconds by name."""
        rows = {}
        for name, times_ns in self._times_ns.items():
            p50, p99 = np.percentile(times_ns, [50, 99]) / 1e3
            rows[name] = {"p50_us": round(p50, 2), "p99_us": round(p99, 2)}
        return rows


def fill(cache: TieredCache, digest: bytes, sequences: list[Int32s]) -> dict[str, int]:
    """Put all sequences into both tiers; return traced bytes after each."""
    for tokens in sequences:
        plan = cache.plan_offload(digest, tokens)
        assert plan is not None, "the sequence is there already"
        cache.finish_offload(plan, landed(len(plan.pages)))
    gc.collect()
    traced = {"host": tracemalloc.get_traced_memory()[0]}
    while (demote := cache.plan_demote(4096)) is not None:
        cache.finish_demote(demote, landed(len(demote.pages)))
    gc.collect()
    traced["host_and_disk"] = tracemalloc.get_traced_memory()[0]
    return traced


def time_hits(
    cache: TieredCache, digest: bytes, prompts: list[Int32s], num: int, watch: Stopwatch
) -> None:
    """Time lookups, loads and offloads of prompts that are known."""
    rng = np.random.default_rng(2)
    parting = [
        np.concatenate([p[:3000], rng.integers(VOCABULARY, size=1096)]).astype(np.int32)
        for p in prompts
    ]
    # The first lookup of a prompt cuts its run where the prompt ends: once each.
    for prompt in prompts:
        watch.time("lookup_first", lambda p=prompt: cache.lookup(digest, p, 0))
    for which in rng.integers(len(prompts), size=num).tolist():
        prompt = prompts[which]
        decision = watch.time("lookup", lambda p=prompt: cache.lookup(digest, p, 0))
        assert decision.num_pages == PROMPT_PAGES, decision
        plan = watch.time("commit_load", lambda d=decision: cache.commit_load(d))
        assert plan is not None, "the decision still holds"
        watch.time("finish_load", lambda p=plan: cache.finish_load(p, landed=True))
        watch.time("plan_offload_known", lambda p=prompt: cache.plan_offload(digest, p))
        watch.time("derive_256_keys", lambda p=prompt: page_keys(digest, p, 16))
    for prompt in parting:
        cache.lookup(digest, prompt, 0)
    for which in rng.integers(len(prompts), size=num).tolist():
        prompt = parting[which]
        watch.time("lookup_parting", lambda p=prompt: cache.lookup(digest, p, 0))


def time_new(cache: TieredCache, digest: bytes, watch: Stopwatch) -> None:
    """Time offloads and demotes of new prompts, evicting as in a full server."""
    rng = np.random.default_rng(3)
    for _ in range(NUM_FRESH):
        prompt = rng.integers(VOCABULARY, size=PROMPT_TOKENS, dtype=np.int32)
        plan = watch.time(
            "plan_offload_256_new", lambda p=prompt: cache.plan_offload(digest, p)
        )
        assert plan is not None, "a new prompt finds room"
        result = landed(len(plan.pages))
        watch.time(
            "finish_offload_256",
            lambda p=plan, r=result: cache.finish_offload(p, r),
        )
        demote = watch.time("plan_demote_256", lambda: cache.plan_demote(256))
        assert demote is not None, "new pages are due on disk"
        watch.time(
            "finish_demote_256",
            lambda p=demote, r=result: cache.finish_demote(p, r),
        )


def main() -> None:
    """Build the table, time the operations, print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--pages", type=int, default=200_000)
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    shared = rng.integers(VOCABULARY, size=SHARED_TOKENS, dtype=np.int32)
    own_pages = -(-(args.pages - SHARED_TOKENS // PAGE_TOKENS) // NUM_SEQUENCES)
    own = rng.integers(
        VOCABULARY, size=(NUM_SEQUENCES, own_pages * PAGE_TOKENS), dtype=np.int32
    )
    sequences = [np.concatenate([shared, tokens]) for tokens in own]

    gc.collect()
    tracemalloc.start()
    num_slots = args.pages + 64 * PROMPT_PAGES
    cache = make_cache(num_slots, num_slots)
    digest = cache.open_namespace(Namespace("bench", "bfloat16", PAGE_TOKENS))
    traced = fill(cache, digest, sequences)
    tracemalloc.stop()
    cache.check()
    num_pages = cache.occupancy(TierId.HOST).used_slots
    array_bytes = cache.memory_bytes()
    # As SGLang does after start-up, so that the collector does not walk the index.
    gc.freeze()

    watch = Stopwatch()
    prompts = [tokens[:PROMPT_TOKENS].copy() for tokens in sequences]
    time_hits(cache, digest, prompts, args.repeats, watch)
    time_new(cache, digest, watch)
    cache.check()

    results = watch.results()
    for name, row in results.items():
        print(f"{name:22s} p50 {row['p50_us']:8.1f} us   p99 {row['p99_us']:8.1f} us")
    memory = {
        "pages": num_pages,
        "index_bytes_per_page_host": round(traced["host"] / num_pages, 1),
        "index_bytes_per_page_both": round(traced["host_and_disk"] / num_pages, 1),
        "array_bytes_per_page": round(array_bytes / num_pages, 1),
    }
    for name, value in memory.items():
        print(f"{name:30s} {value}")
    print(json.dumps({**memory, **results}))


if __name__ == "__main__":
    main()
