"""The tiered cache and its runtime where loads may leave tokens out.

The tree, the tiers and what they decide stay as they are. Added is what is kept of a
load for a request that allows it, who holds pages that lack tokens, and what attention
gave to the tokens, which is read off the device and kept beside the cache's table.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_tiered.core.plans import OffloadPlan
from sgl_tiered.engines.device.sparse_parts import SparseParts
from sgl_tiered.engines.device.tokens import device_pages, plain_tokens
from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.pipelines.page_numbers import PageNumbers, host_numbers
from sgl_tiered.serving.coordinator import RequestState
from sgl_tiered.serving.loading_pass import LoadingPass
from sgl_tiered.serving.lossy import is_lossy_key
from sgl_tiered.serving.sparse_report import SparseLoad, shares_by_layer

__all__ = ["SparseRadixCache", "SparseRuntime"]

Int64s = npt.NDArray[np.int64]

_MAX_REPORTS = 1024


class SparseRuntime(TieredRuntime):
    """A runtime whose loads may bring parts of pages, and that reports of it.

    Args:
        parts: as put together by the factory.
        sparse: what the pool's rows are ruled by.
        wait_whole: as for the tiers.
    """

    def __init__(self, parts: Parts, sparse: SparseParts, *, wait_whole: bool) -> None:
        super().__init__(parts, wait_whole=wait_whole)
        self.sparse = sparse
        self.coordinator.load_bytes = sparse.device.load_bytes
        parts.cache.watch_rows(sparse.forget)
        self._loads: OrderedDict[str, SparseLoad] = OrderedDict()
        # Of all sparse loads so far: tokens, and those of each layer that came.
        self._num_tokens = 0
        self._num_kept = [0] * sparse.binding.num_layers

    def note_sparse(self, rid: str, load: SparseLoad, every: SparseLoad) -> None:
        """Note what was left out of a load that has landed.

        Args:
            rid: of its request.
            load: for the counters.
            every: all such loads of the request as one, for its report.
        """
        self._loads[rid] = every
        if len(self._loads) > _MAX_REPORTS:
            self._loads.popitem(last=False)
        for name, value in load.counters().items():
            self.metrics.add(name, value)
        self._num_tokens += load.num_tokens
        for layer, count in enumerate(load.kept):
            self._num_kept[layer] += count

    def take_report(self, rid: str) -> dict[str, Any] | None:
        """Return what was decided for a request, and what of its KV was left out."""
        report = super().take_report(rid)
        load = self._loads.pop(rid, None)
        if load is None:
            return report
        return {**(report or {"actual": {}}), "sparsity": load.as_dict()}

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture of tiers and rows."""
        shares = shares_by_layer(self._num_kept, self._num_tokens)
        told = {**self.sparse.stats(), "kept_share_by_layer": shares}
        return {**super().stats(), "sparsity": told}

    def metrics_snapshot(self) -> dict[str, Any]:
        """Return the counters and the occupancy, for exporters."""
        snapshot = super().metrics_snapshot()
        for name in ("loads", "rows_dropped", "bytes_saved"):
            snapshot["counters"].setdefault(f"sparsity_{name}", 0)
        return snapshot


class SparseRadixCache(TieredRadixCache):
    """The tiered cache over a `SparsePool`."""

    # Whose load slots are being taken for.
    _loading: Any = None
    # What attention gave to the prompt that is being offloaded, where that decides.
    _judged: npt.NDArray[np.float32] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The parent's constructor calls reset() and asks for sizes.
        self._fresh: dict[str, Int64s] = {}
        # Loads on their way, and all that came before, by request.
        self._chosen: dict[str, SparseLoad] = {}
        self._landed: dict[str, SparseLoad] = {}
        self._sparse: SparseParts | None = None
        super().__init__(*args, **kwargs)
        runtime: Any = self.tiered
        self._sparse = runtime.sparse

    # -- What SGLang may count on ----------------------------------------------

    def evictable_size(self) -> int:
        """Return the tokens whose room ``evict`` can free; a sparse page frees less."""
        return max(0, super().evictable_size() - self._unevictable)

    def full_evictable_size(self) -> int:
        """Return the same, as hybrid models ask for it."""
        return max(0, super().full_evictable_size() - self._unevictable)

    def inc_lock_ref(self, node_id: Any, *args: Any, **kwargs: Any) -> Any:
        """Lock a path; what its pages lack cannot be counted on by others."""
        result = super().inc_lock_ref(node_id, *args, **kwargs)
        self._hold(node_id, more=True)
        return result

    def dec_lock_ref(self, node_id: Any, *args: Any, **kwargs: Any) -> Any:
        """Undo one ``inc_lock_ref``."""
        self._hold(node_id, more=False)
        return super().dec_lock_ref(node_id, *args, **kwargs)

    # -- Loads -----------------------------------------------------------------

    def init_load_back(self, params: Any) -> tuple[int, Any]:
        """Take slots for the host hit of an admitted request and queue its load."""
        self._loading = params.req
        try:
            loaded = super().init_load_back(params)
        finally:
            self._loading = None
        if not loaded[0]:
            self._take_back(params.req.rid)
        return loaded

    def resume_split(self, req: Any) -> int:
        """Put the back of a split prompt behind what was computed, if it has come."""
        self._loading = req
        try:
            return super().resume_split(req)
        finally:
            self._loading = None

    def undo_back(self, req: Any) -> None:
        """Take the back of a split prompt away again: its pass does not run."""
        if req.rid in self._backs:
            self._take_back(req.rid)
        super().undo_back(req)

    def _take_slots(self, num_tokens: int) -> torch.Tensor | None:
        """Take slots, with rows for what is kept of the load they are for."""
        sparse, req = self._rows, self._loading
        allocator = self.token_to_kv_pool_allocator
        state = None
        if req is not None and is_lossy_key(req.extra_key):
            state = self.tiered.coordinator.state(req.rid)
        span = None if state is None else self._span(state, num_tokens)
        kept = None
        if span is not None:
            rows, first_token = span
            known = sparse.gauge.known(rows)
            if sparse.stored is None:
                kept = sparse.choice.keep(first_token, num_tokens, known)
            else:
                kept = sparse.stored.kept(rows)
        num_rows = sparse.binding.num_layers * num_tokens
        if kept is not None:
            num_rows = sum(len(tokens) for tokens in kept)
        self._make_room(num_rows, num_tokens)
        if kept is None:
            slots = allocator.alloc(num_tokens)
        else:
            slots = allocator.alloc_kept(num_tokens, kept)
        if slots is None:
            return None
        slots = slots.to(torch.int64)
        if span is not None:
            sparse.gauge.write(slots.cpu().numpy(), known)
        if kept is not None:
            pages = slots[:: self.page_size].cpu().numpy() // self.page_size
            self._fresh[req.rid] = pages
            self._chosen[req.rid] = sparse.load_of(pages, kept)
        return slots

    def _take_back(self, rid: str) -> None:
        """Forget a load whose slots were given back."""
        self._chosen.pop(rid, None)
        self._fresh.pop(rid, None)

    def repair_loads(self, runner: Any, batch: Any) -> bool:
        """Compute what broken loads failed to bring: all of it, in all layers."""
        loading = self._launching
        if loading is None or loading.is_repaired:
            return False
        if not self._has_come(loading, may_run=batch.enable_overlap):
            table = self.req_to_token_pool.req_to_token
            for span in loading.missing(batch):
                req = batch.reqs[span.index]
                row = table[req.kv.req_pool_idx]
                num_tokens = (
                    batch.prefix_lens[span.index] + batch.extend_lens[span.index]
                )
                self._forget_pass(req, row[:num_tokens])
                if not self._make_whole(row[span.begin : span.end : self.page_size]):
                    # Then the batch's requests end with an error.
                    return False
        return super().repair_loads(runner, batch)

    def _end_pass(self, loading: LoadingPass) -> list[Any]:
        """Settle loads, and tell of those that landed."""
        failed = super()._end_pass(loading)
        for ended in loading.loads:
            rid = ended.req.rid
            load = self._chosen.pop(rid, None)
            if load is not None and loading.has_come:
                every = load.with_earlier(self._landed.get(rid))
                self._landed[rid] = every
                runtime: Any = self.tiered
                runtime.note_sparse(rid, load, every)
        return failed

    def _forget_pass(self, req: Any, slots: torch.Tensor) -> None:
        """Forget what a pass read that ran over slots without their content.

        Of pages that the table knows, what was known before is known again.
        """
        gauge, numbers = self._rows.gauge, slots.cpu().numpy().astype(np.int64)
        gauge.forget(numbers)
        rows = self._known_rows(req, len(numbers) - len(numbers) % self.page_size)
        known = numbers[: len(rows) * self.page_size]
        gauge.write(known, gauge.known(rows))

    # -- After a pass ----------------------------------------------------------

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish the request's pages, offload the new ones, keep their mass."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        pages = self._fresh.pop(req.rid, None)
        if pages is not None:
            # Those of which the tree has others are free by now.
            self._rows.binding.publish(pages)
            self.token_to_kv_pool_allocator.changed()
        if is_lossy_key(req.extra_key) and not self.disable:
            self._keep_mass(req, min(req.kv.cache_protected_len, up_to))

    def reset(self) -> None:
        """Forget every page in every tier."""
        self._fresh.clear()
        self._chosen.clear()
        self._landed.clear()
        if self._sparse is not None:
            self._sparse.measured.clear()
        super().reset()

    def submit_offload(
        self, plan: OffloadPlan, device_pages: PageNumbers, node: Any
    ) -> bool:
        """Settle what is stored of the pages, then queue the copy as before."""
        if self._judged is not None:
            numbers = host_numbers(device_pages)
            self._rows.choose_stored(plan, self._judged, numbers)
        return super().submit_offload(plan, device_pages, node)

    # -- Private ---------------------------------------------------------------

    @property
    def _rows(self) -> SparseParts:
        assert self._sparse is not None
        return self._sparse

    @property
    def _unevictable(self) -> int:
        sizes = getattr(self.token_to_kv_pool_allocator, "sizes", None)
        return 0 if sizes is None else int(sizes.unevictable)

    def _track(self, key: Any, req: Any) -> RequestState | None:
        """Note the prompt of ``req``, and whether its attention is measured."""
        state = super()._track(key, req)
        if state is not None and is_lossy_key(req.extra_key):
            self._rows.measured.add(req.rid)
            state.load_share = self._rows.share
        return state

    def _forget(self, rid: str) -> None:
        self._take_back(rid)
        self._landed.pop(rid, None)
        self._rows.measured.discard(rid)
        super()._forget(rid)

    def _hold(self, node_id: Any, *, more: bool) -> None:
        """Count who uses pages that lack tokens; they are private before they lie here.

        So a path's pages lack the same when it is let go as when it was taken.
        """
        sparse = self._sparse
        if sparse is None or self.disable or not sparse.binding.num_dropped:
            return
        pages = self.path_device_indices(node_id)[:: self.page_size]
        numbers = pages.cpu().numpy().astype(np.int64) // self.page_size
        if more:
            sparse.binding.hold(numbers)
        else:
            sparse.binding.unhold(numbers)
        self.token_to_kv_pool_allocator.changed()

    def _span(
        self, state: RequestState, num_tokens: int
    ) -> tuple[npt.NDArray[np.int32], int] | None:
        """Return the table's rows of the pages to load, and their first token.

        None where the cache has moved on, and the load will not begin either.
        """
        num_pages = num_tokens // self.page_size
        listed = self.tiered.coordinator.to_load(state, num_pages)
        if listed is None:
            return None
        found, first = listed
        rows = found.pages[first : first + num_pages]
        return rows, (found.first_page + first) * self.page_size

    def _make_room(self, num_rows: int, num_tokens: int) -> None:
        """Evict until a load fits, or nothing can be evicted."""
        allocator = self.token_to_kv_pool_allocator
        shortfall = allocator.room_for(num_rows, num_tokens)
        shortfall -= allocator.available_size()
        if shortfall > 0:
            self.evict_for_alloc(EvictParams(num_tokens=shortfall))

    def _make_whole(self, firsts: torch.Tensor) -> bool:
        """Give pages the rows that they lack; False where there is no room."""
        pages = firsts.cpu().numpy().astype(np.int64) // self.page_size
        binding = self._rows.binding
        lacking = binding.num_rows_lacking(pages)
        self._make_room(lacking, 0)
        if lacking > binding.num_free:
            return False
        binding.make_whole(pages)
        self.token_to_kv_pool_allocator.changed()
        return True

    def _offload(self, req: Any, state: RequestState | None, num_tokens: int) -> None:
        """Offload what is whole; what lacks tokens has its copy below.

        Where only a choice of each page is stored, that ends before the first page
        with a token that no query has judged yet: a later turn will offload it.
        """
        sparse, pages = self._rows, self._pages(req, num_tokens)
        lacking = sparse.binding.dropped[pages] > 0
        if sparse.stored is not None:
            self._judged = sparse.judged(sparse.binding.slots(pages))
            lacking = lacking[: sparse.num_judged(self._judged, lacking)]
            num_tokens = len(lacking) * self.page_size
        self._leave = lacking if lacking.any() else None
        try:
            super()._offload(req, state, num_tokens)
        finally:
            self._leave = self._judged = None

    def _keep_mass(self, req: Any, num_tokens: int) -> None:
        """Keep beside the table what attention gave to a request's pages so far."""
        num_tokens -= num_tokens % self.page_size
        known = self._known_rows(req, num_tokens)
        if len(known):
            pages = self._pages(req, num_tokens)[: len(known)]
            sparse = self._rows
            sparse.gauge.keep(known, sparse.binding.slots(pages))

    def _known_rows(self, req: Any, num_tokens: int) -> npt.NDArray[np.int32]:
        """Return the table's rows of a request's leading pages that have one."""
        state = self.tiered.coordinator.state(req.rid)
        tokens = None
        if state is not None and num_tokens:
            tokens = plain_tokens(req.full_untruncated_fill_ids, num_tokens)
        if state is None or tokens is None:
            return np.zeros(0, np.int32)
        return self.tiered.cache.known_pages(state.digest, tokens)

    def _pages(self, req: Any, num_tokens: int) -> Int64s:
        """Return the device pages of a request's leading tokens."""
        every = np.arange(num_tokens // self.page_size)
        return host_numbers(device_pages(self, req, every))
