"""Our eviction policies on the device, through SGLang's own tree.

SGLang's Rust tree knows its own policies only. Its Python tree asks a strategy object
for the number of each leaf whenever it evicts, so a policy is plugged in there, and the
Python tree is used only where one was asked for. The names of what is stored on
SGLang's nodes begin with ``tiered_``: the key of a run's last page (it stays right when
a run is split, since the lower part stays the old node) and its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.utils import _EVICTION_POLICY_FACTORIES

from sgl_tiered.cache.device_ranking import DeviceRanking
from sgl_tiered.core.plans import Int32s

__all__ = ["DeviceStrategy", "use_device_policy"]

_NAME = "tiered"

TokensOf = Callable[[Any, int], Int32s | None]
"""(token ids, how many) -> int32, or None where they are not plain."""
NamespaceOf = Callable[[str | None, str | None], bytes | None]
"""(extra key, cache salt) -> digest, or None while there is none."""


class DeviceStrategy(EvictionStrategy):
    """Numbers of SGLang's nodes; the lowest goes first.

    Args:
        ranking: says them.
        namespace_of, tokens_of: as the tree's user knows them.
    """

    def __init__(
        self, ranking: DeviceRanking, namespace_of: NamespaceOf, tokens_of: TokensOf
    ) -> None:
        self.ranking = ranking
        self._namespace_of = namespace_of
        self._tokens_of = tokens_of

    def get_priority(self, node: Any) -> float:
        """Return the number of a leaf, as SGLang asks for it."""
        return self.ranking.number(
            self._key(node) if self.ranking.looks_ahead else None,
            getattr(node, "tiered_kind", 0),
            len(node.key),
            int(node.last_access_time),
            int(node.creation_time),
            int(node.hit_count),
        )

    def note(
        self,
        node: Any,
        digest: bytes,
        tokens: Int32s,
        seen_pages: int,
        page_tokens: int,
    ) -> None:
        """Tell a policy that learns of a request's pages, which end with ``node``.

        Args:
            node: of the tree.
            digest: the namespace.
            tokens: int32, whole pages of the request from its start.
            seen_pages: leading pages of earlier calls for the same request.
            page_tokens: tokens of a page.
        """
        if not self.ranking.learns:
            return
        sequence = int(node.last_access_time)
        kinds = self.ranking.see(digest, tokens, seen_pages, sequence)
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        end = 0
        for part in reversed(path):
            end += len(part.key) // page_tokens
            if 0 < end <= len(kinds):
                part.tiered_kind = kinds[end - 1]

    def _key(self, node: Any) -> bytes | None:
        """Return the key of a run's last page; derived once per run."""
        known: bytes | None = getattr(node, "tiered_key", None)
        if known is not None:
            return known
        before: bytes | None
        if node.parent.parent is None:
            before = self._namespace_of(node.key.extra_key, node.key.cache_salt)
        else:
            before = self._key(node.parent)
        ids = node.key.raw_token_ids()
        tokens = self._tokens_of(ids, len(ids))
        if before is None or tokens is None:
            return None
        key = self.ranking.last_key(before, np.ascontiguousarray(tokens))
        node.tiered_key = key
        return key


def use_device_policy(params: Any, strategy: DeviceStrategy) -> None:
    """Make the tree that is built from SGLang's ``params`` ask our strategy."""
    _EVICTION_POLICY_FACTORIES[_NAME] = lambda: strategy
    params.eviction_policy = _NAME
    params.eviction_policy_config = None
    params.tree_core_backend = "python"
