"""What a simulated server can tell an order of its waiting requests.

The same as an engine: the device's tree is asked where it holds the prompt, the real
cache what it would bring, the planner what both would cost.
"""

from __future__ import annotations

from collections.abc import Hashable

from sgl_tiered.policies.order.base import Location
from sgl_tiered.policies.order.queue import Outlook
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.device_tree import DeviceTree
from sgl_tiered.sim.lower import LowerTiers
from sgl_tiered.sim.sequence import Sequence

__all__ = ["SimFacts"]

_KIN_PAGES = 1
"""Requests with the same first page are kin."""


class SimFacts:
    """A ``FactsSource`` over the simulated device and the tiers below it.

    Args:
        config: of the server.
        tree: the device's pages; only ever asked without touching them.
        lower: the tiers, or None.
    """

    def __init__(
        self, config: ServerConfig, tree: DeviceTree, lower: LowerTiers | None
    ) -> None:
        self._config = config
        self._page = config.page_tokens
        self._tree = tree
        self._lower = lower

    def num_prompt_tokens(self, key: Sequence) -> int:
        """Return the tokens to have KV for."""
        return key.input_tokens

    def kin(self, key: Sequence) -> Hashable:
        """Return the first page's stand-in."""
        return key.page_raw[: _KIN_PAGES * 4]

    def guess(self, key: Sequence) -> Outlook:
        """Return the outlook of a prompt that is computed whole."""
        return self._computed(key, 0)

    def look(self, key: Sequence) -> Outlook:
        """Return where the prompt is now."""
        num_matched = 0
        if self._config.device_reuse:
            num_matched = self._tree.find(key.matchable_raw(self._page))[1]
        if self._lower is None:
            return self._computed(key, num_matched)
        num_pages = -(-key.input_tokens // self._page)
        found = self._lower.foresee(key.index, num_matched, num_pages)
        uncached = found.num_uncached_tokens * self._page
        return Outlook(
            found.location,
            min(uncached, key.input_tokens),
            found.service_s,
            found.has_history,
            num_matched * self._page,
        )

    def _computed(self, key: Sequence, num_matched: int) -> Outlook:
        done = num_matched * self._page
        new = max(key.input_tokens - done, 1)
        return Outlook(
            Location.DEVICE if num_matched else Location.NOWHERE,
            new,
            self._config.times.prefill_s([(done, new)]),
            num_matched > 0,
            done,
        )
