"""In what order the device's own tree gives up its runs: policy, queue and history.

The device's tree is the engine's. It hands in what it knows of a node, and evicts the
lowest number first. Shared by the engine's tree and the simulator's model of it.
"""

from __future__ import annotations

import math

import numpy as np

from sgl_tiered.cache.lookahead import QueueLookahead, short_keys
from sgl_tiered.cache.reuse import ReuseHistory
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import page_keys
from sgl_tiered.core.plans import Int32s
from sgl_tiered.policies.eviction.base import EvictionFacts, EvictionPolicy

__all__ = ["DeviceRanking"]


class DeviceRanking:
    """Ranks runs of the device's tree.

    Args:
        policy: ranks.
        capacity_pages: pages of the device.
        page_tokens: tokens of a page, as they are handed in here.
        lookahead: the queue; None where there is none.
        real_page_tokens: where a page is handed in as one stand-in token: how many
            tokens it really has.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        capacity_pages: int,
        page_tokens: int,
        lookahead: QueueLookahead | None,
        *,
        real_page_tokens: int | None = None,
    ) -> None:
        self.policy = policy
        self.lookahead = lookahead if policy.needs_queue else None
        self._page_tokens = page_tokens
        self._history: ReuseHistory | None = None
        if policy.needs_reuse:
            tokens = page_tokens if real_page_tokens is None else real_page_tokens
            self._history = ReuseHistory(capacity_pages, tokens)

    @property
    def looks_ahead(self) -> bool:
        """Whether anybody waits, so that a run's key is asked for."""
        return self.lookahead is not None and len(self.lookahead) > 0

    @property
    def learns(self) -> bool:
        """Whether ``see`` is to be told of uses."""
        return self._history is not None

    @property
    def version(self) -> int:
        """Grows when what is learned begins or ceases to be used."""
        return 0 if self._history is None else self._history.version

    @property
    def is_aging(self) -> bool:
        """Whether numbers fall as runs age, so that they are to be asked anew."""
        return self._history is not None and self._history.is_used

    def see(
        self, digest: bytes, tokens: Int32s, seen_pages: int, sequence: int
    ) -> list[int]:
        """Note that a request used its pages; return the kind of each.

        Args:
            digest: the namespace.
            tokens: int32, the request's pages from its start.
            seen_pages: leading pages of earlier calls for the same request.
            sequence: number of the access, as ``number`` is told it.
        """
        if self._history is None:
            return []
        keys = short_keys(page_keys(digest, tokens, self._page_tokens))
        kinds: list[int] = self._history.see(keys, seen_pages, sequence).tolist()
        return kinds

    def last_key(self, before: bytes, tokens: Int32s) -> bytes:
        """Return the key of the last of some pages that follow the key ``before``."""
        keys = page_keys(before, tokens, self._page_tokens)
        return keys[-1].tobytes() if len(keys) else before

    def number(
        self,
        key: bytes | None,
        kind: int,
        num_pages: int,
        accessed: int,
        inserted: int,
        num_hits: int,
    ) -> float:
        """Return a run's number; the lowest is evicted first.

        Args:
            key: of its last page; None where nobody ``looks_ahead``.
            kind: of its last page, from ``see``.
            num_pages: of the run.
            accessed, inserted: numbers of its last access and of the one that made it.
            num_hits: times that it was used again.
        """
        score, queued, next_use, worth = 0.0, 0, math.inf, 0.0
        if key is not None and self.lookahead is not None:
            short = int(np.frombuffer(key, np.uint64, 1)[0])
            queued = self.lookahead.queued(short)
            next_use = self.lookahead.next_use(short)
            score = self.lookahead.score(short)
        if self._history is not None:
            worth = self._history.density(kind, accessed)
        return self.policy.priority(
            EvictionFacts(
                tier=TierId.DEVICE,
                num_pages=num_pages,
                last_access_s=float(accessed),
                inserted_s=float(inserted),
                access_sequence=accessed,
                insert_sequence=inserted,
                num_hits=num_hits,
                score=score,
                queued=queued,
                next_use=next_use,
                worth=worth,
            )
        )
