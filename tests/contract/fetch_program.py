"""Runs fetches to the device over SGLang's real tree and pool; prints what it saw.

    fetch_program.py

Once with each of SGLang's tree cores, without a server, on the pool and the prompts of
``ahead_program.py``. The device's layers can be held up, so that a fetch is under way
while something else happens. The last line is one JSON object.
"""

from __future__ import annotations

import json
import threading
import warnings
from typing import Any

import numpy as np
import torch
from ahead_program import NUM_PAGES, PAGE, PATIENCE_S, PROMPT_PAGES, Bench


class HeldPool:
    """A device pool that copies no layer from ``hold_at`` on until it is let."""

    def __init__(self, pool: Any) -> None:
        self.layout, self.mark = pool.layout, pool.mark
        self._pool = pool
        self.hold_at, self.fail_at = -1, -1
        self.is_held, self.may_go = threading.Event(), threading.Event()

    def load_layer(self, layer: int, *args: Any, **kwargs: Any) -> Any:
        if layer == self.hold_at:
            self.is_held.set()
            assert self.may_go.wait(PATIENCE_S)
        if layer == self.fail_at:
            raise RuntimeError("this layer cannot be copied")
        return self._pool.load_layer(layer, *args, **kwargs)


class FetchBench(Bench):
    """The tree with a fetcher, and one prompt that the host tier holds."""

    def __init__(self, backend: str) -> None:
        from sgl_tiered.cache.device_prefetcher import DevicePrefetcher
        from sgl_tiered.core.clock import SystemClock
        from sgl_tiered.core.ids import TierId
        from sgl_tiered.engines.device.pools import make_device_pool
        from sgl_tiered.engines.sglang.fetching import DeviceFetcher
        from sgl_tiered.pipelines.completions import CompletionQueue
        from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
        from sgl_tiered.policies.prefetch.car import CarPrefetch

        super().__init__(backend, threshold=0.99)
        self.tree._ahead = None
        self.tree.tiered.on_promoted = lambda: None
        clock = SystemClock()
        self.pool = HeldPool(make_device_pool(self.kv, self.layout, None))
        self.loader = LayerwiseLoader(self.pool, CompletionQueue(), clock, self.metrics)
        self.prefetcher = DevicePrefetcher(self.cache, CarPrefetch())
        self.errors: list[str] = []
        self.fetcher = DeviceFetcher(
            self.tree,
            self.prefetcher,
            self.pool,
            self.loader,
            {TierId.HOST: self.host},
            clock,
            self.metrics,
            lambda tier, error: self.errors.append(error),
            may_evict=lambda: True,
        )
        self.tree.fetcher = self.fetcher
        self.tokens, self.wanted = self.offloaded(0)
        # A prompt's last token is computed, so that there is always one more.
        self.prompt = np.concatenate([self.tokens, self.tokens[:1]])

    def serve(self, seed: int) -> Any:
        """Leave a computed prompt in the tree."""
        rng = np.random.default_rng(seed)
        tokens = rng.integers(1000, size=PROMPT_PAGES * PAGE).astype(np.int32)
        self.compute(tokens)
        return tokens

    def compute(self, tokens: Any) -> None:
        """Let a request compute a prompt and leave it."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        slots = self.allocator.alloc(len(tokens))
        for buffer in (*self.kv.k_buffer, *self.kv.v_buffer):
            buffer[slots] = torch.randn(len(tokens), 2, 8).to(torch.bfloat16)
        self.tree.insert(InsertParams(key=self.key(tokens), value=slots))

    def offloaded(self, seed: int) -> tuple[Any, list[Any]]:
        """Leave a prompt on the host only; return it and its KV."""
        tokens = self.serve(seed)
        slots, node = self.slots(tokens)
        kv = [b[slots].clone() for b in (*self.kv.k_buffer, *self.kv.v_buffer)]
        plan = self.cache.plan_offload(self.digest, tokens)
        self.tree.submit_offload(plan, slots[::PAGE].numpy() // PAGE, node)
        self.tree.finish_offloads()
        self.tree.evict_leaves(len(tokens))
        return tokens, kv

    def slots(self, tokens: Any) -> tuple[Any, Any]:
        core = self.tree.tree_core
        num, node, _ = core.match_full_device_prefix(self.key(tokens))
        root = self.tree.root_node_handle(None)
        return core.collect_full_device_indices(node, root)[:num], node

    def begin(self, *, hold: bool, keep: Any = ()) -> Any:
        """Fetch what of the prompt is not on the device; return the request."""
        from sgl_tiered.cache.waiting_state import WaitingLoad

        self.pool.hold_at = 1 if hold else -1
        self.pool.is_held.clear()
        self.pool.may_go.clear()
        state = WaitingLoad(self.digest, self.prompt, PROMPT_PAGES)
        others = [WaitingLoad(self.digest, t, PROMPT_PAGES) for t in keep]
        waiting = [(state, self.on_device(self.tokens))]
        waiting += [(other, self.on_device(other.tokens)) for other in others]
        self.fetcher.keys = {s: self.key(s.tokens) for s, _ in waiting}
        self.prefetcher.advance(waiting, (), (0.0,) * len(waiting), 0.0)
        if hold:
            assert self.pool.is_held.wait(PATIENCE_S)
        return state

    def let_go(self) -> None:
        """Let the copy end, and the tree see it."""
        self.pool.may_go.set()
        assert self.loader.drain(PATIENCE_S)
        self.tree.take_ends()

    def is_whole(self) -> bool:
        """Whether the tree gives out the KV that was offloaded."""
        slots, _ = self.slots(self.tokens)
        found = [b[slots] for b in (*self.kv.k_buffer, *self.kv.v_buffer)]
        return len(slots) == len(self.tokens) and all(
            torch.equal(a, b) for a, b in zip(found, self.wanted, strict=True)
        )

    def num_lost(self) -> int:
        """Return the tokens of the pool that nobody accounts for."""
        self.cache.check()
        sizes = self.allocator.available_size(), self.tree.evictable_size()
        return NUM_PAGES * PAGE - sum(sizes) - int(self.tree.protected_size())

    def counter(self, name: str) -> int:
        return int(self.metrics.snapshot()["counters"].get(name, 0))


def story(backend: str) -> dict[str, Any]:
    """Fetch while this and that happens; say what came of it."""
    out: dict[str, Any] = {}

    def ended(name: str, bench: FetchBench, **more: Any) -> None:
        is_idle = not bench.prefetcher.is_busy and bench.fetcher.num_lent == 0
        tiers = bench.cache.config.tiers
        pinned = sum(bench.cache.occupancy(t.tier).pinned_slots for t in tiers)
        out[name] = {
            "on_device": bench.on_device(bench.tokens),
            "lost": bench.num_lost(),
            "idle": is_idle and pinned == 0,
            **more,
        }
        bench.loader.close(PATIENCE_S)
        bench.worker.close(PATIENCE_S)

    bench = FetchBench(backend)
    bench.begin(hold=True)
    during = {
        "on_device_during": bench.on_device(bench.tokens),
        "lent_during": bench.fetcher.num_lent // PAGE,
        "lost_during": bench.num_lost(),
    }
    bench.let_go()
    out["core"] = type(bench.tree.tree_core).__name__
    ended("plain", bench, whole=bench.is_whole(), **during)

    bench = FetchBench(backend)
    bench.compute(bench.tokens[: 3 * PAGE])
    front = bench.slots(bench.tokens)[0].tolist()
    bench.begin(hold=True)
    lent = bench.fetcher.num_lent // PAGE
    bench.let_go()
    kept = bench.slots(bench.tokens)[0][: 3 * PAGE].tolist() == front
    ended("behind a front", bench, lent=lent, kept=kept)

    bench = FetchBench(backend)
    bench.begin(hold=True)
    bench.compute(bench.tokens[: 5 * PAGE])
    front = bench.slots(bench.tokens)[0].tolist()
    bench.let_go()
    kept = bench.slots(bench.tokens)[0][: 5 * PAGE].tolist() == front
    ended("computed in part", bench, kept=kept)

    bench = FetchBench(backend)
    bench.begin(hold=True)
    bench.compute(bench.tokens)
    own = bench.slots(bench.tokens)[0].tolist()
    bench.let_go()
    kept = bench.slots(bench.tokens)[0].tolist() == own
    ended("computed whole", bench, kept=kept, late=bench.counter("fetches_late"))

    bench = FetchBench(backend)
    bench.compute(bench.tokens[: 3 * PAGE])
    bench.begin(hold=True)
    bench.tree.evict_leaves(3 * PAGE)
    bench.let_go()
    ended("front gone", bench, late=bench.counter("fetches_late"))

    bench = FetchBench(backend)
    others = [bench.serve(seed) for seed in range(10, 16)]
    bench.begin(hold=True)
    free = bench.allocator.available_size() // PAGE
    # The copy under way has to end first; it is let go while the engine waits for it.
    timer = threading.Timer(0.2, bench.pool.may_go.set)
    timer.start()
    bench.evict(PROMPT_PAGES)
    more = {
        "freed": bench.allocator.available_size() // PAGE - free,
        "others": [bench.on_device(tokens) for tokens in others],
        "cancelled": bench.counter("fetches_cancelled"),
    }
    bench.let_go()
    ended("short of room", bench, **more)

    bench = FetchBench(backend)
    others = [bench.serve(seed) for seed in range(10, 18)]
    # The coldest is what a request waits for; the next one is nobody's.
    bench.begin(hold=False, keep=[others[0]])
    bench.let_go()
    found = [bench.on_device(tokens) for tokens in others]
    ended("evicting", bench, others=found, whole=bench.is_whole())

    bench = FetchBench(backend)
    others = [bench.serve(seed) for seed in range(10, 18)]
    bench.begin(hold=False, keep=others)
    bench.let_go()
    found = [bench.on_device(tokens) for tokens in others]
    ended("all needed", bench, others=found)

    bench = FetchBench(backend)
    bench.pool.fail_at = 2
    bench.begin(hold=False)
    bench.let_go()
    ended("failed", bench, failed=bench.counter("fetches_failed"), errors=bench.errors)

    bench = FetchBench(backend)
    bench.begin(hold=True)
    timer = threading.Timer(0.2, bench.pool.may_go.set)
    timer.start()
    # Nobody waits any more.
    bench.prefetcher.advance((), (), (), 0.0)
    bench.let_go()
    ended("aborted", bench, cancelled=bench.counter("fetches_cancelled"))
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({backend: story(backend) for backend in ("rust", "python")}))
