"""SGLang's device as the prefetcher sees it: slots lent to copies ahead of admission.

Slots come from SGLang's allocator and are nobody's while they are copied to. They count
as evictable, which they are: ``LendingRadixCache`` gives them back before it evicts
anything, so that no admission and no decode step has less room for them. Once all
layers are there the pages go into the tree like those of a request that has ended.
Everything here runs on the scheduler's thread, between two steps of SGLang's tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_tiered.cache.device_prefetcher import DevicePrefetcher, Waiting
from sgl_tiered.core.clock import Clock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.engines.device.tokens import page_numbers
from sgl_tiered.engines.sglang.runtime import TieredRuntime
from sgl_tiered.engines.sglang.tier_events import AnnouncingRadixCache
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.fetch import FetchTicket
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.tiers.base import MemoryTier

__all__ = ["DeviceFetcher", "LendingRadixCache", "make_fetcher"]


class LendingRadixCache(AnnouncingRadixCache):
    """SGLang's tree, some of whose slots are lent to copies under way."""

    # Set here, as the parent's constructor already asks for sizes.
    fetcher: DeviceFetcher | None = None
    # Whether KV of other instances is received in slots, behind no stream.
    receives = False

    def evictable_size(self) -> int:
        """Return the tokens that ``evict`` can free, lent ones included."""
        return int(super().evictable_size()) + self._num_lent

    def full_evictable_size(self) -> int:
        """Return the same, as hybrid models ask for it."""
        return int(super().full_evictable_size()) + self._num_lent

    def evict(self, params: EvictParams) -> Any:
        """Take back what is lent, then evict what is still missing."""
        given, left = self._give_back(params)
        result = super().evict(left)
        result.num_tokens_evicted += given
        return result

    def evict_for_alloc(
        self, params: EvictParams, *, allocation_reclaim_satisfied: Any = None
    ) -> Any:
        """Like ``evict``, as the allocator calls it."""
        given, left = self._give_back(params)
        result = super().evict_for_alloc(
            left, allocation_reclaim_satisfied=allocation_reclaim_satisfied
        )
        result.num_tokens_evicted += given
        return result

    def evict_leaves(self, num_tokens: int) -> None:
        """Evict from the tree alone."""
        super().evict(EvictParams(num_tokens=num_tokens))

    def give_slots(self, slots: torch.Tensor) -> None:
        """Give slots of whole pages back, in the order in which they were taken.

        As a segment: the allocator's ``free`` asks the device which pages they are.
        """
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)

    @property
    def has_kinds(self) -> bool:
        """Whether pages may be kept as activations, as ``page_kinds`` then says."""
        return False

    @property
    def _num_lent(self) -> int:
        return 0 if self.fetcher is None else self.fetcher.num_lent

    def end_fetches(self) -> None:
        """Take all lent slots back; what was under way never comes to the tree."""
        if self.fetcher is not None:
            self.fetcher.give_back(self.fetcher.num_lent)

    def _give_back(self, params: EvictParams) -> tuple[int, EvictParams]:
        if not self._num_lent or params.num_tokens <= 0:
            return 0, params
        assert self.fetcher is not None
        given = self.fetcher.give_back(params.num_tokens)
        return given, replace(params, num_tokens=max(params.num_tokens - given, 0))


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    plan: LoadPlan
    ticket: FetchTicket
    slots: torch.Tensor
    prefix: RadixKey


class DeviceFetcher:
    """Puts pages on the device ahead of admission.

    Args:
        tree: gets them; its allocator is asked for slots.
        prefetcher: told of ends.
        device: the tree's memory.
        loader: copies.
        memory: the tiers that are read in place.
        clock: times the copies.
        metrics: counts them.
        note_end: called with the tiers read and an error, empty for none.
        may_evict: whether what the tree would drop next may go for a fetch: only while
            pages are offloaded when they come, so not under ``on-evict``, nor while
            ``auto`` or ``selective`` copies only what was seen twice; asked each time.
    """

    def __init__(
        self,
        tree: LendingRadixCache,
        prefetcher: DevicePrefetcher,
        device: DevicePool,
        loader: LayerwiseLoader,
        memory: Mapping[TierId, MemoryTier],
        clock: Clock,
        metrics: MetricsRegistry,
        note_end: Callable[[TierId, str], None],
        *,
        may_evict: Callable[[], bool],
    ) -> None:
        self._tree = tree
        self._prefetcher = prefetcher
        self._device = device
        self._loader = loader
        self._memory = memory
        self._clock = clock
        self._metrics = metrics
        self._note_end = note_end
        self._may_evict = may_evict
        self._flights: dict[int, _Flight] = {}
        # Tokens that are neither free nor in the tree.
        self.num_lent = 0
        # Waiting request -> its prompt as the tree knows it.
        self.keys: dict[Waiting, RadixKey] = {}
        prefetcher.room = self

    def room_pages(self) -> int:
        """Return the pages that could be had."""
        tree = self._tree
        free = tree.token_to_kv_pool_allocator.available_size()
        return int(free + tree.evictable_size()) // int(tree.page_size)

    def submit(self, plan: LoadPlan, state: Waiting, keep: Sequence[Waiting]) -> bool:
        """Take slots and start copying; False where there are too few."""
        key, page = self.keys.get(state), int(self._tree.page_size)
        if key is None:
            return False
        slots = self._take(plan.num_pages * page, keep)
        if slots is None:
            return False
        pages = page_numbers(self._device, slots[::page], page)
        segments = []
        for tier, memory in self._memory.items():
            chosen = np.flatnonzero(plan.tiers == tier)
            if len(chosen):
                addresses = plan.addresses[chosen]
                segments.append(Segment.of_tier(memory, addresses, chosen))
        job = LoadJob(plan, tuple(segments), pages)
        ticket = FetchTicket(job, self._device, self._clock)
        if not self._loader.submit_steps(ticket):
            self._tree.give_slots(slots)
            return False
        # Of the cache's own tokens, by which the pages were found.
        wide = state.tokens[: (plan.first_page + plan.num_pages) * page]
        tokens = array("q", wide.astype(np.int64).tobytes())
        prefix = RadixKey(tokens, key.extra_key, cache_salt=key.cache_salt)
        self._flights[plan.plan_id] = _Flight(plan, ticket, slots, prefix)
        self.num_lent += len(slots)
        return True

    def cancel(self, plan_id: int) -> None:
        """Give the slots of one back; ``FetchTicket.cancel`` says when."""
        flight = self._flights.pop(plan_id)
        flight.ticket.cancel(lands=self._tree.receives)
        self._free(flight)
        self._metrics.add("fetches_cancelled")
        self._prefetcher.ended(flight.plan, landed=False)

    def give_back(self, num_tokens: int) -> int:
        """Cancel the latest until as many slots are free; return how many are."""
        num_given = 0
        while self._flights and num_given < num_tokens:
            plan_id = next(reversed(self._flights))
            num_given += len(self._flights[plan_id].slots)
            self.cancel(plan_id)
        return num_given

    def poll(self) -> bool:
        """Put what has landed into the tree; return whether any copy has ended."""
        ended = [f for f in self._flights.values() if f.ticket.ended]
        for flight in ended:
            del self._flights[flight.plan.plan_id]
            landed = flight.ticket.landed and self._publish(flight)
            self._count(flight, landed=landed)
            self._prefetcher.ended(flight.plan, landed=landed)
        return bool(ended)

    # -- Private ---------------------------------------------------------------

    def _take(self, num_tokens: int, keep: Sequence[Waiting]) -> torch.Tensor | None:
        tree = self._tree
        allocator = tree.token_to_kv_pool_allocator
        shortfall = num_tokens - allocator.available_size()
        if shortfall > 0 and self._may_evict():
            # Those far back in the queue are to go first.
            for state in reversed(keep):
                key = self.keys.get(state)
                if key is not None:
                    tree.touch_prefix(key)
            tree.evict_leaves(shortfall)
            shortfall = num_tokens - allocator.available_size()
        if shortfall > 0:
            return None
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        return None if slots is None else slots.to(torch.int64)

    def _free(self, flight: _Flight) -> None:
        self.num_lent -= len(flight.slots)
        self._tree.give_slots(flight.slots)

    def _publish(self, flight: _Flight) -> bool:
        """Make the pages a part of the tree; False where they came too late for it.

        What precedes them may be gone by now, and some or all of them may have been
        computed or loaded meanwhile: the tree's own stay.
        """
        tree, prefix, slots = self._tree, flight.prefix, flight.slots
        first = flight.plan.first_page * int(tree.page_size)
        num_known, node, _ = tree.tree_core.match_full_device_prefix(prefix)
        if not first <= num_known < len(prefix):
            self._free(flight)
            return False
        self.num_lent -= len(slots)
        if num_known > first:
            tree.give_slots(slots[: num_known - first])
        value = slots[num_known - first :]
        if num_known:
            root = tree.root_node_handle(prefix.extra_key)
            path = tree.tree_core.collect_full_device_indices(node, root)
            value = torch.cat([path[:num_known].to(value.device), value])
        tree.insert(
            InsertParams(
                key=prefix,
                value=value,
                prev_prefix_len=num_known,
                inserted_len=len(prefix),
            )
        )
        return True

    def _count(self, flight: _Flight, *, landed: bool) -> None:
        ticket, plan = flight.ticket, flight.plan
        if not ticket.landed:
            self._free(flight)
            self._metrics.add("fetches_failed")
            if ticket.failed_source is not None:
                self._note_end(ticket.failed_source, ticket.failed)
            return
        self._metrics.add("fetches" if landed else "fetches_late")
        self._metrics.add("fetched_pages", plan.num_pages if landed else 0)
        for tier in self._memory:
            num_pages = int(np.count_nonzero(plan.tiers == tier))
            if num_pages:
                self._note_end(tier, "")
                self._metrics.record_transfer(
                    tier,
                    TierId.DEVICE,
                    num_pages=num_pages,
                    num_bytes=num_pages * self._device.layout.page_bytes,
                    seconds=ticket.seconds * num_pages / plan.num_pages,
                )


def make_fetcher(
    tree: LendingRadixCache, tiered: TieredRuntime, prefetcher: DevicePrefetcher
) -> DeviceFetcher:
    """Return the fetcher of a tree over the tiers of a runtime."""
    parts = tiered.parts
    return DeviceFetcher(
        tree,
        prefetcher,
        parts.device,
        parts.loader,
        parts.memory,
        parts.clock,
        parts.metrics,
        tiered.note_copy,
        may_evict=lambda: parts.cache.copies_at_once,
    )
