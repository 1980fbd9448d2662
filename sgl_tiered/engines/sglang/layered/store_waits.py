"""How long decode steps wait for stores that read what could leave the device."""

from __future__ import annotations

import logging

from sgl_tiered.engines.sglang.layered.driver import LayerDriver

__all__ = ["PATIENCE_S", "StoreWaits"]

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Without an end or a begin of any store; then they are taken to be stuck."""


class StoreWaits:
    """Says whether stores are worth waiting for.

    The end of one may leave room. Where none ends or begins for a while, steps are made
    as if there were none: a store that never ends holds nobody for longer.

    Args:
        driver: knows the stores.
    """

    def __init__(self, driver: LayerDriver) -> None:
        self._driver = driver
        self._stores: frozenset[int] = frozenset()
        self._since_s = 0.0
        self._is_told = False

    def are_due(self, num_reqs: int, now_s: float) -> bool:
        """Return whether requests without room should wait for a store's end.

        Args:
            num_reqs: that would wait.
            now_s: on the clock of all ranks.
        """
        stores = self._driver.stores
        if stores != self._stores:
            self._stores, self._since_s, self._is_told = stores, now_s, False
        waited_s = now_s - self._since_s
        if not stores or waited_s < PATIENCE_S:
            return bool(stores)
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "sgl-tiered: %d request(s) had no room for their next tokens for "
                "%.1f s, as none of %d store(s) that read what could leave has ended. "
                "They decode without waiting for these; who finds no room gets a 503.",
                num_reqs,
                waited_s,
                len(stores),
            )
        return False
