"""Our orders of the waiting queue, in the place of SGLang's.

SGLang asks its policy before every prefill pass to put ``waiting_queue`` in order; then
it takes requests from the front as long as they fit. Ours arranges the queue in place.
Requests are known by their ids; what the caches say of them is looked up a few at a
time (``policies/order/queue.py``), never for the whole queue. Every rank arranges, by
facts that all agree on: a look at SGLang's tree is a use of it, on all ranks or none.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from sgl_tiered.cache.foresight import foresee
from sgl_tiered.policies.order.base import Location
from sgl_tiered.policies.order.queue import Outlook, QueueOrder
from sgl_tiered.policies.order.registry import make_order
from sgl_tiered.serving.agreement import Agreement

__all__ = ["EngineFacts", "schedule_policy"]

_NO_TIERS = np.zeros(0, np.uint8)


class EngineFacts:
    """A ``FactsSource`` over SGLang's tree and the tiers below it.

    Args:
        cache: the ``TieredRadixCache``.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        # Of the requests that wait, during a pass.
        self.num_tokens: dict[str, int] = {}

    def num_prompt_tokens(self, key: str) -> int:
        """Return the tokens of the prompt, with the answer so far."""
        return self.num_tokens[key]

    def kin(self, key: str) -> Hashable:
        """Return the first page's tokens under the request's namespace."""
        state = self._cache.tiered.coordinator.state(key)
        if state is None:
            return key
        first_page: bytes = state.tokens[: self._cache.page_size].tobytes()
        return first_page, state.digest

    def guess(self, key: str) -> Outlook:
        """Return the outlook of a prompt that is computed whole."""
        num_tokens = self.num_tokens[key]
        planner = self._cache.tiered.cache.planner
        service_s = planner.service_s(_NO_TIERS, 0, num_tokens)
        return Outlook(Location.NOWHERE, num_tokens, service_s, has_history=False)

    def look(self, key: str) -> Outlook:
        """Return where the prompt is now; as computed whole where no tier serves it."""
        found = self._cache.waiting_request(key)
        if found is None:
            return self.guess(key)
        state, device_pages = found
        cache = self._cache.tiered.cache
        return foresee(cache, state, device_pages, self.num_tokens[key])


def schedule_policy(scheduler: Any, agreement: Agreement) -> Any:
    """Return SGLang's policy with our order, for a scheduler with tiers.

    Args:
        scheduler: SGLang's, which has made its own policy.
        agreement: between the ranks, on the time above all.
    """
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    cache = scheduler.tree_cache
    facts = EngineFacts(cache)
    queue: QueueOrder[str] = QueueOrder(
        make_order(cache.tiered.config.queue.order), facts
    )
    metrics = cache.tiered.metrics

    class TieredSchedulePolicy(SchedulePolicy):
        """Arranges the queue by one of our orders."""

        def calc_priority(self, waiting_queue: Any, *args: Any, **kwargs: Any) -> None:
            """Put the queue in order, in place."""
            facts.num_tokens = {
                req.rid: len(req.origin_input_ids) + len(req.output_ids)
                for req in waiting_queue
            }
            rids = list(facts.num_tokens)
            # An id that comes twice would be refused before; it must not end a server.
            if len(rids) == len(waiting_queue):
                self._arrange(waiting_queue, rids)
            # Under fcfs, which the flags make sure of, this sorts nothing; it keeps
            # what the queue needs from being evicted, the head's last of all.
            super().calc_priority(waiting_queue, *args, **kwargs)

        def _arrange(self, waiting_queue: Any, rids: list[str]) -> None:
            positions = list(queue.arrange(rids, agreement.now()))
            agreement.note(positions)
            if positions != list(range(len(rids))):
                waiting_queue[:] = [waiting_queue[i] for i in positions]
                metrics.add("queue_rearranged")

    return TieredSchedulePolicy(
        scheduler.schedule_policy,
        cache,
        scheduler.enable_hierarchical_cache,
        scheduler.enable_priority_scheduling,
        scheduler.schedule_low_priority_values_first,
    )
