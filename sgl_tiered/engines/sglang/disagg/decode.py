"""The tiered cache of a decode instance.

Prompts arrive from a prefill instance, so nothing is loaded here: the device's pages
are reused, and what else a prompt has is sent. The tiers below keep what ended, for the
instances that ask for it and for the one that computed the prompt (``returning.py``).
A request is offloaded once, when it has ended: its decode steps pay for no copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.coordinator import RequestState
from sgl_tiered.engines.sglang.disagg.returning import AnswerReturns, Ended
from sgl_tiered.engines.sglang.fetching import LendingRadixCache
from sgl_tiered.engines.sglang.tokens import plain_tokens

__all__ = ["DecodeRadixCache"]


class DecodeRadixCache(TieredRadixCache):
    """TieredRadixCache whose prompts come from elsewhere."""

    # Set by ``return_answers``; the parent's constructor calls ``reset``.
    _returns: AnswerReturns | None = None
    _receiver_of: Callable[[int], tuple[int, int] | None] | None = None
    _after: dict[int, Ended] | None = None

    def return_answers(
        self,
        returns: AnswerReturns,
        receiver_of: Callable[[int], tuple[int, int] | None],
    ) -> None:
        """Return answers to the instances that computed their prompts from now on.

        Args:
            returns: sends them.
            receiver_of: gives the instance behind a bootstrap room, once.
        """
        self._returns, self._receiver_of, self._after = returns, receiver_of, {}

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match on the device only."""
        return LendingRadixCache.match_prefix(self, params)

    def check_hicache_events(self) -> None:
        """Take the ends of offloads, and move returns along."""
        super().check_hicache_events()
        if self._returns is not None:
            self._returns.poll()

    def reset(self) -> None:
        """Forget every page, and what waits to be returned."""
        if self._returns is not None and self._after is not None:
            self._returns.clear()
            self._after.clear()
        super().reset()

    def _offload(self, req: Any, state: RequestState | None, num_tokens: int) -> None:
        """Offload a request that has ended; one that only pauses may come back."""
        if not req.finished():
            return
        before = set(self._locks)
        super()._offload(req, state, num_tokens)
        if self._returns is None or self._receiver_of is None:
            return
        receiver = self._receiver_of(req.bootstrap_room)
        num_pages = num_tokens // self.page_size
        tokens = plain_tokens(req.full_untruncated_fill_ids, num_pages * self.page_size)
        if receiver is None or tokens is None or not num_pages:
            return
        digest = self.tiered.namespace(req.extra_key, req.cache_salt)
        ended = Ended(receiver, digest, tokens)
        plans = set(self._locks) - before
        if plans and self._after is not None:
            self._after[plans.pop()] = ended
        else:
            # All of it is in the host tier, or on its way there for somebody else.
            self._returns.add(ended)

    def _unlock_offload(self, plan_id: int) -> None:
        super()._unlock_offload(plan_id)
        ended = None if self._after is None else self._after.pop(plan_id, None)
        if ended is not None and self._returns is not None:
            self._returns.add(ended)
