"""SGLang's radix cache with tiers below the device.

SGLang's tree keeps the device level. This class tells it what the tiers below hold
(as a host hit), brings those pages into slots of the request's own, and offloads what
requests leave behind. Loaded slots stay private to their request until its first
checkpoint puts them into the tree; until then other requests for the same pages wait.
All methods run on the scheduler's thread; bytes move on the pipelines' threads.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import OffloadPlan
from sgl_tiered.engines.device.tokens import device_pages, page_numbers, plain_tokens
from sgl_tiered.engines.sglang.ahead import OffloadAhead
from sgl_tiered.engines.sglang.device_eviction import DeviceStrategy
from sgl_tiered.engines.sglang.fetching import LendingRadixCache, make_fetcher
from sgl_tiered.engines.sglang.prefetching import QueuePrefetch
from sgl_tiered.engines.sglang.repair import compute_missing
from sgl_tiered.engines.sglang.requeue import begins_anew, end
from sgl_tiered.engines.sglang.runtime import TieredRuntime
from sgl_tiered.pipelines.layerwise_load import LoadJob
from sgl_tiered.pipelines.page_numbers import PageNumbers
from sgl_tiered.serving.attribution import cached_by_tier, note_load
from sgl_tiered.serving.coordinator import RequestState
from sgl_tiered.serving.loading_pass import Load, LoadingPass
from sgl_tiered.serving.lossy import kept_exact

__all__ = ["TieredRadixCache"]

logger = logging.getLogger(__name__)


class TieredRadixCache(LendingRadixCache):
    """UnifiedRadixCache over host, CXL and disk tiers.

    Args:
        params: SGLang's construction facts.
        runtime: cache, tiers and pipelines of this rank.
        strategy: ranks the device's pages; None where SGLang does.
    """

    _leave: npt.NDArray[np.bool_] | None = None  # by page: parts are not on the device
    _kinds: npt.NDArray[np.uint8] | None = None  # by page: KV or activations

    def __init__(
        self,
        params: Any,
        runtime: TieredRuntime,
        strategy: DeviceStrategy | None = None,
    ) -> None:
        # The parent's constructor calls reset() before there is anything to reset.
        self._tiered: TieredRuntime | None = None
        self._ahead: OffloadAhead | None = None
        self._prefetch: QueuePrefetch | None = None
        self._keys: dict[str, RadixKey] = {}
        self._queued: list[tuple[Any, LoadJob]] = []
        self._private: dict[str, torch.Tensor] = {}
        self._backs: dict[str, torch.Tensor] = {}
        # Batches with loads that are not known to have ended, the oldest first.
        self._passes: list[LoadingPass] = []
        # Requests whose loads failed that are to be queued again, each with how often
        # SGLang had retracted it: if that grows, it is queued already.
        self.lost: list[tuple[Any, int]] = []
        # Whether there were such, in whose place others are in batches in flight.
        self.has_stand_ins = False
        # Where in its prompt a request's load goes: begin and end, in tokens.
        self._spans: dict[str, tuple[int, int]] = {}
        self._locks: dict[int, tuple[Any, Any]] = {}
        super().__init__(params)
        self._tiered = runtime
        self._strategy = strategy
        runtime.on_offload_end = self._offload_ended
        if runtime.deferred is not None:
            self._ahead = OffloadAhead(self, runtime, runtime.deferred)

    @property
    def tiered(self) -> TieredRuntime:
        """The tiers below this tree."""
        assert self._tiered is not None
        return self._tiered

    def watch_queue(self, scheduler: Any) -> None:
        """Read ahead for the requests that wait in this scheduler's queue."""
        prefetcher = self.tiered.prefetcher
        if prefetcher is not None:
            if prefetcher.device is not None:
                self.fetcher = make_fetcher(self, self.tiered, prefetcher.device)
            self._prefetch = QueuePrefetch(
                scheduler,
                self.tiered.coordinator,
                prefetcher,
                self.tiered.clock,
                self.fetcher,
            )
            self.tiered.on_promoted = self._prefetch.changed
            lengths = self.tiered.lengths
            if lengths is not None:
                self._prefetch.predict = lambda req: lengths.prediction(req).median

    # -- What a waiting request may count on -----------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match on the device, and report what the tiers add as a host hit."""
        result = super().match_prefix(params)
        state = self._track(params.key, params.req)
        if state is None:
            return result
        device_pages = result.device_prefix_len // self.page_size
        num_pages = self.tiered.coordinator.loadable_pages(state, device_pages)
        if num_pages == 0:
            return result
        num_tokens = num_pages * self.page_size
        return result._replace(
            last_host_node=result.best_match_node,
            host_hit_length=num_tokens,
            full_kv_hit_length=result.device_prefix_len + num_tokens,
        )

    def waiting_request(self, rid: str) -> tuple[RequestState, int] | None:
        """Return a request's state and how many of its pages are on the device now."""
        state = self._current(rid)
        if state is None:
            return None
        key = self._keys[rid]
        on_device = self._match_tree(MatchPrefixParams(key=key)).device_prefix_len
        return state, on_device // self.page_size

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Start reading from disk as soon as the request is queued, if that is asked.

        Where nothing runs or waits it will be looked at right away, and may be split.
        """
        if not self.tiered.weights.settled:
            self.tiered.metrics.add("requests_weights_unsettled")
        if not self.tiered.reads_at_arrival or self.tiered.engine_free():
            return
        found = self.waiting_request(request.rid)
        if found is not None:
            self.tiered.coordinator.prefetch(*found)

    def check_prefetch_progress(self, request: Any) -> bool:
        """Return False while the request should wait for pages on their way."""
        found = self.waiting_request(request.rid)
        if found is None:
            return True
        ready = self.tiered.coordinator.prepare(*found)
        self.tiered.note_wait(request.rid, waiting=not ready)
        return ready

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        """Return how many of the loadable tokens come from disk, for reports."""
        state = self.tiered.coordinator.state(request.rid)
        if state is None or state.plan is None:
            return 0, None
        tiers = state.plan.tiers[: self.tiered.coordinator.ready_end(state)]
        return int(np.count_nonzero(tiers == TierId.DISK)) * self.page_size, None

    # -- Loading ---------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any]:
        """Take slots for the host hit of an admitted request and queue its load."""
        req = params.req
        state = self.tiered.coordinator.state(req.rid)
        if state is None or params.host_hit_length == 0:
            return 0, req.last_node
        slots = self._take_slots(params.host_hit_length)
        if slots is None:
            return 0, req.last_node
        job = self.tiered.coordinator.begin(state, self._page_numbers(slots))
        if job is None:
            self.give_slots(slots)
            return 0, req.last_node
        note_load(req, job, self.page_size)
        self._queued.append((req, job))
        self._private[req.rid] = slots
        assert state.plan is not None
        end_page = state.plan.first_page + self.tiered.coordinator.ready_end(state)
        end = end_page * self.page_size
        self._spans[req.rid] = (end - len(slots), end)
        return len(slots), req.last_node

    def load_back_is_cache_owned(self) -> bool:
        """Say that loaded slots belong to their request until its checkpoint."""
        return False

    def ready_to_load_host_cache(self) -> int:
        """Hand the batch's loads to the loader; -1 where there are none."""
        if self._prefetch is not None:
            self._prefetch.pass_built(self._keys)
        if not self._queued:
            return -1
        queued, self._queued = self._queued, []
        ticket = self.tiered.loader.submit([job for _, job in queued])
        loading = LoadingPass(ticket)
        for req, _ in queued:
            span = self._spans.pop(req.rid, None)
            state = self.tiered.coordinator.state(req.rid)
            assert span is not None
            assert state is not None
            self.tiered.coordinator.load_begins(state)
            loading.loads.append(Load(req, state, *span, req.retraction_count))
        self._passes.append(loading)
        self.tiered.counter.add(ticket)
        if self.tiered.wait_whole:
            # SGLang lets the forward's stream wait for this thread's.
            ticket.wait_last_layer()
        return self.tiered.counter.latest

    def repair_loads(self, runner: Any, batch: Any) -> bool:
        """Compute what the loads of the batch just launched failed to bring.

        Under SGLang's overlap schedule it is enough that the copies are queued, which
        the forward's stream waits for: ``end_passes`` asks how they ended.

        Returns:
            Whether there was anything: then the batch's forward has to run again.
        """
        loading = self._launching
        if loading is None or loading.is_repaired:
            return False
        loading.launched_s = batch.launch_ts
        if self._has_come(loading, may_run=batch.enable_overlap):
            return False
        spans = loading.missing(batch)
        num_tokens = compute_missing(runner, batch, spans)
        logger.warning(
            "sgl-tiered: a load to the device broke (%s): %d tokens of %d request(s) "
            "were computed instead",
            loading.ticket.failed,
            num_tokens,
            len(spans),
        )
        self.tiered.metrics.add("loads_repaired", len(spans))
        self.tiered.metrics.add("tokens_repaired", num_tokens)
        loading.is_repaired = True
        return True

    def finish_external_linker_loads(self, reqs: list[Any]) -> list[Any]:
        """End the loads of the batch just launched; return requests that failed.

        None does where ``repair_loads`` was asked, which is wherever tokens are
        generated. Elsewhere the output is dropped and the client told, since the
        forward has already used the slots. Loads that may still run are ended by
        ``end_passes``.
        """
        loading = self._launching
        if loading is None:
            return []
        loading.is_launched = True
        for load in loading.loads:
            self._private.pop(load.req.rid, None)
        self._has_come(loading, may_run=True)
        failed = [] if loading.may_run else self._end_pass(loading)
        if failed:
            end(failed)
        return failed

    def end_passes(self, batch: Any) -> list[Any]:
        """Wait for the loads that results rest on; return requests that failed.

        Called before the results of a batch are taken, which come behind its loads.
        What fails by then has failed on the device, behind work that it had accepted:
        the next batch runs already on the token of this one, see ``requeue.py``.

        Args:
            batch: as it was launched; SGLang's copy of it.
        """
        failed = []
        for loading in list(self._passes):
            if loading.is_launched and loading.precedes(batch):
                loading.has_come = self.tiered.transfers.landed(loading.ticket)
                failed += self._end_pass(loading)
        return failed

    @property
    def _launching(self) -> LoadingPass | None:
        """The batch that is being launched, if it has loads."""
        last = self._passes[-1] if self._passes else None
        return None if last is None or last.is_launched else last

    def _has_come(self, loading: LoadingPass, *, may_run: bool) -> bool:
        """Ask, once, whether a load is there; or queued, where that is enough."""
        if loading.has_come is not None:
            return loading.has_come
        ticket, transfers = loading.ticket, self.tiered.transfers
        if may_run:
            has_come = transfers.queued(ticket)
            loading.may_run = has_come and ticket.is_queued
        else:
            has_come = transfers.landed(ticket)
        if ticket.is_queued:
            # Whoever gets these slots next works behind this stream.
            ticket.wait_last_layer()
        loading.has_come = has_come
        return has_come

    def _is_in_doubt(self, req: Any) -> bool:
        """Say whether a load of a request has failed or is not known to have landed."""
        is_loading = any(loading.has_any([req]) for loading in self._passes)
        return is_loading or any(one is req for one, _ in self.lost)

    def _end_pass(self, loading: LoadingPass) -> list[Any]:
        """Settle loads whose outcome is known; return requests that failed."""
        self._passes.remove(loading)
        ticket = loading.ticket
        # Where another rank's failed, this rank's may still read its sources.
        ticket.wait()
        landed = loading.has_come or loading.is_repaired
        self.tiered.metrics.add("load_stall_s", ticket.stall_s)
        self.tiered.metrics.add("load_copy_s", ticket.seconds)
        moved = {tier: seconds for tier, (_, seconds) in ticket.moved.items()}
        failed = []
        for load in loading.loads:
            state = load.state
            state.report.load_s += ticket.seconds
            state.report.stall_s += ticket.stall_s
            state.report.add_copies(moved)
            if landed:
                self.tiered.coordinator.landed(state)
            else:
                self.tiered.coordinator.settle(state, landed=False)
                if load.is_current:
                    failed.append(load.req)
            self.tiered.coordinator.load_ended(state)
        for req in failed:
            req.tiered_load_failed = ticket.failed or "it failed on another rank"
        return failed

    # -- A prompt whose front is computed while its back is read ---------------

    def split_end(self, req: Any) -> int | None:
        """Return after which token the first pass over a split prompt should end."""
        state = self._current(req.rid)
        page = None if state is None else self.tiered.coordinator.chunk_end(state)
        return None if page is None else page * self.page_size

    def resume_split(self, req: Any) -> int:
        """Put the back of a split prompt behind what was computed, if it has come.

        The request's prefix then ends behind it, and the load runs under the next pass.

        Returns:
            How many tokens to compute next instead; 0 for no bound.
        """
        coordinator = self.tiered.coordinator
        state = coordinator.state(req.rid)
        if state is None or coordinator.chunk_end(state) is None:
            return 0
        if req.prefix_len % self.page_size or self._current(req.rid) is None:
            coordinator.settle(state, landed=False)
            return 0
        resume = coordinator.resume(state, req.prefix_len // self.page_size)
        if not resume.load_pages:
            return resume.compute_pages * int(self.page_size)
        slots = self._take_slots(resume.load_pages * self.page_size)
        if slots is None:
            coordinator.settle(state, landed=False)
            return 0
        job = coordinator.begin_back(state, self._page_numbers(slots))
        end = req.prefix_len + len(slots)
        row = (req.kv.req_pool_idx, slice(req.prefix_len, end))
        self.req_to_token_pool.write(row, slots.to(torch.int32))
        self._spans[req.rid] = (req.prefix_len, end)
        req.prefix_len = end
        self._queued.append((req, job))
        self._backs[req.rid] = slots
        return 0

    def keep_back(self, req: Any) -> None:
        """Note that the pass with the back of a split prompt will run."""
        slots = self._backs.pop(req.rid, None)
        if slots is None:
            return
        state = self.tiered.coordinator.state(req.rid)
        assert state is not None
        assert state.plan is not None
        tiers = state.plan.tiers[-(len(slots) // self.page_size) :]
        from_disk = int(np.count_nonzero(tiers == TierId.DISK)) * self.page_size
        req.cached_tokens_storage += from_disk
        req.cached_tokens_host += len(slots) - from_disk

    def undo_back(self, req: Any) -> None:
        """Take the back of a split prompt away again: its pass does not run."""
        slots = self._backs.pop(req.rid, None)
        if slots is None:
            return
        self._queued = [item for item in self._queued if item[0].rid != req.rid]
        self._spans.pop(req.rid, None)
        self.give_slots(slots)
        req.prefix_len -= len(slots)
        state = self.tiered.coordinator.state(req.rid)
        if state is not None:
            self.tiered.coordinator.settle(state, landed=False)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Return the slots of the request's prefix, loaded private ones included."""
        root = self.root_node_handle(req.extra_key)
        path = self.tree_core.collect_full_device_indices(req.last_node, root)
        private = self._private.get(req.rid)
        if private is not None:
            path = torch.cat([path, private])
        assert len(path) >= req.prefix_len, (req.rid, len(path), req.prefix_len)
        return path[: req.prefix_len]

    # -- Offloading ------------------------------------------------------------

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish the request's pages in the tree, then offload the new ones.

        Not while a load of it may fail: SGLang goes on with what it has in its row, and
        a later checkpoint publishes these pages as well.
        """
        if self._is_in_doubt(req):
            return
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if up_to >= len(req.origin_input_ids):
            self.tiered.ledger.first_token(req.rid)
            if self.tiered.lengths is not None:
                self.tiered.lengths.computed(req)
        state = self.tiered.coordinator.state(req.rid)
        if state is not None:
            self._count(req, state)
            num_published = min(req.kv.cache_protected_len, up_to) // self.page_size
            self.tiered.coordinator.published(state, num_published)
        if not self.disable and req.positional_embed_overrides is None:
            self._offload(req, state, min(req.kv.cache_protected_len, up_to))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Forget the request; called once its slots are given back."""
        super().on_release(req, checkpointed=checkpointed)
        if self.tiered.lengths is not None:
            self.tiered.lengths.released(req)
        self._forget(req.rid)

    def release_aborted_request(self, request: Any) -> None:
        """Forget a request that ended in the queue."""
        super().release_aborted_request(request)
        if self.tiered.lengths is not None:
            self.tiered.lengths.left(request.rid)
        loading = self._launching
        if loading is not None and loading.has_any([request]):
            # It is a part of the batch, and forgotten when its slots are given back.
            if self.tiered.lookahead is not None:
                self.tiered.lookahead.left(request.rid)
            return
        self._forget(request.rid)
        self.tiered.explainer.aborted(request.rid)

    def evict(self, params: EvictParams) -> Any:
        """Let the tree evict, and remember to look what was lost."""
        result = super().evict(params)
        if self._ahead is not None:
            self._ahead.evicted()
        return result

    def evict_for_alloc(
        self, params: EvictParams, *, allocation_reclaim_satisfied: Any = None
    ) -> Any:
        """Like ``evict``, as the allocator calls it."""
        result = super().evict_for_alloc(
            params, allocation_reclaim_satisfied=allocation_reclaim_satisfied
        )
        if self._ahead is not None:
            self._ahead.evicted()
        return result

    def submit_offload(
        self, plan: OffloadPlan, device_pages: PageNumbers, node: Any
    ) -> bool:
        """Lock a node's path and queue the copy; False (all undone) if it is full."""
        lock = self.inc_lock_ref(node).to_dec_params()
        self._locks[plan.plan_id] = (node, lock)
        if self.tiered.offload(plan, device_pages):
            return True
        self._unlock_offload(plan.plan_id)
        return False

    def has_pending_cache_operations(self) -> bool:
        """Say whether pages of the tree are kept for offloads that read them.

        Not for those given up: they may still read the device, and what is flushed or
        written there meanwhile does them no harm. Memory must not be taken away then:
        see ``leave_device``.
        """
        if not self.tiered.agreement.is_shared:
            self.take_ends()
        return bool(self._locks)

    def finish_offloads(self) -> None:
        """Wait for running offloads, which hold locks on pages of the tree."""
        self.tiered.drain_offloads()
        self.take_ends()

    def leave_device(self) -> bool:
        """Let every copy from and to the device end; False if one does not in time."""
        self.end_fetches()
        self.tiered.parts.loader.drain()
        self.finish_offloads()
        return not self.tiered.is_storing

    # -- Events ----------------------------------------------------------------

    def take_ends(self) -> None:
        """Take the ends of transfers; several ranks meet for it."""
        self.tiered.pump()
        if self.fetcher is not None and self.fetcher.poll():
            self.tiered.on_promoted()

    def check_hicache_events(self) -> None:
        """Take the ends of transfers and start what follows from them."""
        if self.tiered.is_reading and self.tiered.engine_idle():
            self.tiered.nap()
        self.take_ends()
        if self._prefetch is not None:
            self._prefetch.between_passes(self._keys)
        if self._ahead is not None:
            self._ahead.advance()
        self.tiered.between_passes()

    def flush_pending_backups(self) -> None:
        """Nothing to do: offloads are submitted where they arise."""

    def reset(self) -> None:
        """Forget every page in every tier, disk included.

        That is what a flush asks for, so no tier is spared.
        """
        if self._tiered is not None:
            self.forget_plans()
            self._quiesce()
            self._tiered.reset()
        super().reset()

    # -- Changes of the weights, see ``serving/weights.py`` ----------------------------

    def weights_changing(self) -> None:
        """Note that SGLang is about to touch the weights.

        What is being copied from the device was computed by those of before, and goes
        on; nothing of theirs may come to the device any more, and what was put off is
        not copied later.
        """
        self.end_fetches()
        self.forget_plans()
        if self._ahead is not None:
            self._ahead.clear()
        self.tiered.weights.changing()

    def weights_changed(self) -> None:
        """Note that the weights are as they will be computed with from now on."""
        self.tiered.weights.changed(device_is_empty=self._is_device_empty)

    def adapter_loaded(self, lora_id: str) -> None:
        """Note that SGLang has loaded an adapter, or tried to."""
        if self.tiered.adapters.loaded(lora_id) and self._ahead is not None:
            # What was put off would be copied as KV of the content before.
            self._ahead.clear()
        self.tiered.namespaces.forget_adapter(lora_id)

    def forget_plans(self) -> None:
        """Forget what was found and begun for requests, here and at peers."""
        self.tiered.forget_plans()

    def drop(self, tier: TierId) -> None:
        """Forget every page of one tier; the device only while no request runs."""
        self.end_fetches()
        self.take_ends()
        if tier is TierId.DEVICE:
            self.evict(EvictParams(num_tokens=int(self.tree_core.evictable_size())))
            if self._is_device_empty:
                self.tiered.emptied()
        else:
            self.tiered.drop(tier)
            self._note_dropped()

    def clear_storage_backend(self) -> bool:
        """Forget what is on disk, without waiting; False where there is no disk.

        Requests may run: pages that are read now are forgotten when they have been.
        """
        if not self.tiered.has_tier(TierId.DISK):
            self.tiered.metrics.add("refused_storage_clear")
            logger.warning("sgl-tiered: there is no disk tier to clear")
            return False
        self.tiered.forget(TierId.DISK)
        self._note_dropped()
        return True

    def release_host_resources(self) -> None:
        """Finish writing to disk and close the tiers (graceful shutdown)."""
        self.end_fetches()
        self.take_ends()
        self.tiered.close(self.take_ends)
        super().release_host_resources()

    # -- SGLang's storage prefetch asks these; hashes of nodes are not used here --

    def is_backuped(self, node_id: Any) -> bool:
        """Let every device node anchor a search in the tiers."""
        del node_id
        return True

    def get_last_hash_value(self, node_id: Any) -> None:
        """Return nothing: the tiers find pages by their tokens."""
        del node_id

    # -- Private ---------------------------------------------------------------

    @property
    def _is_device_empty(self) -> bool:
        """Whether no slot of the device is in use, by the tree or by a request."""
        allocator = self.token_to_kv_pool_allocator
        num_tokens = allocator.size // self.page_size * self.page_size
        return bool(allocator.available_size() >= num_tokens)

    def _current(self, rid: str) -> RequestState | None:
        """Return what is known of a request; None where that is of other weights."""
        state, key = self.tiered.coordinator.state(rid), self._keys.get(rid)
        if state is None or key is None:
            return None
        digest = self.tiered.namespace(key.extra_key, key.cache_salt)
        return state if state.digest == digest else None

    def _track(self, key: RadixKey, req: Any) -> RequestState | None:
        """Note the prompt of ``req``; None where the tiers cannot serve it.

        SGLang looks at a waiting request up to what it may reuse, or, to sort its queue
        by prefixes, at all of it. Either way only the former counts.
        """
        if req is None or self.disable or kept_exact(req, self.tiered.config):
            return None
        if req.positional_embed_overrides is not None:
            # Equal ids do not make such prompts equal.
            return None
        if not self.tiered.can_name(req):
            return None
        coordinator = self.tiered.coordinator
        state = coordinator.state(req.rid)
        limit = min(len(key), req._compute_max_prefix_len(len(key.token_ids)))
        max_pages = limit // self.page_size
        if max_pages == 0 and state is None:
            return None
        digest = self.tiered.namespace(key.extra_key, key.cache_salt)
        known = self._keys.get(req.rid)
        if (
            state is not None
            and known is not None
            and known.limit == limit
            # Arrays of one type compare as bytes do: 2 us for 4,096 tokens.
            and known.token_ids == key.token_ids
            and state.digest == digest
        ):
            return state
        tokens = plain_tokens(key.token_ids, limit)
        if tokens is None:
            return None
        if digest is None:
            if state is not None and not state.started:
                coordinator.release(req.rid)
            return None
        if begins_anew(req):
            max_pages = 0
        self._keys[req.rid] = RadixKey(
            key.token_ids, key.extra_key, limit=limit, cache_salt=key.cache_salt
        )
        if self.tiered.lookahead is not None:
            self.tiered.lookahead.entered(req.rid, digest, tokens)
        return coordinator.track(req.rid, digest, tokens, max_pages)

    def _take_slots(self, num_tokens: int) -> torch.Tensor | None:
        allocator = self.token_to_kv_pool_allocator
        shortfall = num_tokens - allocator.available_size()
        if shortfall > 0:
            self.evict(EvictParams(num_tokens=shortfall))
        slots = allocator.alloc(num_tokens)
        return None if slots is None else slots.to(torch.int64)

    def _page_numbers(self, slots: torch.Tensor) -> PageNumbers:
        """Return the pages of whole pages' slots; never waits for a device."""
        firsts = slots[:: self.page_size]
        return page_numbers(self.tiered.parts.device, firsts, self.page_size)

    def _offload(self, req: Any, state: RequestState | None, num_tokens: int) -> None:
        num_pages = num_tokens // self.page_size
        if num_pages == 0 or (state is not None and num_pages <= state.num_offloaded):
            return
        policy = self.tiered.config.writes.write_policy
        counts_twice = policy == "selective" or (policy == "auto" and state is None)
        if counts_twice and not req.finished():
            # Each plan counts as a sighting, and a request is to be one.
            return
        tokens = plain_tokens(req.full_untruncated_fill_ids, num_pages * self.page_size)
        if tokens is None or kept_exact(req, self.tiered.config):
            return
        if not self.tiered.can_name(req):
            return
        digest = self.tiered.namespace(req.extra_key, req.cache_salt)
        if digest is None:
            self.tiered.metrics.add("offloads_weights_unsettled")
            return
        seen_pages = 0
        if state is not None:
            seen_pages, state.num_offloaded = state.num_offloaded, num_pages
        if self._strategy is not None:
            node = self.tree_core.node_by_id(req.last_node)
            self._strategy.note(node, digest, tokens, seen_pages, self.page_size)
        if self._ahead is not None:
            where = (req.extra_key, req.cache_salt)
            self._ahead.note(digest, tokens, seen_pages, *where)
            return
        plan = self.tiered.cache.plan_offload(
            digest, tokens, seen_pages=seen_pages, leave=self._leave, kinds=self._kinds
        )
        if plan is None:
            return
        pages = device_pages(self, req, plan.positions)
        self.tiered.explainer.offloading(req.rid, plan)
        self.submit_offload(plan, pages, req.last_node)

    def _count(self, req: Any, state: RequestState) -> None:
        """Count a request once, when its first pages are published."""
        if not state.counted:
            state.counted = True
            self.tiered.count_request(len(req.origin_input_ids), cached_by_tier(req))
            self.tiered.count_decision(state)

    def _unlock_offload(self, plan_id: int) -> None:
        held = self._locks.pop(plan_id, None)
        # None: a reset did not wait for the copy, and there is nothing left to unlock.
        if held is not None:
            self.dec_lock_ref(*held)

    def _offload_ended(self, plan_id: int) -> None:
        self._unlock_offload(plan_id)
        if self._ahead is not None:
            self._ahead.ended(plan_id)

    def _note_dropped(self) -> None:
        if self._ahead is not None:
            self._ahead.dropped()

    def _quiesce(self) -> None:
        """Let copies to and from the device end, whose memory is given back."""
        for loading in self._passes:
            loading.ticket.wait()
            for load in loading.loads:
                self.tiered.coordinator.load_ended(load.state)
        self._passes.clear()
        self.lost.clear()
        self.end_fetches()
        self.tiered.drain_device()
        self.take_ends()
        self._queued.clear()
        self._private.clear()
        self._backs.clear()
        self._spans.clear()
        self._keys.clear()
        self._locks.clear()
        if self._ahead is not None:
            self._ahead.clear()

    @property
    def num_flows(self) -> int:
        """Requests of which more than a report is kept, here or below."""
        queued = (req.rid for req, _ in self._queued)
        ours = {*self._keys, *self._private, *self._backs, *self._spans, *queued}
        return len(ours | self.tiered.followed())

    def _forget(self, rid: str) -> None:
        self._queued = [item for item in self._queued if item[0].rid != rid]
        self._private.pop(rid, None)
        self._backs.pop(rid, None)
        self._spans.pop(rid, None)
        self._keys.pop(rid, None)
        self.tiered.forget_request(rid)
