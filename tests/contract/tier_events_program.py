"""Prints, as JSON, what the tiers publish and what SGLang's recorder says of the same.

A cache without an engine stands below; names and events are made by SGLang's own code.
"""

from __future__ import annotations

import json
import sys
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np

warnings.simplefilter("ignore")
PAGE = 4
PROMPT = list(range(100, 100 + 4 * PAGE))


def cache() -> Any:
    """Return a cache of a host tier and a CXL tier of four pages each."""
    from sgl_tiered.cache.tiered_cache import CacheConfig, TierConfig, TieredCache
    from sgl_tiered.core.clock import ManualClock
    from sgl_tiered.core.ids import TierId
    from sgl_tiered.core.layout import PageLayout
    from sgl_tiered.cost.links import LinkCost
    from sgl_tiered.cost.model import CostModel
    from sgl_tiered.cost.prefill import PrefillCost
    from sgl_tiered.policies.eviction.registry import make_eviction_policy

    tiers = (TierId.HOST, TierId.CXL, TierId.DISK)
    rng = np.random.default_rng(0)
    return TieredCache(
        CacheConfig(PageLayout(2, PAGE, 32), tuple(TierConfig(t, 70) for t in tiers)),
        cost=CostModel(
            PrefillCost(10**6, 2, 32, 1e9), {t: LinkCost(1e-4, 1e9) for t in tiers}
        ),
        eviction={t: make_eviction_policy("lru", rng) for t in tiers},
        clock=ManualClock(),
    )


def landed(num: int) -> Any:
    """Return a transfer of which all arrived."""
    from sgl_tiered.core.plans import TransferResult

    return TransferResult(
        np.ones(num, np.bool_), 0, 1e-3, np.arange(1, num + 1, dtype=np.uint64)
    )


class Runtime:
    """As much of a runtime as the events ask for."""

    def __init__(self) -> None:
        from sgl_tiered.serving.namespaces import NamedSpaces

        self.cache = cache()
        self.namespaces = NamedSpaces(self.cache.has_pages)

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> bytes:
        """Open a namespace."""
        from sgl_tiered.core.keys import Namespace

        names = (extra_key or "", cache_salt or "")
        named = Namespace("m", "bf16", PAGE, lora=names[0], cache_salt=names[1])
        self.namespaces.add(names, named.digest())
        return named.digest()

    def engine_idle(self) -> bool:
        """Say that a pass runs."""
        return False

    def store(self, extra_key: str | None, salt: str | None) -> None:
        """Put the prompt into all tiers."""
        tokens = np.array(PROMPT, np.int32)
        plan = self.cache.plan_offload(self.namespace(extra_key, salt), tokens)
        self.cache.finish_offload(plan, landed(len(plan.pages)))
        while (plan := self.cache.plan_demote(64)) is not None:
            self.cache.finish_demote(plan, landed(len(plan.pages)))


def recorded(params: Any, extra_key: str | None, salt: str | None) -> list[Any]:
    """Return what SGLang's tree publishes of the prompt, cut into two nodes."""
    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.radix_cache import RadixKey

    recorder = KVCacheEventRecorder(
        enabled=True,
        page_size=PAGE,
        dynamo_format=params.dynamo_kv_event_format,
        lora_names=params.kv_event_lora_names,
    )

    def node(parent: Any, tokens: list[int]) -> Any:
        key = RadixKey(array("q", tokens), extra_key, cache_salt=salt)
        return SimpleNamespace(
            key=key, parent=parent, hash_value=None, event_hash_value=None
        )

    root = node(None, [])
    root.hash_value = []
    first = node(root, PROMPT[: 2 * PAGE])
    second = node(first, PROMPT[2 * PAGE :])
    for each in (first, second):
        recorder.record_store(each)
    for each in (first, second):
        recorder.record_remove(each)
    return recorder.take()


def encoded(events: list[Any]) -> list[Any]:
    """Return a batch as a subscriber decodes it."""
    import msgspec
    from sglang.srt.disaggregation.kv_events import KVEventBatch

    batch = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    return [batch.hex(), msgspec.msgpack.decode(batch)[1]]


def story(extra_key: str | None, salt: str | None, *, dynamo: bool) -> Any:
    """Publish a prompt, drop the host tier; tell both batches and SGLang's."""
    from sglang.srt.mem_cache.events import KvEventLoraNames

    from sgl_tiered.core.ids import TierId
    from sgl_tiered.engines.sglang.tier_events import TierEvents

    names = KvEventLoraNames()
    names.register(SimpleNamespace(extra_key="adapter-1", lora_id="1"), "adapter")
    params = SimpleNamespace(kv_event_lora_names=names, dynamo_kv_event_format=dynamo)
    runtime = Runtime()
    events = TierEvents(runtime, params, PAGE)
    runtime.store(extra_key, salt)
    stored = encoded(events.take())
    runtime.cache.drop_tier(TierId.HOST)
    removed = encoded(events.take())
    return {
        "stored": stored,
        "removed": removed,
        "nothing": len(events.take()),
        "device": encoded(recorded(params, extra_key, salt)),
    }


def main() -> None:
    """Tell all stories."""
    stories = {
        "plain": story(None, None, dynamo=False),
        "salt": story(None, "tenant", dynamo=False),
        "lora": story("adapter-1", None, dynamo=False),
        "dynamo": story("adapter-1", "tenant", dynamo=True),
        "secret": story("secret", None, dynamo=False),
    }
    print(json.dumps(stories))


if __name__ == "__main__":
    sys.exit(main())
