"""Runs sparse and whole pages through SGLang's real tree, pool, allocator and checker.

    sparse_program.py

Requests come and go at random with each of SGLang's tree cores: they match a prefix,
load more of it sparse, compute the rest, decode, finish or are retracted; nodes are
split, and the tree evicts. After every step SGLang's own invariant checker is asked,
and the rows are counted. Now and then all that admission counts on is taken at once:
it has to be there. The last line is one JSON object.
"""

from __future__ import annotations

import json
import warnings
from array import array
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PAGE, LAYERS, NUM_PAGES = 4, 3, 24
STEPS = 400
STORIES = 3
STORY_TOKENS = 16 * PAGE


@dataclass
class Request:
    """One that runs: what it has in the tree, and what is its own."""

    tokens: np.ndarray
    node: Any
    receipt: Any
    num_shared: int
    own: list[torch.Tensor] = field(default_factory=list)
    fresh: np.ndarray | None = None

    @property
    def num_own(self) -> int:
        return sum(len(part) for part in self.own)


class Bench:
    """Our tree over a small pool of rows, and SGLang's checker."""

    def __init__(self, backend: str, seed: int, *, honest: bool = True) -> None:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.managers.scheduler_components.invariant_checker import (
            SchedulerInvariantChecker,
        )
        from sglang.srt.managers.scheduler_components.pool_stats_observer import (
            SchedulerPoolStatsObserver,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sgl_tiered.core.layout import PageLayout
        from sgl_tiered.engines.device.sparse_parts import SparseParts
        from sgl_tiered.engines.sglang.sparse.allocator import SparseAllocator
        from sgl_tiered.engines.sglang.sparse.cache import SparseRadixCache
        from sgl_tiered.engines.sglang.sparse.capacity import RowPlan, SparseSizes
        from sgl_tiered.engines.sglang.sparse.pool import SparsePool
        from sgl_tiered.policies.sparsity.car import CarSelection
        from sgl_tiered.sparse.gauge import MassGauge
        from sgl_tiered.sparse.keep import SpanChoice

        plan = RowPlan(PageLayout(LAYERS, PAGE, 2 * 8 * 2), 4 * NUM_PAGES, NUM_PAGES)
        pool_class = type("Pool", (SparsePool,), {"row_plan": plan})
        self.pool = pool_class(
            size=NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=8,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.rows = self.pool.binding
        self.allocator = SparseAllocator(
            NUM_PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=self.pool,
            need_sort=bool(seed % 2),
        )
        selection = CarSelection()
        self.pool.gauge = MassGauge(
            selection,
            num_layers=LAYERS,
            num_heads=2,
            num_slots=self.rows.table.shape[1],
            page_tokens=PAGE,
            max_bytes=1 << 20,
            most_queries=128,
        )
        sparse = SparseParts(
            self.rows,
            None,
            SpanChoice(selection, LAYERS, 0.5),
            self.pool.gauge,
            self.pool.measured,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        runtime = SimpleNamespace(sparse=sparse, deferred=None)
        self.tree = SparseRadixCache(params, runtime)
        if not honest:
            # What the tree could evict, as SGLang counts it.
            self.allocator.sizes.__class__ = type(
                "Sizes", (SparseSizes,), {"unevictable": 0}
            )
        common = {
            "is_hybrid_swa": False,
            "is_hybrid_ssm": False,
            "full_tokens_per_layer": None,
            "swa_tokens_per_layer": None,
            "max_total_num_tokens": NUM_PAGES * PAGE,
            "tree_cache": self.tree,
            "token_to_kv_pool_allocator": self.allocator,
            "req_to_token_pool": None,
        }
        self.observer = SchedulerPoolStatsObserver(
            session_controller=SimpleNamespace(sessions={}),
            hisparse_coordinator=None,
            enable_hisparse=False,
            **common,
        )
        self.checker = SchedulerInvariantChecker(
            disaggregation_mode=DisaggregationMode.NULL,
            page_size=PAGE,
            pool_stats_observer=self.observer,
            get_last_batch=lambda: None,
            get_running_batch=lambda: None,
            scheduler_stage_metrics=None,
            **common,
        )
        self.allocator.sizes.comparing.append((self, ("observer", "checker")))
        self.rng = np.random.default_rng(seed)
        stories = np.random.default_rng(7).integers(1000, size=(STORIES, STORY_TOKENS))
        # All begin alike, so that nodes are split where they part.
        stories[:, : 2 * PAGE] = stories[0, : 2 * PAGE]
        self.stories = stories
        self.requests: list[Request] = []
        self.did: Counter[str] = Counter()
        self.largest_total = 0

    def key(self, tokens: np.ndarray) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.astype(np.int64).tobytes()), None)

    # What SGLang does with a request.

    def start(self) -> None:
        """Match, load a part of the rest sparse, compute what is left."""
        story = self.stories[self.rng.integers(STORIES)]
        num_pages = int(self.rng.integers(1, STORY_TOKENS // PAGE + 1))
        tokens = story[: num_pages * PAGE]
        found, node, _ = self.tree.tree_core.match_full_device_prefix(self.key(tokens))
        request = Request(tokens, node, None, found)
        request.receipt = self.tree.inc_lock_ref(node).to_dec_params()
        self.requests.append(request)
        missing = num_pages - found // PAGE
        fits = missing * PAGE < self.promised()
        if not fits:
            self.leave(request, publish=False)
            self.did["turned away"] += 1
            return
        loaded = int(self.rng.integers(0, missing + 1))
        if loaded:
            self.load(request, loaded * PAGE)
        if missing - loaded:
            self.take(request, (missing - loaded) * PAGE)
        self.publish(request)

    def load(self, request: Request, num_tokens: int) -> None:
        """Take slots with rows for some tokens, as for the load of a host hit."""
        share = self.rng.choice([0.1, 0.5, 0.9])
        kept = [
            np.flatnonzero(self.rng.random(num_tokens) < share) for _ in range(LAYERS)
        ]
        self.tree._make_room(sum(map(len, kept)), num_tokens)
        slots = self.allocator.alloc_kept(num_tokens, kept)
        if slots is None:
            # Numbers of pages have run out: an engine computes instead.
            self.did["no numbers"] += 1
            self.take(request, num_tokens)
            return
        self.did["loaded"] += 1
        request.own.append(slots)
        request.fresh = slots[::PAGE].numpy() // PAGE
        if self.rng.random() < 0.2:
            lacking = self.rows.num_rows_lacking(request.fresh)
            if self.tree._make_whole(slots[::PAGE]):
                assert lacking == 0 or not self.rows.lacks_any(request.fresh)
                self.did["mended"] += 1
        self.check()

    def take(self, request: Request, num_tokens: int) -> None:
        """Allocate as SGLang does for a prefill that it has admitted."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree, num_tokens)
        slots = self.allocator.alloc(num_tokens)
        assert slots is not None, "SGLang would end the server here"
        request.own.append(slots)

    def publish(self, request: Request) -> None:
        """Put the request's pages into the tree, as a checkpoint does."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        if not request.own:
            return
        path = self.tree.path_device_indices(request.node)
        value = torch.cat([path[: request.num_shared], *request.own])
        key = self.key(request.tokens[: len(value)])
        result = self.tree.insert(
            InsertParams(
                key=key,
                value=value,
                prev_prefix_len=request.num_shared,
                inserted_len=len(value),
            )
        )
        self.tree.dec_lock_ref(request.node, request.receipt)
        request.node = result.last_device_node
        request.receipt = self.tree.inc_lock_ref(request.node).to_dec_params()
        request.num_shared, request.own = len(value), []
        if request.fresh is not None:
            self.rows.publish(request.fresh)
            self.allocator.changed()
            request.fresh = None

    def decode(self, request: Request) -> None:
        """Take one more page for the answer, if SGLang would."""
        if self.allocator.check_decode_capacity(num_tokens=PAGE, tree_cache=self.tree):
            slots = self.allocator.alloc(PAGE)
            assert slots is not None, "SGLang has counted on it"
            request.own.append(slots)
            self.did["decoded"] += 1

    def leave(self, request: Request, *, publish: bool) -> None:
        """Finish, or be retracted: what is not in the tree is free."""
        if publish and request.own:
            more = self.rng.integers(1000, 2000, request.num_own)
            request.tokens = np.concatenate(
                [request.tokens[: request.num_shared], more]
            )
            self.publish(request)
        for slots in request.own:
            self.allocator.free_segment(slots, start_pos=0)
        self.tree.dec_lock_ref(request.node, request.receipt)
        self.requests = [one for one in self.requests if one is not request]
        self.did["finished" if publish else "left"] += 1

    def promised(self) -> int:
        """Return the tokens that SGLang's admission counts on."""
        return int(self.allocator.available_size() + self.tree.evictable_size())

    def take_all_promised(self) -> bool:
        """Take all of it at once, and give it back; return whether it was there."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        num_tokens = self.promised()
        self.did["all taken"] += 1
        evict_from_tree_cache(self.tree, num_tokens)
        slots = self.allocator.alloc(num_tokens)
        if slots is None:
            return False
        self.check(num_tokens)
        self.allocator.free(slots)
        return True

    # What must hold.

    def check(self, more: int = 0) -> None:
        """Ask SGLang's checker, and count the rows."""
        self.rows.check()
        uncached = sum(request.num_own for request in self.requests) + more
        stats = self.observer.get_pool_stats()
        is_leak, message = self.checker._check_full_pool(stats, uncached)
        assert not is_leak, message
        assert 0 <= stats.full_token_usage <= 1, stats
        self.largest_total = max(self.largest_total, self.checker.max_total_num_tokens)

    def step(self) -> bool:
        """Do something; return False where a promise was not kept."""
        choice = self.rng.random()
        request = None
        if self.requests:
            request = self.requests[self.rng.integers(len(self.requests))]
        if choice < 0.35 or request is None:
            self.start()
        elif choice < 0.55:
            self.decode(request)
        elif choice < 0.85:
            self.leave(request, publish=bool(self.rng.random() < 0.7))
        elif choice < 0.95:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            num_tokens = int(self.rng.integers(1, 6)) * PAGE
            self.tree.evict(EvictParams(num_tokens=num_tokens))
        elif not self.take_all_promised():
            return False
        self.check()
        return True


def story(backend: str) -> dict[str, Any]:
    """Run for a while with several seeds; say what happened."""
    did: Counter[str] = Counter()
    largest = 0
    for seed in range(4):
        bench = Bench(backend, seed)
        for _ in range(STEPS):
            assert bench.step(), "what admission counts on was not there"
        for request in list(bench.requests):
            bench.leave(request, publish=False)
        bench.check()
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        bench.tree.evict(EvictParams(num_tokens=STORY_TOKENS * 100))
        assert bench.allocator.available_size() == NUM_PAGES * PAGE, "rows are lost"
        assert not bench.rows.num_dropped
        did += bench.did
        largest = max(largest, bench.largest_total)
    core = type(bench.tree.tree_core).__name__
    return {
        "core": core,
        "did": dict(did),
        "largest": largest,
        "base": NUM_PAGES * PAGE,
    }


def broken_promise() -> str:
    """Count evictable tokens as SGLang does; return what goes wrong."""
    for seed in range(8):
        bench = Bench("python", seed, honest=False)
        try:
            for _ in range(STEPS):
                if not bench.step():
                    return "not there"
        except AssertionError as error:
            return str(error)
    return ""


def slot_by_slot(allocator: Any, seed: int) -> dict[str, int]:
    """Give slots to prefills and decodes, which begin pages and fill others' ends."""
    rows, page = allocator.get_kvcache().binding, allocator.page_size
    rng = np.random.default_rng(seed)
    requests: list[list[int]] = []
    did: Counter[str] = Counter()

    def prefill() -> None:
        fresh: list[list[int]] = [[], []]
        chosen = [fresh[0]]
        if requests:
            chosen.append(requests[rng.integers(len(requests))])
        more = [int(num) for num in rng.integers(1, 5 * page, len(chosen))]
        before = torch.tensor([len(slots) for slots in chosen])
        after = before + torch.tensor(more)
        last = torch.tensor([slots[-1] if slots else -1 for slots in chosen])
        was_free = rows.num_free
        out = allocator.alloc_extend(before, before, after, after, last, sum(more))
        if out is None:
            assert rows.num_free == was_free, "refused, and rows are gone"
            did["refused"] += 1
            return
        did["prefills"] += 1
        found = out.tolist()
        for slots, num in zip(chosen, more, strict=True):
            slots += found[:num]
            found = found[num:]
        requests.append(fresh[0])

    def decode() -> None:
        chosen = requests[:3]
        after = torch.tensor([len(slots) + 1 for slots in chosen])
        last = torch.tensor([slots[-1] for slots in chosen])
        out = allocator.alloc_decode(after, after, last) if chosen else None
        for slots, slot in zip(chosen, [] if out is None else out, strict=False):
            slots.append(int(slot))
        did["decodes" if out is not None else "refused"] += 1

    def load() -> None:
        num = int(rng.integers(1, 4)) * page
        kept = [np.flatnonzero(rng.random(num) < 0.5) for _ in range(rows.num_layers)]
        out = allocator.alloc_kept(num, kept)
        if out is not None:
            requests.append(out.tolist())

    def leave() -> None:
        if requests:
            slots = torch.tensor(requests.pop(int(rng.integers(len(requests)))))
            allocator.free_group_begin()
            allocator.free(slots)
            allocator.free_group_end()

    for _ in range(300):
        rng.choice([prefill, decode, load, leave], p=[0.3, 0.4, 0.1, 0.2])()
        rows.check()
        slots = [slot for request in requests for slot in request]
        assert len(set(slots)) == len(slots), "a slot was given twice"
        pages = {slot // page for slot in slots}
        has_rows = (rows.table[:, page:] >= 0).any(axis=0).reshape(-1, page).any(axis=1)
        assert set((np.flatnonzero(has_rows) + 1).tolist()) <= pages
        total = len(pages) * page + allocator.available_size()
        assert total - allocator.sizes.unevictable == allocator.sizes.total
    return dict(did)


def settings() -> dict[str, Any]:
    """Write and read rows through SGLang's pool, page 0 and dropped tokens included."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    bench = Bench("python", 0)
    pool, rows = bench.pool, bench.rows
    pages = bench.allocator.alloc(2 * PAGE)
    layers = [SimpleNamespace(layer_id=n) for n in range(LAYERS)]
    written = torch.randn(LAYERS, 2, 2 * PAGE + 2, 2, 8).to(torch.bfloat16)
    where = torch.cat([pages, torch.zeros(2, dtype=torch.int64)])
    for layer in layers:
        keys, values = written[layer.layer_id]
        pool.set_kv_buffer(layer, KVWriteLoc(where), keys, values)
    found = [
        torch.equal(
            torch.stack([pool.get_key_buffer(n), pool.get_value_buffer(n)])[
                :, torch.from_numpy(rows.table[n, pages.numpy()]).long()
            ],
            written[n, :, : 2 * PAGE],
        )
        for n in range(LAYERS)
    ]
    sparse = bench.allocator.alloc_kept(PAGE, [np.array([1])] * LAYERS)
    try:
        pool.set_kv_buffer(layers[0], KVWriteLoc(sparse), *written[0][:, :PAGE])
        refused = ""
    except AssertionError as error:
        refused = str(error)
    device_bytes = sum(pool.get_kv_size_bytes())
    row_bytes = 2 * 2 * 8 * 2
    return {
        "found": found,
        "refused": refused,
        "bytes": device_bytes,
        "plain_bytes": (NUM_PAGES + 1) * PAGE * LAYERS * row_bytes,
    }


class Broken:
    """One request whose load is under way, and may break."""

    def __init__(self) -> None:
        from sgl_tiered.serving.sparse_report import SparseLoad

        self.bench = bench = Bench("python", 0)
        tree, rows = bench.tree, bench.rows
        self.lands = True
        self.told: list[tuple[SparseLoad, ...]] = []
        report = SimpleNamespace(load_s=0, stall_s=0, add_copies=id)
        sparse = tree.tiered.sparse
        tree._tiered = SimpleNamespace(
            sparse=sparse,
            transfers=SimpleNamespace(queued=lambda ticket: self.lands),
            metrics=SimpleNamespace(add=lambda *args: None),
            cache=SimpleNamespace(known_pages=lambda digest, tokens: self.known),
            coordinator=SimpleNamespace(
                state=lambda rid: SimpleNamespace(digest=b"", report=report),
                landed=id,
                load_ended=id,
                settle=lambda state, landed: None,
            ),
            forget_request=id,
            note_sparse=lambda rid, *loads: self.told.append(loads),
        )
        self.known = np.array([5], np.int32)
        self.slots = torch.cat(
            [
                bench.allocator.alloc(PAGE),
                bench.allocator.alloc_kept(2 * PAGE, [np.array([1, 6])] * LAYERS),
                bench.allocator.alloc(PAGE),
            ]
        )
        tree.req_to_token_pool = SimpleNamespace(req_to_token=self.slots[None])
        self.req = SimpleNamespace(
            rid="r",
            retraction_count=0,
            extra_key="tiered-lossy|",
            kv=SimpleNamespace(req_pool_idx=0),
            full_untruncated_fill_ids=array("q", range(len(self.slots))),
            is_retracted=False,
            to_finish=None,
            finished=lambda: False,
        )
        self.batch = SimpleNamespace(
            reqs=[self.req],
            prefix_lens=[3 * PAGE],
            extend_lens=[PAGE],
            enable_overlap=True,
            launch_ts=None,
        )
        self.load = SparseLoad(2 * PAGE, [2] * LAYERS, 10, 40, "car")
        self.rows = rows

    def run(self) -> bool:
        """Run the pass of the load, in which queries read what lies in its slots."""
        from sgl_tiered.serving.loading_pass import Load, LoadingPass

        tree, book = self.bench.tree, self.bench.pool.gauge.every
        tree._chosen["r"] = self.load
        state: Any = tree._tiered.coordinator.state("r")
        ticket: Any = SimpleNamespace(
            stall_s=0.0,
            seconds=0.0,
            moved={},
            failed="it",
            is_queued=False,
            wait=lambda: self.lands,
        )
        loading = LoadingPass(ticket, [Load(self.req, state, PAGE, 3 * PAGE, 0)])
        tree._passes.append(loading)
        slots = self.slots.numpy()
        ones = np.ones(len(slots), np.float32)
        # What is known of the first page is kept beside the table.
        book.slots.add(0, slots[:PAGE], np.stack([ones[:PAGE]] * 2), ones[:PAGE])
        self.bench.pool.gauge.keep(self.known, slots[:PAGE])
        book.slots.add(0, slots, np.stack([9 * ones] * 2), ones)
        return bool(tree.repair_loads(None, self.batch))

    def end(self) -> int:
        """End the pass; return how many requests failed with it."""
        return len(self.bench.tree.finish_external_linker_loads(self.batch.reqs))


def broken_loads() -> dict[str, Any]:
    """Let loads land and break; say what is told of them, and of attention."""
    from sgl_tiered.engines.sglang import cache

    one = Broken()
    for _ in range(2):
        assert not one.run()
        one.end()
    found: dict[str, Any] = {
        "landed": [both.as_dict()["tokens_loaded"] for both in one.told[-1]],
        "landed_loads": len(one.told),
    }
    one = Broken()
    one.lands = False

    def compute(runner: Any, batch: Any, spans: Any) -> int:
        (span,) = spans
        slots = one.slots.numpy()
        found["lacking"] = int(one.rows.num_rows_lacking(slots[::PAGE] // PAGE))
        mean, reads = one.bench.pool.gauge.every.slots.read(slots)
        found["reads"] = reads[0].tolist()
        found["mean"] = mean[0, 0, :PAGE].tolist()
        return int(span.end - span.begin)

    cache.compute_missing = compute
    assert one.run()
    assert not one.end()
    found["broken_loads"] = len(one.told)

    one = Broken()
    one.lands = False
    one.bench.allocator.alloc(one.bench.allocator.available_size())
    assert not one.run(), "there is no room to compute it whole"
    found["failed"] = one.end()
    found["failed_loads"] = len(one.told)
    _, reads = one.bench.pool.gauge.every.slots.read(one.slots.numpy())
    found["failed_reads"] = reads[0].tolist()
    one.bench.tree._forget("r")
    one.bench.allocator.free(one.slots)
    one.rows.check()
    return found | {"lacking_after": int(one.rows.num_dropped)}


if __name__ == "__main__":
    from sglang.srt.runtime_context import get_parallel

    warnings.simplefilter("ignore")
    # One rank, as the checker asks.
    get_parallel().override_permanently(dcp_enabled=False)
    told: dict[str, Any] = {name: story(name) for name in ("rust", "python")}
    told["dishonest"] = broken_promise()
    told["pool"] = settings()
    told["broken"] = broken_loads()
    told["slots"] = slot_by_slot(Bench("python", 1).allocator, 0)
    print(json.dumps(told))
