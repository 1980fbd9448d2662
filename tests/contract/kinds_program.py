"""Runs pages of KV and of activations through SGLang's real tree; prints JSON.

    kinds_program.py

Once with each of SGLang's tree cores, without a server or a model: a pool of 32 pages
of 4 tokens and 3 layers, whose binding says what each page is kept as. What places and
copies layers stands in; the tree, the allocator, the cache, the coordinator and the
driver are those of a server. The last line is one JSON object.
"""

from __future__ import annotations

import json
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE, LAYERS, NUM_PAGES = 4, 3, 32
ACT_BYTES = 60


class Manager:
    """Stands in for the layer manager: notes what it is asked."""

    def __init__(self) -> None:
        self.clock = None
        self.asked: list[Any] = []
        self.has_room = True
        self.binding = SimpleNamespace(
            kinds=True,
            is_act=np.zeros(NUM_PAGES + 1, np.bool_),
            row=np.arange(NUM_PAGES + 1),
            act=np.full((LAYERS, NUM_PAGES + 1), -1, np.int32),
            on_host=np.ones((LAYERS, NUM_PAGES + 1), np.bool_),
            device=np.full((LAYERS, NUM_PAGES + 1), -1, np.int32),
        )

    def where(self, layer: int, pages: Any) -> Any:
        return self.binding.device[layer][pages]

    def pin(self, pages: Any) -> None:
        del pages

    unpin = pin

    def held(self, rid: str) -> None:
        del rid

    def open_load(self, pages: Any, retained: Any, is_act: Any) -> bool:
        del retained
        self.asked.append(None if is_act is None else is_act.tolist())
        if self.has_room:
            self.binding.is_act[pages] = False if is_act is None else is_act
        return self.has_room


class Offloader:
    """Takes every copy, and notes what the driver has noted for it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.plans: list[Any] = []
        self.noted: list[list[bool]] = []

    def try_submit(self, plan: Any, device_pages: Any, after: object) -> bool:
        del after
        self.plans.append(plan)
        self.noted.append(self._driver.act_transfers.is_act[device_pages].tolist())
        return True


class Bench:
    """Our tree over a small pool, a host tier, and what stands in for the rest."""

    def __init__(self, backend: str, write_policy: str = "write-through") -> None:
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
        from sgl_tiered.core.layout import PageLayout
        from sgl_tiered.cost.links import LinkCost
        from sgl_tiered.cost.model import CostModel
        from sgl_tiered.cost.prefill import PrefillCost
        from sgl_tiered.engines.sglang.layered.cache import (
            LayeredRadixCache,
            LayeredRuntime,
        )
        from sgl_tiered.engines.sglang.layered.driver import LayerDriver
        from sgl_tiered.policies.eviction.lru import LRUPolicy
        from sgl_tiered.serving.coordinator import LoadCoordinator
        from sgl_tiered.serving.namespaces import NamedSpaces
        from sgl_tiered.serving.options import Options, Writes
        from sgl_tiered.tiers.breaker import CircuitBreaker
        from sgl_tiered.tiers.host import HostTier

        pool = MHATokenToKVPool(
            size=NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        allocator = PagedTokenToKVPoolAllocator(
            NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=pool,
            need_sort=False,
        )
        layout = PageLayout(LAYERS, PAGE, 16)
        clock = SystemClock()
        self.cache = TieredCache(
            CacheConfig(
                layout,
                (TierConfig(TierId.HOST, 64),),
                "always",
                write_policy,
                act_page_bytes=ACT_BYTES,
            ),
            cost=CostModel(
                PrefillCost(1000, LAYERS, 8, 1e9), {TierId.HOST: LinkCost(1e-4, 1e9)}
            ),
            eviction={TierId.HOST: LRUPolicy()},
            clock=clock,
        )
        self.manager = Manager()
        self.manager.clock = clock  # type: ignore[assignment]
        plan = SimpleNamespace(
            layout=layout, num_pages=NUM_PAGES, num_kv_rows=NUM_PAGES + 1, acts=None
        )
        driver = LayerDriver(self.manager, plan)  # type: ignore[arg-type]
        self.offloader = Offloader(driver)
        host = HostTier(layout.slot_bytes, 64, page_bytes=layout.page_bytes)
        config = Options(writes=Writes(write_policy))

        class Runtime(LayeredRuntime):
            def __init__(runtime) -> None:  # noqa: N805
                runtime.cache, runtime.layers = self.cache, driver
                runtime.parts = SimpleNamespace(  # type: ignore[assignment]
                    config=config,
                    namespace=Namespace("m", "bfloat16", PAGE),
                    offloader=self.offloader,
                    device=SimpleNamespace(mark=lambda: None),
                    deferred=None,
                    lookahead=None,
                )
                if write_policy == "on-evict":
                    deferred = DeferredOffloads(LRUPolicy(), PAGE, NUM_PAGES, 0.1)
                    runtime.parts.deferred = deferred
                runtime.coordinator = LoadCoordinator(
                    self.cache, {TierId.HOST: host}, None, clock
                )
                runtime._offloads = CircuitBreaker(clock)
                runtime._storing = set()
                runtime.transfers = SimpleNamespace(  # type: ignore[assignment]
                    takes_offload=True, submitted_offload=lambda: None
                )
                runtime.explainer = SimpleNamespace(  # type: ignore[assignment]
                    offloading=lambda rid, plan: None
                )
                runtime.weights = SimpleNamespace(settled=True)
                runtime.adapters = SimpleNamespace(parted=lambda key: (key, ""))
                runtime.namespaces = NamedSpaces(self.cache.has_pages)

        self.runtime = Runtime()
        rows = SimpleNamespace(
            req_to_token=torch.zeros((4, NUM_PAGES * PAGE), dtype=torch.int32)
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        self.allocator, self.rows = allocator, rows.req_to_token
        self.tree = LayeredRadixCache(params, self.runtime)

    def key(self, tokens: Any) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.astype(np.int64).tobytes()), None)

    def served(self, tokens: Any, kinds: str) -> tuple[Any, Any]:
        """Leave a computed prompt in the tree; return its request and its pages."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        slots = self.allocator.alloc(len(tokens))
        pages = slots[::PAGE].numpy() // PAGE
        self.manager.binding.is_act[pages] = [kind == "a" for kind in kinds]
        self.rows[1, : len(tokens)] = slots.to(torch.int32)
        found = self.tree.insert(InsertParams(key=self.key(tokens), value=slots))
        req = SimpleNamespace(
            rid="r",
            kv=SimpleNamespace(req_pool_idx=1),
            finished=lambda: True,
            full_untruncated_fill_ids=array("q", tokens.astype(np.int64).tobytes()),
            extra_key=None,
            cache_salt=None,
            last_node=found.last_device_node,
            retracted_stain=False,
        )
        return req, pages

    def land(self) -> None:
        """End all offloads."""
        from sgl_tiered.core.plans import TransferResult

        for plan in self.offloader.plans:
            ok = np.ones(len(plan.pages), np.bool_)
            self.cache.finish_offload(plan, TransferResult(ok, 0, 1e-3))
            self.runtime.layers.end_store(plan.plan_id)
            self.tree._unlock_offload(plan.plan_id)
        self.offloader.plans.clear()

    def load(self, tokens: Any, first_page: int) -> tuple[int, list[int] | None]:
        """Admit a request whose pages the host has; return tokens and bytes loaded."""
        coordinator = self.runtime.coordinator
        digest = self.runtime.namespace(None, None)
        num_pages = len(tokens) // PAGE
        state = coordinator.track("l", digest, tokens, num_pages)
        hit = coordinator.loadable_pages(state, first_page) * PAGE
        req = SimpleNamespace(rid="l", last_node=None, retracted_stain=False)
        params = SimpleNamespace(req=req, host_hit_length=hit)
        loaded = self.tree.init_load_back(params)[0]
        job = self.tree._queued[-1][1] if loaded else None
        return loaded, None if job is None else job.page_bytes.tolist()


def story(backend: str) -> dict[str, Any]:
    """Offload a mixed prompt, and load it again in part."""
    bench = Bench(backend)
    out: dict[str, Any] = {"core": type(bench.tree.tree_core).__name__}
    tokens = np.arange(6 * PAGE, dtype=np.int32)
    req, pages = bench.served(tokens, "kaakak")
    # Of the third page the act area and the host lack a layer, and so does the device.
    bench.manager.binding.on_host[1, pages[2]] = False
    bench.tree._offload(req, None, len(tokens))
    (plan,) = bench.offloader.plans
    out["positions"] = plan.positions.tolist()
    out["kinds"] = plan.representations.tolist()
    out["noted"] = bench.offloader.noted
    bench.land()
    bench.manager.binding.on_host[1, pages[2]] = True
    bench.tree._offload(req, None, len(tokens))
    (plan,) = bench.offloader.plans
    out["later"] = [plan.positions.tolist(), plan.representations.tolist()]
    bench.land()
    bench.tree._offload(req, None, len(tokens))
    out["again"] = len(bench.offloader.plans)
    out["left"] = [bench.tree._kinds, bench.tree._leave]

    out["load"] = bench.load(tokens, 1)
    out["asked"] = bench.manager.asked[-1]
    loading = bench.runtime.layers.act_transfers.is_act
    first = bench.tree._private["l"][::PAGE].numpy() // PAGE
    out["loading"] = loading[first].tolist()

    bench = Bench(backend)
    req, _ = bench.served(tokens, "kaakak")
    bench.tree._offload(req, None, len(tokens))
    bench.land()
    bench.manager.has_room = False
    free = bench.allocator.available_size()
    out["without_room"] = bench.load(tokens, 0)
    out["given_back"] = bench.allocator.available_size() == free

    bench = Bench(backend, "on-evict")
    req, _ = bench.served(tokens, "kaakak")
    bench.tree._offload(req, None, len(tokens))
    out["before_eviction"] = len(bench.offloader.plans)
    bench.served(np.arange(1000, 1000 + 24 * PAGE, dtype=np.int32), "k" * 24)
    bench.tree._ahead.advance()
    (plan,) = bench.offloader.plans
    out["on_evict"] = plan.representations.tolist()
    out["on_evict_noted"] = bench.offloader.noted
    bench.cache.check()
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({backend: story(backend) for backend in ("rust", "python")}))
