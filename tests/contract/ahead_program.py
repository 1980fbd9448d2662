"""Runs on-evict offloads over SGLang's real tree and pool; prints what it saw as JSON.

    ahead_program.py

Once with each of SGLang's tree cores, without a server: a pool of 64 pages of 16 tokens
and 4 layers. Prompts of 8 pages are written to the pool and inserted as a finished
request would leave them, then noted.
"""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE = 16
NUM_PAGES = 64
PROMPT_PAGES = 8
PATIENCE_S = 30.0


class Bench:
    """Our tree over a small pool, a host tier, and the threads between."""

    def __init__(self, backend: str, threshold: float) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sgl_tiered.cache.config import CacheConfig, TierConfig
        from sgl_tiered.cache.deferred import DeferredOffloads
        from sgl_tiered.cache.tiered_cache import TieredCache
        from sgl_tiered.core.clock import SystemClock
        from sgl_tiered.core.ids import TierId
        from sgl_tiered.core.keys import Namespace
        from sgl_tiered.cost.links import LinkCost
        from sgl_tiered.cost.model import CostModel
        from sgl_tiered.cost.prefill import PrefillCost
        from sgl_tiered.engines.device.pools import make_device_pool, page_layout
        from sgl_tiered.engines.sglang.cache import TieredRadixCache
        from sgl_tiered.metrics.registry import MetricsRegistry
        from sgl_tiered.pipelines.completions import CompletionQueue, OffloadFinished
        from sgl_tiered.pipelines.offload import OffloadWorker
        from sgl_tiered.policies.eviction.lru import LRUPolicy
        from sgl_tiered.tiers.host import HostTier

        self.kv = MHATokenToKVPool(
            size=NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=8,
            layer_num=4,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.kv,
            need_sort=False,
        )
        layout = page_layout(self.kv, PAGE)
        self.layout = layout
        clock, completions = SystemClock(), CompletionQueue()
        self.metrics = MetricsRegistry()
        self.host = HostTier(layout.slot_bytes, 256, page_bytes=layout.page_bytes)
        self.cache = TieredCache(
            CacheConfig(layout, (TierConfig(TierId.HOST, 256),), "always", "on-evict"),
            cost=CostModel(
                PrefillCost(1000, 4, 16, 1e9), {TierId.HOST: LinkCost(1e-4, 1e9)}
            ),
            eviction={TierId.HOST: LRUPolicy()},
            clock=clock,
        )
        device = make_device_pool(self.kv, layout, None)
        self.worker = OffloadWorker(device, self.host, completions, clock, self.metrics)
        self.num_copies = 0
        self.locked: list[int] = []

        def offload(plan: Any, device_pages: Any) -> bool:
            self.num_copies += 1
            return self.worker.try_submit(plan, device_pages, device.mark())

        def pump() -> None:
            for event in completions.drain():
                assert isinstance(event, OffloadFinished)
                self.cache.finish_offload(event.plan, event.result)
                runtime.on_offload_end(event.plan.plan_id)

        runtime = SimpleNamespace(
            cache=self.cache,
            deferred=DeferredOffloads(LRUPolicy(), PAGE, NUM_PAGES, threshold),
            metrics=self.metrics,
            parts=SimpleNamespace(device=device),
            offload=offload,
            pump=pump,
            drain_offloads=lambda: self.worker.drain(PATIENCE_S),
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        self.tree = TieredRadixCache(params, runtime)
        self.digest = self.cache.open_namespace(Namespace("m", "bfloat16", PAGE))

    def key(self, tokens: Any) -> Any:
        from array import array

        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.astype(np.int64).tobytes()), None)

    def serve(self, seed: int) -> Any:
        """Compute a prompt, leave it in the tree, note it; return its tokens."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        rng = np.random.default_rng(seed)
        tokens = rng.integers(1000, size=PROMPT_PAGES * PAGE).astype(np.int32)
        slots = self.allocator.alloc(len(tokens))
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer[slots] = torch.randn(len(tokens), 2, 8).to(torch.bfloat16)
        self.tree.insert(InsertParams(key=self.key(tokens), value=slots))
        self.tree._ahead.note(self.digest, tokens, 0, None, None)
        return tokens

    def on_device(self, tokens: Any) -> int:
        """Return the pages that the tree has, without touching them."""
        found = self.tree.tree_core.match_full_device_prefix(self.key(tokens))
        return int(found[0]) // PAGE

    def advance(self) -> None:
        """One scheduling pass, and the end of what it started."""
        self.tree._ahead.advance()
        self.locked.append(self.tree.protected_size() // PAGE)
        self.tree.finish_offloads()

    def in_host(self, tokens: Any) -> int:
        return int(self.cache.lookup(self.digest, tokens, 0).num_found)

    def bytes_agree(self, tokens: Any) -> bool:
        """Whether the host's pages hold what the pool has at the prompt's slots."""
        core = self.tree.tree_core
        _, node, _ = core.match_full_device_prefix(self.key(tokens))
        root = self.tree.root_node_handle(None)
        slots = core.collect_full_device_indices(node, root)
        plan = self.cache.commit_load(self.cache.lookup(self.digest, tokens, 0))
        agree = True
        for number, address in enumerate(plan.addresses.tolist()):
            page = self.host.region[address]
            rows = slots[number * PAGE : (number + 1) * PAGE]
            for layer in range(4):
                wanted = self.kv.k_buffer[layer][rows].view(torch.uint8).numpy()
                at = self.layout.key_offset(layer)
                part = page[at : at + self.layout.part_bytes]
                agree &= bool((part == wanted.reshape(-1)).all())
        self.cache.finish_load(plan, landed=False)
        return agree

    def evict(self, num_pages: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=num_pages * PAGE))

    def late_pages(self) -> int:
        counters = self.metrics.snapshot()["counters"]
        return int(counters.get("offload_late_pages", 0))


def story(backend: str) -> dict[str, Any]:
    """Fill the pool, copy, evict; say what happened."""
    from sgl_tiered.core.ids import TierId

    bench = Bench(backend, threshold=0.75)
    out: dict[str, Any] = {"core": type(bench.tree.tree_core).__name__}
    # 48 of 64 pages in use: at the threshold, so nothing is copied.
    prompts = [bench.serve(seed) for seed in range(6)]
    bench.advance()
    out["copies_at_threshold"] = bench.num_copies
    # 56 in use: 8 pages are to be saved, those of the coldest prompt.
    prompts.append(bench.serve(6))
    bench.advance()
    bench.advance()
    out["copies_above"] = bench.num_copies
    out["locked_while_copied"] = max(bench.locked)
    out["locked_after"] = bench.tree.protected_size()
    out["in_host"] = [bench.in_host(p) for p in prompts]
    out["bytes_agree"] = bench.bytes_agree(prompts[0])
    # The copy did not make the coldest prompt hot: the tree drops it first.
    bench.evict(PROMPT_PAGES)
    out["on_device"] = [bench.on_device(p) for p in prompts]
    bench.advance()
    out["late_after_saved"] = bench.late_pages()
    # Two more go before their turn came: 16 pages are late.
    bench.evict(2 * PROMPT_PAGES)
    bench.advance()
    out["late_after_burst"] = bench.late_pages()
    # A host tier that is dropped is filled again from what the device still has.
    for seed in (7, 8, 9):
        bench.serve(seed)
    bench.advance()
    bench.advance()
    copies = bench.num_copies
    bench.cache.drop_tier(TierId.HOST)
    bench.tree._ahead.dropped()
    bench.advance()
    bench.advance()
    out["copies_after_drop"] = bench.num_copies - copies
    out["available"] = bench.allocator.available_size()
    out["evictable"] = bench.tree.evictable_size()
    bench.cache.check()
    bench.worker.close(PATIENCE_S)
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({backend: story(backend) for backend in ("rust", "python")}))
