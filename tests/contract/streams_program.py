"""Runs passes with loads over SGLang's real tree on a played CUDA device; prints JSON.

    streams_program.py

Once with each of SGLang's tree cores: a pool of 64 pages of 16 tokens and 3 layers. The
device (``cuda_stand_ins.py``) runs nothing until it is let, so that a thread which
waits for it stands still; and tensors of slots note when they are read on the host. The
passes are launched and ended as by SGLang's overlap schedule: a batch's results are
taken once the next one is launched. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda_stand_ins import PlayedCuda
from host_waits import HostWaits, on_device

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.draining import drain

PAGE, LAYERS, NUM_PAGES, PROMPT_PAGES = 16, 3, 64, 6
PATIENCE_S = 30.0
WAITS = HostWaits()
_HELD_S = 10.0
"""After so long a thread that waits for the device is let go, and the story says so."""


class Bench:
    """Our tree and runtime over a pool on a device that stands still.

    Attributes:
        held: the device was let go because somebody waited for it.
    """

    def __init__(self, backend: str, seed: int) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sgl_tiered.cache.config import CacheConfig, TierConfig
        from sgl_tiered.cache.tiered_cache import TieredCache
        from sgl_tiered.core.clock import SystemClock
        from sgl_tiered.core.ids import TierId
        from sgl_tiered.core.keys import Namespace
        from sgl_tiered.cost.links import LinkCost
        from sgl_tiered.cost.model import CostModel
        from sgl_tiered.cost.prefill import PrefillCost
        from sgl_tiered.engines.device.pools import page_layout
        from sgl_tiered.engines.sglang.cache import TieredRadixCache
        from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
        from sgl_tiered.metrics.registry import MetricsRegistry
        from sgl_tiered.pipelines.completions import CompletionQueue
        from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
        from sgl_tiered.pipelines.offload import OffloadWorker
        from sgl_tiered.pipelines.stream_pool import StreamPool
        from sgl_tiered.policies.eviction.lru import LRUPolicy
        from sgl_tiered.serving.agreement import Agreement
        from sgl_tiered.serving.options import Options, Writes
        from sgl_tiered.serving.weights import WeightsHash, WeightsIdentity
        from sgl_tiered.testing.emulator import Emulator
        from sgl_tiered.tiers.host import HostTier

        self.host_tier = TierId.HOST
        self.played = PlayedCuda(seed)
        self.device = self.played.device
        self.schedule = self.device.new_stream("schedule")
        self.forward = self.device.new_stream("forward")
        self.played.engine = self.schedule  # type: ignore[assignment]
        self.kv = MHATokenToKVPool(
            size=NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=8,
            layer_num=LAYERS,
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
        clock, completions = SystemClock(), CompletionQueue()
        metrics = MetricsRegistry()
        self.host = HostTier(layout.slot_bytes, 256, register=self.played.register("h"))
        cost = CostModel(
            PrefillCost(1000, LAYERS, 16, 1e9), {TierId.HOST: LinkCost(1e-4, 1e9)}
        )
        self.cache = TieredCache(
            CacheConfig(
                layout, (TierConfig(TierId.HOST, 256),), "always", load_overlaps=True
            ),
            cost=cost,
            eviction={TierId.HOST: LRUPolicy()},
            clock=clock,
        )
        device = StreamPool(self.played.pool_ops_class()(self.kv, layout, self.forward))
        work = (completions, clock, metrics)
        self.runtime = TieredRuntime(
            Parts(
                config=Options(writes=Writes("write-through")),
                namespace=Namespace("m", "bfloat16", PAGE),
                weights=WeightsIdentity(
                    lambda: lambda *_: WeightsHash("m", 0, 0), Agreement(clock), metrics
                ),
                clock=clock,
                cost=cost,
                cache=self.cache,
                device=device,
                host=self.host,
                cxl=None,
                disk=None,
                emulator=Emulator(),
                metrics=metrics,
                completions=completions,
                loader=LayerwiseLoader(device, *work),
                offloader=OffloadWorker(device, self.host, *work),
                demoters={},
                stager=None,
                lookahead=None,
                deferred=None,
                probe={},
                served={},
            ),
            wait_whole=False,
        )
        rows = torch.zeros((8, NUM_PAGES * PAGE), dtype=torch.int32)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        self.tree = TieredRadixCache(params, self.runtime)
        self.rows = rows
        self.digest = self.runtime.namespace(None, None)
        self.held = False
        self.read: dict[str, list[Any]] = {}
        self.prompts = [self.offloaded(number) for number in range(4)]
        self.tree.req_to_token_pool.req_to_token = on_device(rows)
        self.allocator.free_pages = on_device(self.allocator.free_pages)
        WAITS.ours.clear()
        self.device.blocked.clear()
        self._timer = threading.Timer(_HELD_S, self._let_go)

    def offloaded(self, number: int) -> tuple[Any, list[Any]]:
        """Leave a prompt on the host only; return its tokens and its KV."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

        rng = np.random.default_rng(number)
        tokens = rng.integers(1000, size=PROMPT_PAGES * PAGE).astype(np.int32)
        slots = self.allocator.alloc(len(tokens))
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer[slots] = torch.randn(len(tokens), 2, 8).to(torch.bfloat16)
        found = self.tree.insert(InsertParams(key=self.key(tokens), value=slots))
        kv = [self.of(layer, slots) for layer in range(LAYERS)]
        self.rows[number, : len(tokens)] = slots.to(torch.int32)
        self.tree._offload(
            self.req(f"o{number}", number, tokens, found), None, len(tokens)
        )
        self.tree.finish_offloads()
        self.tree.evict(EvictParams(num_tokens=len(tokens)))
        return tokens, kv

    def req(self, rid: str, row: int, tokens: Any, found: Any = None) -> Any:
        """Return what stands for SGLang's request."""
        node = None if found is None else found.last_device_node
        return SimpleNamespace(
            rid=rid,
            kv=SimpleNamespace(req_pool_idx=row),
            finished=lambda: False,
            retraction_count=0,
            full_untruncated_fill_ids=array("q", tokens.astype(np.int64).tobytes()),
            extra_key=None,
            cache_salt=None,
            last_node=node,
            retracted_stain=False,
            skip_radix_cache_insert=False,
            discard_output_reason=None,
        )

    def key(self, tokens: Any) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.astype(np.int64).tobytes()), None)

    def of(self, layer: int, slots: Any) -> Any:
        """Return keys and values of a layer."""
        slots = slots.as_subclass(torch.Tensor)
        return torch.stack(
            [self.kv.k_buffer[layer][slots], self.kv.v_buffer[layer][slots]]
        )

    def _let_go(self) -> None:
        self.held = True
        self.device.going.set()

    def stop(self) -> None:
        """Let the device run nothing from now on."""
        self.device.going.clear()
        self._timer.start()

    def go_on(self) -> None:
        """Let it run."""
        self._timer.cancel()
        self.device.going.set()

    def admit(self, number: int) -> Any:
        """Admit a request for a prompt that the host has; return its batch."""
        tokens, _ = self.prompts[number]
        prompt = np.concatenate([tokens, tokens[:1]])
        rid = f"r{number}"
        coordinator = self.runtime.coordinator
        state = coordinator.track(rid, self.digest, prompt, PROMPT_PAGES)
        assert coordinator.prepare(state, 0)
        hit = coordinator.loadable_pages(state, 0) * PAGE
        assert hit == len(tokens)
        req = self.req(rid, number, prompt)
        params = SimpleNamespace(req=req, host_hit_length=hit)
        assert self.tree.init_load_back(params)[0] == hit
        self.rows[number, :hit] = self.tree._private[rid].as_subclass(torch.Tensor)
        return SimpleNamespace(
            reqs=[req],
            prefix_lens=[hit],
            extend_lens=[1],
            enable_overlap=True,
            launch_ts=None,
            hicache_consumer_index=self.tree.ready_to_load_host_cache(),
        )

    def launch(self, batch: Any, *, repairs: bool = True) -> bool:
        """Queue a batch's forward, as the scheduler's thread does.

        Returns:
            Whether it had to be queued again, what it lacked having been computed.
        """
        counter, (req,) = self.runtime.counter, batch.reqs
        batch.launch_ts = time.monotonic()
        self.played.engine = self.forward  # type: ignore[assignment]
        self.forward.wait_event(self.schedule.record_event())
        counter.set_consumer(batch.hicache_consumer_index)
        self.read[req.rid] = []
        slots = self.rows[req.kv.req_pool_idx, : batch.prefix_lens[0]].long()
        for layer in range(LAYERS):
            counter.wait_until(layer)

            def attention(layer: int = layer) -> None:
                self.read[req.rid].append(self.of(layer, slots))

            self.forward.run(attention, cost_ms=1.0)
        again = repairs and self.tree.repair_loads(None, batch)
        self.played.engine = self.schedule  # type: ignore[assignment]
        assert self.tree.finish_external_linker_loads(batch.reqs) == []
        return bool(again)

    def is_right(self, number: int) -> bool:
        """Whether the forward read what was offloaded."""
        read = self.read[f"r{number}"]
        kv = self.prompts[number][1]
        return len(read) == LAYERS and all(map(torch.equal, read, kv))

    def pinned(self) -> int:
        """Return the pages of the host that loads have pinned."""
        return int(self.cache.occupancy(self.host_tier).pinned_slots)

    def end(self) -> dict[str, Any]:
        """Let everything end; say what is left."""
        self.go_on()
        self.device.settle()
        drain(self.runtime)
        self.runtime.pump()
        self.cache.check()
        left = {
            "pinned_at_end": self.pinned(),
            "passes_at_end": len(self.tree._passes),
            "held": self.held,
        }
        self.runtime.close(self.tree.take_ends)
        return left


def overlapped(backend: str) -> dict[str, Any]:
    """Launch three batches behind a forward that does not run; then take results."""
    bench = Bench(backend, 0)
    bench.stop()
    batches = []
    for number in range(3):
        batches.append(bench.admit(number))
        assert not bench.launch(batches[-1])
    out = {
        "core": type(bench.tree.tree_core).__name__,
        "in_flight": len(bench.tree._passes),
        "pinned": bench.pinned(),
        "held_by_launch": bench.held,
        "read_on_host": list(WAITS.ours),
    }
    bench.go_on()
    out["failed"], out["pinned_after"] = [], []
    for batch in batches:
        out["failed"] += bench.tree.end_passes(batch)
        bench.tree._forget(batch.reqs[0].rid)
        out["pinned_after"].append(bench.pinned())
    bench.device.settle()
    out["right"] = [bench.is_right(number) for number in range(3)]
    return {**out, **bench.end()}


def offloads(backend: str) -> dict[str, Any]:
    """Send pages down that a forward still writes, without a wait for it."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams

    bench = Bench(backend, 1)
    tokens = np.arange(5 * PAGE, dtype=np.int32)
    slots = bench.allocator.alloc(len(tokens))
    bench.rows[7, : len(tokens)] = slots.as_subclass(torch.Tensor)
    value = slots.as_subclass(torch.Tensor)
    found = bench.tree.insert(InsertParams(key=bench.key(tokens), value=value))
    wanted = torch.randn(LAYERS, 2, len(tokens), 2, 8).to(torch.bfloat16)
    bench.stop()

    def write() -> None:
        for layer in range(LAYERS):
            bench.kv.k_buffer[layer][value] = wanted[layer, 0]
            bench.kv.v_buffer[layer][value] = wanted[layer, 1]

    bench.forward.run(write)
    WAITS.ours.clear()
    bench.tree._offload(bench.req("o", 7, tokens, found), None, len(tokens))
    out: dict[str, Any] = {
        "read_on_host": list(WAITS.ours),
        "held_by_offload": bench.held,
        "pages": len(bench.tree._locks),
    }
    bench.go_on()
    bench.tree.finish_offloads()
    decision = bench.cache.lookup(bench.digest, tokens, 0, max_pages=5)
    plan = bench.cache.commit_load(decision)
    assert plan is not None
    bench.cache.finish_load(plan, landed=True)
    rows = bench.host.region[plan.addresses]
    whole = torch.stack([bench.of(layer, value) for layer in range(LAYERS)])
    pages = whole.view(LAYERS, 2, 5, PAGE, 16).permute(2, 0, 1, 3, 4).contiguous()
    sent = pages.view(5, -1).view(torch.uint8).numpy()
    out["right"] = bool(torch.equal(whole, wanted)) and np.array_equal(
        rows[:, : sent.shape[1]], sent
    )
    return {**out, **bench.end()}


def refused(backend: str) -> dict[str, Any]:
    """A copy that cannot be queued: what it lacks is computed under the same launch."""
    from sgl_tiered.engines.sglang import cache

    bench = Bench(backend, 2)
    spans: list[Any] = []

    def compute(runner: Any, batch: Any, missing: Any) -> int:
        spans.extend((span.index, span.begin, span.end) for span in missing)
        return 1

    cache.compute_missing = compute
    bench.played.refuses = True
    batch = bench.admit(0)
    out: dict[str, Any] = {"again": bench.launch(batch), "spans": spans}
    bench.played.refuses = False
    out["failed"] = len(bench.tree.end_passes(batch))
    out["discarded"] = batch.reqs[0].discard_output_reason is not None
    bench.tree._forget("r0")
    return {**out, **bench.end()}


def broken(backend: str) -> dict[str, Any]:
    """A copy that the device fails at: no token leaves, and nothing is published."""
    bench = Bench(backend, 3)
    bench.stop()
    bench.played.fails = True
    batch = bench.admit(0)
    bench.launch(batch)
    # The next chunk of its prompt is built, before the results of the first are taken.
    size = bench.tree.tree_core.evictable_size() + bench.tree.protected_size()
    req = batch.reqs[0]
    bench.tree.checkpoint_into_tree(req, up_to=PROMPT_PAGES * PAGE)
    sizes = bench.tree.tree_core.evictable_size() + bench.tree.protected_size()
    out: dict[str, Any] = {"published": int(sizes - size), "held_by_launch": bench.held}
    bench.go_on()
    out["failed"] = [req.rid for req in bench.tree.end_passes(batch)]
    out["reason"] = req.tiered_load_failed
    # Nor is anything published before it is taken out of its batches.
    bench.tree.lost.append((req, 0))
    bench.tree.checkpoint_into_tree(req, up_to=PROMPT_PAGES * PAGE)
    bench.tree.lost.clear()
    sizes = bench.tree.tree_core.evictable_size() + bench.tree.protected_size()
    out["published_later"] = int(sizes - size)
    bench.tree._forget("r0")
    return {**out, **bench.end()}


def retracted(backend: str) -> dict[str, Any]:
    """A request goes while its load runs: sources stay pinned until that has ended."""
    bench = Bench(backend, 4)
    bench.stop()
    batch = bench.admit(0)
    bench.launch(batch)
    batch.reqs[0].retraction_count += 1
    bench.tree._forget("r0")
    out: dict[str, Any] = {"pinned_while_it_runs": bench.pinned()}
    out["held_by_launch"] = bench.held
    bench.go_on()
    out["failed"] = len(bench.tree.end_passes(batch))
    out["pinned_after"] = bench.pinned()
    bench.device.settle()
    # It comes again, by the same id.
    again = bench.admit(0)
    bench.launch(again)
    bench.tree.end_passes(again)
    bench.device.settle()
    out["right"] = bench.is_right(0)
    bench.tree._forget("r0")
    return {**out, **bench.end()}


def chunked(backend: str) -> dict[str, Any]:
    """A prompt's next chunk has a load as well: it is no part of the first's results.

    As the back of a split prompt has: its first chunk is computed while that is read.
    """
    bench = Bench(backend, 6)
    bench.stop()
    batches = [bench.admit(0)]
    bench.launch(batches[0])
    batches.append(bench.admit(1))
    # The second batch goes on with a request of the first.
    batches[0].reqs.append(batches[1].reqs[0])
    bench.launch(batches[1])
    out: dict[str, Any] = {"held_by_launch": bench.held, "left": []}
    bench.go_on()
    for batch in batches:
        assert bench.tree.end_passes(batch) == []
        out["left"].append(len(bench.tree._passes))
    bench.device.settle()
    out["right"] = [bench.is_right(number) for number in range(2)]
    for number in range(2):
        bench.tree._forget(f"r{number}")
    return {**out, **bench.end()}


def embedded(backend: str) -> dict[str, Any]:
    """A model that does not generate: nobody asks for repairs, results wait as well."""
    bench = Bench(backend, 5)
    bench.stop()
    batch = bench.admit(0)
    bench.launch(batch, repairs=False)
    out: dict[str, Any] = {"held_by_launch": bench.held}
    bench.go_on()
    out["failed"] = len(bench.tree.end_passes(batch))
    bench.tree._forget("r0")
    return {**out, **bench.end()}


STORIES = (overlapped, offloads, refused, broken, retracted, chunked, embedded)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {}
    for name in ("rust", "python"):
        with WAITS:
            told[name] = {story.__name__: story(name) for story in STORIES}
        told[name]["core"] = told[name]["overlapped"]["core"]
    print(json.dumps(told))
