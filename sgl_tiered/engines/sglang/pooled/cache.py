"""SGLang's tree of a server in a pool: requests wait for pages that a peer sends."""

from __future__ import annotations

from typing import Any

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.pooled.hints import hints_of
from sgl_tiered.engines.sglang.pooled.server import ServedPool, peer_tokens
from sgl_tiered.pool.peers import Hint
from sgl_tiered.serving.coordinator import RequestState

__all__ = ["PooledTree", "pooled"]


class PooledTree(TieredRadixCache):
    """What pools add to a tiered tree; mixed into the class that is served."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The parent's constructor calls methods of ours.
        self._hints: dict[str, tuple[Hint, ...]] = {}
        super().__init__(*args, **kwargs)

    @property
    def _pool(self) -> ServedPool:
        pool: ServedPool | None = self.tiered.pool
        assert pool is not None, "it was made for a server in a pool"
        return pool

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Begin to pull what pays as soon as the request is queued."""
        found = self.waiting_request(request.rid)
        if found is not None:
            self._pull(request.rid, *found)
            if self._pool.pulls.is_waiting(request.rid):
                # Its load is planned when all is here.
                return
        super().prefetch_from_storage(request, *args, **kwargs)

    def check_prefetch_progress(self, request: Any) -> bool:
        """Return False while the request should wait for pages on their way."""
        if self._pool.pulls.should_wait(request.rid):
            self.tiered.note_wait(request.rid, waiting=True)
            return False
        return super().check_prefetch_progress(request)

    def init_load_back(self, params: Any) -> tuple[int, Any]:
        """Queue the load of an admitted request, and note what of it was pulled."""
        num_tokens, node = super().init_load_back(params)
        req = params.req
        state = self.tiered.coordinator.state(req.rid)
        span = self._spans.get(req.rid)
        if num_tokens and not req.retracted_stain and span and state and state.plan:
            plan, page = state.plan, self.page_size
            first = span[0] // page - plan.first_page
            tiers = plan.tiers[first : first + num_tokens // page]
            from_host = int(np.count_nonzero(tiers == TierId.HOST)) * page
            req.tiered_peer_tokens = peer_tokens(self._pool, req.rid, span, from_host)
        return num_tokens, node

    def check_hicache_events(self) -> None:
        """Look after the pool, and take the ends of transfers.

        Of several ranks those come first: with them the ranks meet, and the pool acts
        on what they have told each other there.
        """
        pool = self._pool
        if self.tiered.engine_idle():
            pool.rest(self.tiered.completions)
        if not pool.is_shared:
            pool.poll()
        super().check_hicache_events()
        if pool.is_shared:
            pool.poll()

    def forget_plans(self) -> None:
        """Forget what was begun for requests; what is pulled now is for nobody."""
        if self.tiered.pool is not None:
            self.tiered.pool.reset()
        super().forget_plans()

    def release_host_resources(self) -> None:
        """Leave the pool, then close the tiers: peers write to their memory."""
        self._pool.close()
        super().release_host_resources()

    def _track(self, key: Any, req: Any) -> RequestState | None:
        state = super()._track(key, req)
        if state is not None and state.report.peer is None:
            hints = tuple(hints_of(req))
            if hints:
                self._hints[req.rid] = hints
        return state

    def _pull(self, rid: str, state: RequestState, device_pages: int) -> None:
        pulls = self._pool.pulls
        pulls.arrived(
            rid,
            state.digest,
            state.tokens,
            device_pages,
            state.max_pages,
            self._hints.pop(rid, ()),
        )
        state.report.peer = pulls.wanted(rid)

    def _forget(self, rid: str) -> None:
        super()._forget(rid)
        self._hints.pop(rid, None)
        if self._tiered is not None and self._tiered.pool is not None:
            self._tiered.pool.pulls.forget(rid)


def pooled(base: type[TieredRadixCache]) -> type[TieredRadixCache]:
    """Return a tree class of a server in a pool."""
    if base is TieredRadixCache:
        return PooledTree
    return type(f"Pooled{base.__name__}", (PooledTree, base), {})
