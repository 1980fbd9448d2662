"""Encoded pages and requests that refuse them, over SGLang's real requests and tree.

    lossy_program.py

Prints one JSON object: the keys that SGLang's own requests end up with, and, with each
of its tree cores, what became of a prompt that went through an encoded host tier. No
server runs.
"""

from __future__ import annotations

import json
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
from ahead_program import PAGE, PROMPT_PAGES
from fetch_program import FetchBench

ASKED: dict[str, dict[str, Any]] = {
    "silent": {},
    "allows": {"word": "allow"},
    "refuses": {"word": "refuse"},
    "allows with a key": {"word": "allow", "extra_key": "mine"},
    "refuses with a key": {"word": "refuse", "extra_key": "mine"},
    "refuses with our mark": {"word": "refuse", "extra_key": "tiered-lossy|mine"},
    "allows with an adapter": {"word": "allow", "lora_id": "adapter"},
}


def keys(default: str) -> dict[str, Any]:
    """Let SGLang's scheduler make requests, hooked as the plugin hooks it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sgl_tiered.core.ids import Encoding
    from sgl_tiered.engines.sglang.asking import tokenized_request
    from sgl_tiered.metrics.registry import MetricsRegistry
    from sgl_tiered.serving.options import Lossy, Options

    config = Options(lossy=Lossy(Encoding.INT8, default))
    runtime = SimpleNamespace(
        config=config,
        metrics=MetricsRegistry(),
        adapters=SimpleNamespace(has_manager=False),
    )
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(tiered=runtime))
    found, questions = {}, {}
    for name, asked in ASKED.items():
        word = asked.get("word")
        custom = {} if word is None else {"tiered": {"lossy": word}}
        req = Scheduler._create_generation_req(
            scheduler,
            SimpleNamespace(),
            name,
            "",
            array("q", [1, 2, 3]),
            SamplingParams(max_new_tokens=1, custom_params=custom),
            extra_key=asked.get("extra_key"),
            lora_id=asked.get("lora_id"),
        )
        found[name] = req.extra_key
    counters = dict(runtime.metrics.snapshot()["counters"])
    for name, key in found.items():
        asked_about = SimpleNamespace(extra_key=key, cache_salt=None, priority=None)
        question = tokenized_request(asked_about, name, array("q", [1, 2, 3]))
        req = Scheduler._create_generation_req(
            scheduler,
            question,
            name,
            "",
            question.input_ids,
            question.sampling_params,
            extra_key=question.extra_key,
        )
        questions[name] = req.extra_key
    return {"keys": found, "questions": questions, "counters": counters}


def story(backend: str) -> dict[str, Any]:
    """Send a prompt down and up through encoded pages, and look who may see it."""
    from sgl_tiered.core.ids import Encoding
    from sgl_tiered.engines.device import pools
    from sgl_tiered.engines.device.encoded_pools import (
        EncodedCpuPool,
        encoded_pool_layout,
    )
    from sgl_tiered.serving.lossy import marked_key
    from sgl_tiered.serving.options import Lossy, Options

    read_layout, make_pool = pools.page_layout, pools.make_device_pool
    pools.page_layout = lambda kv, tokens: encoded_pool_layout(
        kv, read_layout(kv, tokens), Encoding.INT8
    )
    pools.make_device_pool = lambda kv, layout, stream: EncodedCpuPool(kv, layout)
    try:
        bench = LossyBench(backend)
    finally:
        pools.page_layout, pools.make_device_pool = read_layout, make_pool
    bench.begin(hold=False)
    bench.let_go()
    slots, _ = bench.slots(bench.tokens)
    pairs = [
        (buffer[slots].float(), wanted.float())
        for buffer, wanted in zip(
            (*bench.kv.k_buffer, *bench.kv.v_buffer), bench.wanted, strict=True
        )
    ]
    tree, runtime = bench.tree, bench.tree.tiered
    runtime.config = Options(lossy=Lossy(Encoding.INT8))
    runtime.namespace, runtime.lookahead = lambda *names: b"", None
    runtime.coordinator = SimpleNamespace(
        track=lambda *facts: "tracked", state=lambda rid: None
    )
    runtime.can_name = lambda req: True
    tracked = {}
    for allows in (True, False):
        key = marked_key(None, allows=allows)
        req = SimpleNamespace(
            rid="r",
            extra_key=key,
            cache_salt=None,
            positional_embed_overrides=None,
            _compute_max_prefix_len=lambda num_tokens: num_tokens,
        )
        tracked[str(allows)] = tree._track(bench.key_of(bench.tokens, key), req)
    out = {
        "core": type(tree.tree_core).__name__,
        "on_device": len(slots) // PAGE,
        "pages": PROMPT_PAGES,
        "error": max(float((a - b).abs().max()) for a, b in pairs),
        "seen_by_exact": bench.matched(bench.tokens, None),
        "seen_by_lossy": bench.matched(bench.tokens, marked_key(None, allows=True)),
        "tracked": tracked,
        "lost": bench.num_lost(),
        "copied_bytes": int(bench.moved_bytes()),
        "page_bytes": bench.layout.page_bytes,
    }
    bench.loader.close(30.0)
    bench.worker.close(30.0)
    return out


class LossyBench(FetchBench):
    """All prompts are of requests that allow lossy KV."""

    def key_of(self, tokens: Any, extra_key: str | None) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens.astype(np.int64).tobytes()), extra_key)

    def key(self, tokens: Any) -> Any:
        from sgl_tiered.serving.lossy import marked_key

        return self.key_of(tokens, marked_key(None, allows=True))

    def matched(self, tokens: Any, extra_key: str | None) -> int:
        """Return the pages that SGLang's tree finds under a key."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        params = MatchPrefixParams(key=self.key_of(tokens, extra_key))
        return int(self.tree._match_tree(params).device_prefix_len) // PAGE

    def moved_bytes(self) -> int:
        edges = self.metrics.snapshot()["edges"]
        return int(edges["host->device"]["bytes"])


def main() -> None:
    """Print one line of JSON behind everything else."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.reporting import scheduler_hooks

    target = "sglang.srt.managers.scheduler.Scheduler._create_generation_req"
    for name, hook, kind in scheduler_hooks():
        if name == target:
            HookRegistry.register(name, hook, kind)
    HookRegistry.apply_hooks()
    told = {
        "requests": {default: keys(default) for default in ("refuse", "allow")},
        **{backend: story(backend) for backend in ("rust", "python")},
    }
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
