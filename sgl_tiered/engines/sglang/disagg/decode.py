"""The tiered cache of a decode instance.

Prompts arrive from a prefill instance. What the device has of one is reused, what the
tiers below hold in memory is brought there before it is matched
(``serving/disagg/loading.py``), and the rest is sent. The tiers keep what ended, also
for the instances that ask for it and for the one that computed the prompt
(``serving/disagg/returning.py``). A request is offloaded once, when it has ended: its
decode steps pay for no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey

from sgl_tiered.engines.device.tokens import plain_tokens
from sgl_tiered.engines.sglang.cache import TieredRadixCache
from sgl_tiered.engines.sglang.fetching import LendingRadixCache, make_fetcher
from sgl_tiered.serving.coordinator import RequestState
from sgl_tiered.serving.disagg.figures import PrefillFigures, PrefillTold
from sgl_tiered.serving.disagg.judging import ReturnJudge
from sgl_tiered.serving.disagg.loading import Arriving, OwnLoads
from sgl_tiered.serving.disagg.returning import AnswerReturns, Ended

__all__ = ["DecodeRadixCache"]


class DecodeRadixCache(TieredRadixCache):
    """TieredRadixCache whose prompts come from elsewhere."""

    receives = True
    # Set by ``watch_prefill``.
    _prefill_of: Callable[[int], PrefillTold | None] | None = None
    # Set by ``load_first``.
    _loads: OwnLoads | None = None
    # Set by ``return_answers``; the parent's constructor calls ``reset``.
    _returns: AnswerReturns | None = None
    _receiver_of: Callable[[int], PrefillFigures | None] | None = None
    _judge: ReturnJudge | None = None
    _after: dict[int, Ended] | None = None

    def return_answers(
        self,
        returns: AnswerReturns,
        receiver_of: Callable[[int], PrefillFigures | None],
        judge: ReturnJudge,
    ) -> None:
        """Return answers to the instances that computed their prompts from now on.

        Args:
            returns: sends them.
            receiver_of: gives what the instance behind a bootstrap room told, once.
            judge: says which are worth it.
        """
        self._returns, self._receiver_of, self._after = returns, receiver_of, {}
        self._judge = judge

    def watch_prefill(self, prefill_of: Callable[[int], PrefillTold | None]) -> None:
        """Look by which weights prompts were computed, from now on.

        Args:
            prefill_of: gives what the instance behind a bootstrap room told.
        """
        self._prefill_of = prefill_of

    def load_first(self, bytes_per_s: Callable[[], float]) -> None:
        """Load from the tiers here what would else be sent, from now on.

        Args:
            bytes_per_s: of the link from the prefill instances, as far as known.
        """
        if self.fetcher is not None or self.tiered.agreement.is_shared:
            # Something else looks ahead, or ranks' copies would end at other times.
            return
        parts = self.tiered.parts
        page_bytes = parts.device.layout.page_bytes

        def sent_s(first_page: int, num_pages: int) -> float:
            del first_page
            return num_pages * page_bytes / bytes_per_s()

        self._loads = OwnLoads(parts.cache, parts.clock, sent_s)
        self.fetcher = make_fetcher(self, self.tiered, self._loads.prefetcher)

    def held_back(self, reqs: Sequence[Any]) -> set[str]:
        """Return who of those that could be matched should wait for a load.

        Args:
            reqs: SGLang's requests, all that could be matched now, in their order.
        """
        loads, fetcher = self._loads, self.fetcher
        if loads is None or fetcher is None:
            return set()
        for req in reqs:
            if loads.state(req.rid) is None:
                self._arrived(loads, req)
        fetcher.keys = {state: state.key for state in loads.arriving}

        def on_device(state: Arriving) -> int:
            match = self._match_tree(MatchPrefixParams(key=state.key))
            return int(match.device_prefix_len) // int(self.page_size)

        return loads.advance({req.rid for req in reqs}, on_device)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match on the device only: what could be loaded is there by now."""
        if self._judge is not None and params.req is not None:
            self._note_asked(self._judge, params)
        return LendingRadixCache.match_prefix(self, params)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish the request's pages, of which some were computed elsewhere."""
        self._note_origin(req)
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)

    def _note_origin(self, req: Any) -> None:
        """Tell by which weights a request's pages were computed, if not by those here.

        By the prefill instance's; or by former ones of this instance, as SGLang keeps
        the KV of a request that it retracts in host memory, over a flush as well.
        """
        weights = self.tiered.weights
        former, now = getattr(req, "tiered_weights", None), weights.told()
        if former is not None:
            if former[1] != now[1]:
                weights.received(*former)
        elif self._prefill_of is not None:
            told = self._prefill_of(req.bootstrap_room)
            if told is not None:
                weights.received(told.weights, told.epoch)
        req.tiered_weights = now

    def check_hicache_events(self) -> None:
        """Take the ends of offloads, and move returns along."""
        super().check_hicache_events()
        if self._returns is not None:
            self._returns.poll()

    def forget_plans(self) -> None:
        """Forget what was begun for requests, and what waits to be returned."""
        if self._returns is not None and self._after is not None:
            self._returns.clear()
            self._after.clear()
        if self._judge is not None:
            self._judge.clear()
        if self._loads is not None:
            self._loads.clear()
        super().forget_plans()

    def _offload(self, req: Any, state: RequestState | None, num_tokens: int) -> None:
        """Offload a request that has ended; one that only pauses may come back."""
        if not req.finished():
            return
        before = set(self._locks)
        super()._offload(req, state, num_tokens)
        if self._returns is None or self._receiver_of is None or self._judge is None:
            return
        figures = self._receiver_of(req.bootstrap_room)
        num_pages = num_tokens // self.page_size
        tokens = plain_tokens(req.full_untruncated_fill_ids, num_pages * self.page_size)
        if figures is None or tokens is None or not num_pages:
            return
        if not self.tiered.can_name(req):
            return
        digest = self.tiered.namespace(req.extra_key, req.cache_salt)
        if digest is None:
            return
        num_prompt = len(req.origin_input_ids)
        if not self._judge.is_worth(req.rid, figures, digest, tokens, num_prompt):
            return
        ended = Ended(figures.place, digest, tokens)
        plans = set(self._locks) - before
        if plans and self._after is not None:
            self._after[plans.pop()] = ended
        else:
            # All of it is in the host tier, or on its way there for somebody else.
            self._returns.add(ended)

    def _arrived(self, loads: OwnLoads, req: Any) -> None:
        """Note a request; one that the tiers cannot serve as if it had no prompt."""
        key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
        tokens = plain_tokens(key.token_ids, len(key))
        digest = None
        if self.tiered.can_name(req):
            digest = self.tiered.namespace(req.extra_key, req.cache_salt)
        if tokens is None or digest is None or self.disable:
            tokens, digest = np.empty(0, np.int32), b""
        loads.arrived(req.rid, digest, tokens, key)

    def _note_asked(self, judge: ReturnJudge, params: MatchPrefixParams) -> None:
        """Tell once of each request which prompt has come."""
        req: Any = params.req
        if getattr(req, "tiered_asked", False):
            return
        req.tiered_asked = True
        tokens = plain_tokens(params.key.token_ids, len(params.key))
        if tokens is not None and self.tiered.can_name(req):
            digest = self.tiered.namespace(params.key.extra_key, params.key.cache_salt)
            if digest is not None:
                judge.asked(digest, tokens)

    def _unlock_offload(self, plan_id: int) -> None:
        super()._unlock_offload(plan_id)
        ended = None if self._after is None else self._after.pop(plan_id, None)
        if ended is not None and self._returns is not None:
            self._returns.add(ended)
