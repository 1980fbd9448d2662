"""The write policy ``on-evict``: copy what the device is about to lose, and only that.

SGLang's tree evicts when it needs slots, at once and without asking, so a page can only
be saved ahead of time. Prompts are noted when requests leave them in the tree; when
little of the pool is free, the coldest are looked up again (without making them look
used), locked, and copied a part at a time in the background. One copy is under way at
most, so that little of the tree is locked. What the tree drops before its turn came is
lost to the tiers and counted.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_tiered.cache.deferred import Deferred, DeferredOffloads
from sgl_tiered.core.plans import Int32s
from sgl_tiered.engines.device.tokens import page_numbers
from sgl_tiered.engines.sglang.runtime import TieredRuntime
from sgl_tiered.pipelines.page_numbers import PageNumbers, host_numbers

__all__ = ["OffloadAhead"]

_MAX_PAGES = 256
"""Pages of one copy: 4,096 tokens at 16 a page, 20 ms at 2 MiB a page and 25 GB/s."""


@dataclass(frozen=True, slots=True)
class _Copy:
    plan_id: int
    prompt: Deferred
    num_resident: int
    is_last: bool


class OffloadAhead:
    """Feeds prompts of SGLang's tree to the offload, coldest first.

    Args:
        tree: our cache; its core, its allocator and ``submit_offload`` are used.
        tiered: the tiers below it.
        deferred: which prompt comes next.
    """

    def __init__(
        self, tree: Any, tiered: TieredRuntime, deferred: DeferredOffloads
    ) -> None:
        self._tree = tree
        self._tiered = tiered
        self._deferred = deferred
        self._copy: _Copy | None = None
        self._has_evicted = False

    def note(
        self,
        digest: bytes,
        tokens: Int32s,
        seen_pages: int,
        extra_key: str | None,
        cache_salt: str | None,
    ) -> None:
        """Note whole pages that a request has left in the tree.

        Args:
            digest: their namespace.
            tokens: int32, from the start of the prompt.
            seen_pages: leading pages noted for this request before.
            extra_key, cache_salt: where SGLang keeps them.
        """
        recency = self._tiered.cache.sight(digest, tokens, seen_pages=seen_pages)
        self._deferred.note(digest, tokens, recency, (extra_key, cache_salt))

    def evicted(self) -> None:
        """Note that the tree has dropped something."""
        self._has_evicted = True

    def ended(self, plan_id: int) -> None:
        """Note the end of an offload, whichever it was."""
        copy = self._copy
        if copy is None or copy.plan_id != plan_id:
            return
        self._copy = None
        if copy.is_last:
            self._deferred.settle(copy.prompt, copy.num_resident)

    def advance(self) -> None:
        """Start the next copy if one is due; once per scheduling pass."""
        if self._has_evicted:
            self._has_evicted = False
            self._sweep()
        if self._copy is not None:
            return
        page_tokens = self._tree.page_size
        free_tokens = self._tree.token_to_kv_pool_allocator.available_size()
        prompt = self._deferred.next(free_tokens // page_tokens)
        if prompt is None:
            return
        num_resident, node = self._find(prompt)
        tokens = prompt.tokens[: num_resident * page_tokens]
        cache = self._tiered.cache
        kinds = leave = None
        if self._tree.has_kinds:
            numbers = host_numbers(self._pages(prompt, node))
            kinds, leave = self._tree.page_kinds(numbers)
        plan = cache.plan_offload(
            prompt.digest,
            tokens,
            max_pages=_MAX_PAGES,
            sighted=prompt.recency,
            leave=leave,
            kinds=kinds,
        )
        if plan is None:
            # All has copies, or the first tier has no room: then it is given up.
            has_copies = not cache.num_without_copy(prompt.digest, tokens, 0)
            self._deferred.settle(prompt, num_resident if has_copies else 0)
            return
        pages = self._pages(prompt, node)[plan.positions]
        if self._tree.submit_offload(plan, pages, node):
            is_last = len(plan.pages) < _MAX_PAGES
            self._copy = _Copy(plan.plan_id, prompt, num_resident, is_last)

    def _pages(self, prompt: Deferred, node: Any) -> PageNumbers:
        """Return the device's pages of a prompt up to a node of the tree."""
        root = self._tree.root_node_handle(prompt.handle[0])  # type: ignore[index]
        slots = self._tree.tree_core.collect_full_device_indices(node, root)
        page_tokens = self._tree.page_size
        device = self._tiered.parts.device
        return page_numbers(device, slots[::page_tokens], page_tokens)

    def dropped(self) -> None:
        """Note that copies below the device were forgotten."""
        self._deferred.forget_copies()

    def clear(self) -> None:
        """Forget everything (the tree is being reset)."""
        self._deferred.clear()
        self._copy = None
        self._has_evicted = False

    def _sweep(self) -> None:
        def num_resident(prompt: Deferred) -> int:
            return self._find(prompt)[0]

        for prompt, num_left in self._deferred.sweep(num_resident):
            cache = self._tiered.cache
            num_lost = cache.num_without_copy(prompt.digest, prompt.tokens, num_left)
            self._tiered.metrics.add("offload_late_pages", num_lost)
            cache.misses.lost(prompt.digest, prompt.tokens, num_left)

    def _find(self, prompt: Deferred) -> tuple[int, Any]:
        """Return how many of a prompt's pages the tree has, and the last node.

        Read-only: what is looked for because it is cold does not become hot by it.
        """
        assert isinstance(prompt.handle, tuple)
        extra_key, cache_salt = prompt.handle
        wide = array("q", prompt.tokens.astype(np.int64).tobytes())
        key = RadixKey(wide, extra_key, cache_salt=cache_salt)
        num_tokens, node, _ = self._tree.tree_core.match_full_device_prefix(key)
        return num_tokens // self._tree.page_size, node
