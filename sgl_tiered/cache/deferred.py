"""Offloads put off until the device is nearly full: which prompt is copied next.

Under the write policy ``on-evict`` a prompt that was computed is only noted. Once less
of the device is free than ``1 - threshold`` of it, the coldest prompts are copied, as
many as could be evicted without loss to make up for it, and no more: what is used again
meanwhile is never copied. Where the queue is seen, what a waiting request is about to
use comes after all others. The device's own tree evicts; what it drops before a copy
was made is told by ``sweep`` and lost.

Knows neither the device's tree nor transfers; one thread, the engine's.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.store import Recency
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import page_keys
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy

__all__ = ["Deferred", "DeferredOffloads"]

_MAX_PROMPTS = 4096
"""Beyond it the coldest is given up; at 8,000 tokens a prompt these are 131 MB."""


class Deferred:
    """A prompt on the device.

    Attributes:
        digest: its namespace.
        tokens: int32, whole pages.
        recency: of its last use, as ``TieredCache.sight`` told it.
        handle: what the engine needs to find it in its tree.
    """

    __slots__ = (
        "digest",
        "first_recency",
        "handle",
        "name",
        "num_clean",
        "num_uses",
        "recency",
        "tokens",
    )

    def __init__(
        self, digest: bytes, tokens: Int32s, recency: Recency, handle: object
    ) -> None:
        self.digest = digest
        self.tokens = tokens
        self.recency = self.first_recency = recency
        self.handle = handle
        self.name = b""
        self.num_uses = 1
        self.num_clean = 0


class DeferredOffloads:
    """Prompts in the order in which a policy would give them up.

    Args:
        policy: ranks; the lowest is copied first.
        page_tokens: tokens of a page.
        capacity_pages: pages of the device.
        threshold: share of the device in use above which copies are made, 0 to 1.
        lookahead: the queue; None where nobody looks at it.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        page_tokens: int,
        capacity_pages: int,
        threshold: float,
        lookahead: QueueLookahead | None = None,
    ) -> None:
        self._policy = policy
        self._lookahead = lookahead if policy.needs_queue else None
        self._page_tokens = page_tokens
        self._reserve_pages = capacity_pages - int(threshold * capacity_pages)
        # By the key of the last page, which names the whole prompt.
        self._prompts: dict[bytes, Deferred] = {}
        self._heap: list[tuple[float, int, int, Deferred]] = []
        self._num_pushed = 0
        # Copied and thought to be on the device still, coldest first.
        self._clean: deque[Deferred] = deque()
        self._clean_pages = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Deferred]:
        return iter(self._prompts.values())

    @property
    def clean_pages(self) -> int:
        """Pages that the device may drop without loss; shared ones count repeatedly."""
        return self._clean_pages

    def note(
        self, digest: bytes, tokens: Int32s, recency: Recency, handle: object
    ) -> None:
        """Take note of a prompt that was used now; O(pages).

        It takes the place of the beginnings of it that were noted before.
        """
        keys = page_keys(digest, tokens, self._page_tokens)
        if not len(keys):
            return
        tokens = tokens[: len(keys) * self._page_tokens]
        prompt = Deferred(digest, tokens, recency, handle)
        prompt.name = keys[-1].tobytes()
        for key in keys:
            before = self._prompts.pop(key.tobytes(), None)
            if before is not None:
                prompt.num_uses = max(prompt.num_uses, before.num_uses + 1)
                if before.name == prompt.name:
                    prompt.first_recency = before.first_recency
                self._clean_pages -= before.num_clean
        self._prompts[prompt.name] = prompt
        self._push(prompt)
        if len(self._heap) > 2 * _MAX_PROMPTS:
            # Those that were replaced and never came to the top.
            self._heap = [item for item in self._heap if self._is_known(item[-1])]
            heapq.heapify(self._heap)
        if len(self._prompts) > _MAX_PROMPTS:
            coldest = self._pop()
            if coldest is not None:
                del self._prompts[coldest.name]

    def next(self, free_pages: int) -> Deferred | None:
        """Return the coldest prompt without copies, if the device needs room for it.

        The same again until ``settle`` or ``note`` is called for it, or the queue has
        changed. O(log prompts) for each one that is passed over.
        """
        if free_pages + self._clean_pages >= self._reserve_pages:
            return None
        found, last_use = None, 0.0
        looked_at = []
        while last_use < math.inf and (prompt := self._pop()) is not None:
            looked_at.append(prompt)
            next_use = self._next_use(prompt)
            if next_use > last_use:
                found, last_use = prompt, next_use
        for prompt in looked_at:
            self._push(prompt)
        return found

    def settle(self, prompt: Deferred, num_pages: int) -> None:
        """Note that a prompt's first pages have copies, or cannot have any now."""
        if not self._is_known(prompt) or prompt.num_clean:
            return
        if not num_pages:
            del self._prompts[prompt.name]
            return
        prompt.num_clean = num_pages
        self._clean_pages += num_pages
        self._clean.append(prompt)

    def sweep(
        self, num_resident: Callable[[Deferred], int]
    ) -> list[tuple[Deferred, int]]:
        """Forget what the device has evicted; to be called after it did.

        Looks at the coldest only, up to the first that is still there.

        Args:
            num_resident: says how many of a prompt's first pages are on the device.

        Returns:
            Prompts that were not copied and lost pages, each with the number of pages
            that are left; these remain noted.
        """
        while self._clean:
            prompt = self._clean[0]
            if self._is_known(prompt):
                if num_resident(prompt) >= prompt.num_clean:
                    break
                del self._prompts[prompt.name]
                self._clean_pages -= prompt.num_clean
            self._clean.popleft()
        lost = []
        while (coldest := self._pop()) is not None:
            num_left = num_resident(coldest)
            if num_left * self._page_tokens >= len(coldest.tokens):
                self._push(coldest)
                break
            lost.append((coldest, num_left))
            del self._prompts[coldest.name]
        for prompt, num_left in lost:
            self._shorten(prompt, num_left)
        return lost

    def forget_copies(self) -> None:
        """Count every prompt as uncopied again (the tiers below were dropped)."""
        for prompt in self._clean:
            if self._is_known(prompt):
                prompt.num_clean = 0
                self._push(prompt)
        self._clean.clear()
        self._clean_pages = 0

    def clear(self) -> None:
        """Forget all prompts."""
        self._prompts.clear()
        self._heap.clear()
        self._clean.clear()
        self._clean_pages = 0

    def _shorten(self, prompt: Deferred, num_pages: int) -> None:
        """Keep the beginning of a prompt, as recent as the whole was."""
        left = prompt.tokens[: num_pages * self._page_tokens]
        keys = page_keys(prompt.digest, left, self._page_tokens)
        if len(keys) and keys[-1].tobytes() not in self._prompts:
            shorter = Deferred(prompt.digest, left, prompt.recency, prompt.handle)
            shorter.name = keys[-1].tobytes()
            shorter.first_recency = prompt.first_recency
            shorter.num_uses = prompt.num_uses
            self._prompts[shorter.name] = shorter
            self._push(shorter)

    def _is_known(self, prompt: Deferred) -> bool:
        return self._prompts.get(prompt.name) is prompt

    def _next_use(self, prompt: Deferred) -> float:
        """Return the place in the queue of who uses all of a prompt; infinite: none."""
        if self._lookahead is None:
            return math.inf
        return self._lookahead.next_use(int(np.frombuffer(prompt.name, np.uint64)[0]))

    def _priority(self, prompt: Deferred) -> float:
        return self._policy.priority(
            EvictionFacts(
                tier=TierId.DEVICE,
                num_pages=len(prompt.tokens) // self._page_tokens,
                last_access_s=prompt.recency[1],
                inserted_s=prompt.first_recency[1],
                access_sequence=prompt.recency[0],
                insert_sequence=prompt.first_recency[0],
                num_hits=prompt.num_uses - 1,
                score=0.0,
            )
        )

    def _push(self, prompt: Deferred) -> None:
        # Facts of a prompt do not change: a use makes a new one. So no item is stale
        # but those of prompts that are forgotten.
        self._num_pushed += 1
        recency = prompt.recency[0]
        item = (self._priority(prompt), recency, self._num_pushed, prompt)
        heapq.heappush(self._heap, item)

    def _pop(self) -> Deferred | None:
        """Take the coldest that has no copies out of the heap."""
        while self._heap:
            *_, prompt = heapq.heappop(self._heap)
            if self._is_known(prompt) and not prompt.num_clean:
                return prompt
        return None
