"""What our Python adds on SGLang's scheduler thread for a prompt that nobody reuses.

SGLang's tree and KV pool stand here with our cache and our runtime on top, without a
model and without a server. Requests of 2,000 new tokens go the way of a real one: they
arrive, are looked at by a pass, are published in the tree and offloaded, decode, end.
Each of our calls is timed in wall time, and SGLang's own match beside it. Prints the
median of each in microseconds; the last line is one JSON object with ``request_us`` and
``loop_us``, the sums per request and per turn of the scheduler's loop. Needs SGLang.

    python benchmarks/micro/request_path.py [--repeats 100] [--disk FOLDER]
        [--write-policy auto]

Under write policy ``auto`` copies have stopped when the times are taken.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE_TOKENS = 16
POOL_TOKENS = 16_384
PROMPT_TOKENS = 2_000
NUM_LOOPS = 8
WARM_UP = 20
"""The host tier is full by then, so that each request evicts another one's pages."""


class Stopwatch:
    """Collects times by name, once warm."""

    def __init__(self) -> None:
        self.is_warm = False
        self._times_us: dict[str, list[float]] = defaultdict(list)

    def time(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Time one call."""
        start = time.perf_counter_ns()
        value = call(*args)
        if self.is_warm:
            self._times_us[name].append((time.perf_counter_ns() - start) / 1e3)
        return value

    def medians(self) -> dict[str, float]:
        """Return the median by name, in microseconds."""
        return {name: float(np.median(t)) for name, t in self._times_us.items()}


class Way:
    """A tree, a pool and tiers; requests go through one after the other."""

    def __init__(self, watch: Stopwatch, disk: Path | None, write_policy: str) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sgl_tiered.engines.sglang.cache import TieredRadixCache
        from sgl_tiered.engines.sglang.factory import _build_runtime
        from sgl_tiered.serving.option_reader import read_options

        self.watch = watch
        pool = MHATokenToKVPool(
            size=POOL_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=16,
            layer_num=8,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            POOL_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=pool,
            need_sort=False,
        )
        args = {"served_model_name": "m", "model_path": "m", "chunked_prefill_size": -1}
        context = SimpleNamespace(
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(
                    architectures=["LlamaForCausalLM"], to_dict=dict
                ),
                dtype=torch.bfloat16,
                num_attention_heads=4,
                head_dim=16,
                vocab_size=32_000,
                context_len=8_192,
            ),
            server_args=SimpleNamespace(
                resolved_dict=lambda: {**args, "attention_backend": "tiered_cpu"}
            ),
            params=SimpleNamespace(
                token_to_kv_pool_allocator=self.allocator, page_size=PAGE_TOKENS
            ),
            tp_group=None,
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(model=torch.nn.Linear(8, 8))
            ),
        )
        settings: dict[str, Any] = {"config": None, "host_size": "20MB"}
        settings["write_policy"] = write_policy
        if disk is not None:
            settings |= {"disk_path": str(disk), "disk_size": "400MB"}
        self.runtime = _build_runtime(context, read_options(settings))
        self.rows = SimpleNamespace(
            req_to_token=torch.zeros((8, POOL_TOKENS), dtype=torch.int32)
        )
        self.tree = TieredRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE_TOKENS,
                tree_components=(ComponentType.FULL,),
            ),
            self.runtime,
        )
        self.scheduler = SimpleNamespace(tree_cache=self.tree, waiting_queue=[])
        self.rng = np.random.default_rng(1)

    def serve(self, rid: str) -> None:
        """Let one request of new tokens come and go."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from sgl_tiered.engines.sglang import reporting

        tokens = self.rng.integers(32_000, size=PROMPT_TOKENS).astype(np.int64)
        ids = array("q", tokens.tobytes())
        req = _request(rid, ids)
        params = MatchPrefixParams(key=RadixKey(ids, None), req=req)
        tree, runtime, scheduler = self.tree, self.runtime, self.scheduler
        timed = self.watch.time

        timed("(SGLang's match)", UnifiedRadixCache.match_prefix, tree, params)
        timed("arrival: match", tree.match_prefix, params)
        timed("arrival: read ahead", tree.prefetch_from_storage, req)
        scheduler.waiting_queue = [req]
        timed("arrival: ledger", reporting._note_queued, None, scheduler, req)

        timed("pass: events", tree.check_hicache_events)
        timed("pass: progress", tree.check_prefetch_progress, req)
        timed("pass: from disk", tree.pop_prefetch_loaded_span, req)
        timed("pass: match", tree.match_prefix, params)
        state = runtime.coordinator.state(rid)
        timed("pass: why no hit", runtime.explainer.admitted, req, state, 0)
        scheduler.waiting_queue = []
        timed("pass: loads", tree.ready_to_load_host_cache)

        self._compute(req, ids)
        timed("publish: count", tree._count, req, state)
        num_tokens = req.kv.cache_protected_len
        timed("publish: offload", tree._offload, req, state, num_tokens)
        ended = (None, SimpleNamespace(batch_is_full=False))
        for _ in range(NUM_LOOPS):
            timed("loop: events", tree.check_hicache_events)
            timed("loop: ledger", reporting._note_pass, ended, scheduler)
            timed("loop: repair", tree.repair_loads, None, None)
        req.finished = lambda: True
        report = timed("end: report", runtime.take_report, rid)
        timed("end: explain", runtime.explainer.finished, req, report)
        timed("end: forget", tree._forget, rid)
        runtime.drain_offloads()
        timed("end: copy landed", tree.take_ends)

    def _compute(self, req: Any, ids: array[int]) -> None:
        """Put the prompt's pages into the tree, as a prefill would."""
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.radix_cache import RadixKey

        num_tokens = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS
        slots = self.allocator.alloc(num_tokens)
        if slots is None:
            self.tree.evict(EvictParams(num_tokens=num_tokens))
            slots = self.allocator.alloc(num_tokens)
        key = RadixKey(ids, None)
        self.tree.insert(InsertParams(key=key, value=slots))
        self.rows.req_to_token[1, :num_tokens] = slots.to(torch.int32)
        found = self.tree.match_prefix(MatchPrefixParams(key=key, req=None))
        req.last_node = found.last_device_node
        req.kv.cache_protected_len = num_tokens


def _request(rid: str, ids: array[int]) -> SimpleNamespace:
    """Return as much of SGLang's request as our calls read."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=ids,
        full_untruncated_fill_ids=ids,
        output_ids=[],
        session=None,
        extra_key=None,
        cache_salt=None,
        lora_id=None,
        last_node=None,
        positional_embed_overrides=None,
        finished=lambda: False,
        finished_reason=None,
        time_stats=SimpleNamespace(prefill_finished_time=0.0),
        sampling_params=SimpleNamespace(custom_params=None, max_new_tokens=32),
        cached_tokens=0,
        cached_tokens_device=0,
        cached_tokens_host=0,
        cached_tokens_storage=0,
        kv=SimpleNamespace(req_pool_idx=1, cache_protected_len=0),
        # All but the last token, which is computed.
        _compute_max_prefix_len=lambda num_tokens: num_tokens - 1,
    )


def main() -> None:
    """Time all calls."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--disk", type=Path, help="an empty folder; without: no disk")
    parser.add_argument("--write-policy", default="write-through")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    watch = Stopwatch()
    way = Way(watch, args.disk, args.write_policy)
    for number in range(WARM_UP + args.repeats):
        watch.is_warm = number >= WARM_UP
        way.serve(f"r{number}")
    way.runtime.close(way.runtime.pump)
    medians = watch.medians()
    for name, median_us in medians.items():
        print(f"{name:24s} {median_us:8.1f} us")
    loop_us = sum(us for name, us in medians.items() if name.startswith("loop"))
    # SGLang's own match is part of ours, twice.
    theirs_us = 2 * medians.pop("(SGLang's match)")
    ours = (us for name, us in medians.items() if not name.startswith("loop"))
    totals = {"request_us": sum(ours) - theirs_us, "loop_us": loop_us}
    print(json.dumps({**totals, "medians_us": medians}))


if __name__ == "__main__":
    main()
