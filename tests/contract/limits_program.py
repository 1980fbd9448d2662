"""Matches waiting requests as SGLang's queue does; prints what they may reuse.

    limits_program.py

Once with each of SGLang's tree cores, without a server: four pages of a prompt lie on
disk alone. SGLang looks at a waiting request in three ways: when it arrives (up to what
it may reuse), in every pass if the policy sorts by prefixes (the whole prompt), and
when it could be admitted (up to what it may reuse again). The last line is one JSON
object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from runtime_program import context

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.draining import drain

PAGE = 16
NUM_PAGES = 4
PATIENCE_S = 30.0

CASES: dict[str, dict[str, Any]] = {
    "whole pages": {},
    "a token more": {"more": 1},
    "logprobs from 20": {"return_logprob": True, "logprob_start_len": 20},
    "logprobs from 0": {"return_logprob": True, "logprob_start_len": 0},
    "replaced embeddings": {"positional_embed_overrides": object()},
}


class Bench:
    """Our tree over a small pool, with a host tier and a disk.

    Args:
        backend: of SGLang's tree.
        disk: folder of the disk tier; None for none.
    """

    def __init__(self, backend: str, disk: Path | None) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        from sgl_tiered.engines.sglang.cache import TieredRadixCache
        from sgl_tiered.engines.sglang.factory import _build_runtime
        from sgl_tiered.serving.option_reader import read_options

        settings: dict[str, Any] = {"host_size": "4MB", "load_policy": "always"}
        if disk is not None:
            settings |= {
                "disk_path": str(disk),
                "disk_size": "64MB",
                "disk_admission": "all",
                "disk_io": "threads",
            }
        # A server that starts anew has the same weights.
        torch.manual_seed(1)
        facts = context()
        pool = facts.params.token_to_kv_pool_allocator.get_kvcache()
        self.runtime = _build_runtime(facts, read_options(settings))
        if self.runtime.parts.adoption is not None:
            # Nothing is written before, and what a former server left is there after.
            self.runtime.parts.adoption.finish()
        self.allocator = PagedTokenToKVPoolAllocator(
            512,
            page_size=PAGE,
            dtype=torch.bfloat16,
            device="cpu",
            kvcache=pool,
            need_sort=False,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=backend,
        )
        self.tree = TieredRadixCache(params, self.runtime)

    def settle(self) -> None:
        """Let everything that is under way, and what follows from it, end."""
        for _ in range(6):
            drain(self.runtime)
            self.tree.check_hicache_events()

    def offload(self, tokens: Any) -> None:
        """Leave a prompt in the tree as a finished request does, its copy queued."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", tokens.astype(np.int64).tobytes()), None)
        slots = self.allocator.alloc(len(tokens))
        self.tree.insert(InsertParams(key=key, value=slots))
        _, node, _ = self.tree.tree_core.match_full_device_prefix(key)
        digest = self.runtime.namespace(None, None)
        plan = self.runtime.cache.plan_offload(digest, tokens)
        pages = slots[::PAGE].numpy().astype(np.int64) // PAGE
        assert self.tree.submit_offload(plan, pages, node)

    def keep_on_disk(self, tokens: Any) -> None:
        """Put a prompt's pages on disk alone."""
        from sgl_tiered.core.ids import TierId

        self.offload(tokens)
        self.settle()
        self.tree.drop(TierId.HOST)
        self.tree.drop(TierId.DEVICE)

    def used(self, label: str) -> int:
        """Return the slots of a tier that are in use."""
        occupancy = self.runtime.metrics_snapshot()["occupancy"]
        return int(occupancy[label]["used"])

    def close(self) -> None:
        """End the threads."""
        self.tree.release_host_resources()


def request(rid: str, tokens: list[int], facts: dict[str, Any]) -> Any:
    """Return what SGLang's matching reads of one of its requests."""
    from sglang.srt.managers.schedule_batch import Req

    req = Req.__new__(Req)
    ids = array("q", tokens)
    known = {
        "rid": rid,
        "origin_input_ids": ids,
        "full_untruncated_fill_ids": ids,
        "output_ids": array("q"),
        "extra_key": None,
        "cache_salt": None,
        "kv": SimpleNamespace(cache_protected_len=0),
        "dllm_config": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "positional_embed_overrides": None,
        "prefix_len": 0,
        "is_retracted": False,
        "multimodal_inputs": None,
        "mamba_branching_seqlen": None,
        "session": None,
        "sampling_params": SimpleNamespace(custom_params=None),
    }
    for name, value in {**known, **facts}.items():
        setattr(req, name, value)
    return req


def wait(bench: Bench, req: Any, *, by_prefix: bool) -> dict[str, Any]:
    """Let a request wait until it could be admitted; say what it may reuse."""
    from sglang.srt.mem_cache.common import match_kv_cache

    tree, runtime = bench.tree, bench.runtime
    req.init_next_round_input(tree)
    num_read = 0
    for _ in range(20):
        if by_prefix:
            match_kv_cache(req, tree)
        is_ready = tree.check_prefetch_progress(SimpleNamespace(rid=req.rid))
        state = runtime.coordinator.state(req.rid)
        if state is not None and state.staged is not None:
            num_read = len(state.staged.positions)
        if is_ready:
            break
        drain(runtime)
        tree.check_hicache_events()
    else:
        raise AssertionError("it never could be admitted")
    found = by_prefix and match_kv_cache(req, tree).host_hit_length
    req.init_next_round_input(tree)
    told = {
        "seen_by_policy": int(found),
        "reused": req.prefix_len + req.host_hit_length,
        "read": num_read,
    }
    runtime.forget_request(req.rid)
    occupied = runtime.cache.occupancy
    told["pinned"] = sum(occupied(t.tier_id).pinned_slots for t in runtime.parts.tiers)
    return told


def story(backend: str) -> dict[str, Any]:
    """Wait under both kinds of policies in each case."""
    tokens = list(range(PAGE * NUM_PAGES))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(backend, Path(folder))
        bench.keep_on_disk(np.array(tokens, np.int32))
        out: dict[str, Any] = {"core": type(bench.tree.tree_core).__name__}
        for name, facts in CASES.items():
            given = dict(facts)
            prompt = tokens + [7] * given.pop("more", 0)
            out[name] = {
                policy: wait(bench, request(policy, prompt, given), by_prefix=by_prefix)
                for policy, by_prefix in (("fcfs", False), ("lpm", True))
            }
        bench.close()
    return out


def main() -> None:
    """Print one line of JSON behind everything else."""
    warnings.simplefilter("ignore")
    print("\n" + json.dumps({core: story(core) for core in ("rust", "python")}))


if __name__ == "__main__":
    main()
