"""The tiered cache of a decode instance.

Prompts arrive from a prefill instance, so nothing is loaded here: the device's pages
are reused, and what else a prompt has is sent. The tiers below keep what ended, for the
instances that ask for it. A request is offloaded once, when it has ended, so that its
decode steps pay for no copy.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.coordinator import RequestState
from sgl_tiered.engines.sglang.fetching import LendingRadixCache

__all__ = ["DecodeRadixCache"]


class DecodeRadixCache(TieredRadixCache):
    """TieredRadixCache whose prompts come from elsewhere."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match on the device only."""
        return LendingRadixCache.match_prefix(self, params)

    def _offload(self, req: Any, state: RequestState | None, num_tokens: int) -> None:
        """Offload a request that has ended; one that only pauses may come back."""
        if req.finished():
            super()._offload(req, state, num_tokens)
