"""Passes over a part of a prompt, while the rest of its pages is read from disk.

SGLang computes long prompts in chunks. A split prompt uses that: its first chunk ends
where computing is predicted to meet the read of the back; before each further chunk the
cache says whether the back has come, puts it behind what was computed, and the next
chunk starts after it. SGLang keeps one unfinished prompt at a time, and so do we.
"""

from __future__ import annotations

from typing import Any

from sgl_tiered.engines.sglang.prefetching import tokens_to_come
from sgl_tiered.engines.sglang.seams import tiered_runtime

__all__ = ["prefill_adder_class"]


def prefill_adder_class(original: Any, scheduler: Any) -> Any:
    """Return SGLang's adder, or ours on it where the tiers may split prompts."""
    base = original(scheduler)
    runtime = tiered_runtime(scheduler.tree_cache)
    if runtime is None:
        return base
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_policy import AddReqResult

    coordinator, cache = runtime.coordinator, scheduler.tree_cache
    explainer = runtime.explainer

    class TieredPrefillAdder(base):  # type: ignore[misc, valid-type]
        """Ends the chunk of a split prompt early, and lets it go on behind its back."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.chunked_req_limit: int | None
            self._has_split = False
            # Whose prompt is split, if SGLang lets it in.
            self._split_req: Any = None
            running = self.running_batch
            coordinator.begin_pass(
                len(scheduler.waiting_queue),
                is_busy=running is not None and not running.is_empty(),
            )
            explainer.begin_pass()
            coordinator.can_split = self._can_split

        def _can_split(self) -> bool:
            return (
                self.rem_chunk_tokens is not None
                and self.rem_chunk_tokens > 0
                and self.new_chunked_req is None
                and scheduler.chunked_req is None
                and self.dllm_config is None
                # A disaggregated prefill hands its chunks on as they end.
                and scheduler.disaggregation_mode is DisaggregationMode.NULL
            )

        def _select_prefill_admission(self, req: Any, **facts: Any) -> Any:
            """End the chunk of a split prompt where its back is to begin."""
            self._split_req = None
            admission = super()._select_prefill_admission(req, **facts)
            if isinstance(admission, AddReqResult):
                return admission
            if self._has_split and coordinator.crowds(
                admission.prefix_len, admission.extend_len
            ):
                # It would hold the split prompt up, whose back comes meanwhile.
                return AddReqResult.OTHER
            is_taken = facts.get("has_chunked_req") or self.new_chunked_req is not None
            end = cache.split_end(req)
            extend_len = 0 if end is None else end - admission.prefix_len
            if 0 < extend_len < admission.extend_len and not is_taken:
                if self.rem_chunk_tokens is None:
                    return admission
                self._split_req = req
                return type(admission)(
                    admission.prefix_len, extend_len, 0, True, admission.replay_len
                )
            if admission.is_chunked and is_taken:
                # A split prompt leaves room in its pass, but it is the unfinished one.
                return AddReqResult.OTHER
            return admission

        def _commit_prefill_admission(
            self, req: Any, admission: Any, *rest: Any
        ) -> Any:
            """Tell the planner what the pass has grown by, and the ledger by whom."""
            still = tokens_to_come(req) - admission.prefix_len
            coordinator.admitted(admission.prefix_len, admission.extend_len, still)
            runtime.agreement.note(req.rid, admission.prefix_len, admission.extend_len)
            explainer.admitted(req, coordinator.state(req.rid), admission.prefix_len)
            if runtime.lookahead is not None:
                runtime.lookahead.running(req.rid)
            super()._commit_prefill_admission(req, admission, *rest)
            self._has_split |= self._split_req is req
            if admission.is_chunked:
                self._keep_rest(req)

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            """Note what is said of a request, which may end the search."""
            if self.rem_input_tokens <= 0:
                # SGLang looks at this after it has added a request, which is too late
                # where an unfinished prompt waits: it would count the pass as its own.
                verdict = AddReqResult.OTHER
            else:
                verdict = super().add_one_req(req, *args, **kwargs)
            explainer.looked_at(verdict.name)
            return verdict

        def add_chunked_req(self, req: Any) -> Any:
            """Let the unfinished prompt go on, behind its back if that has come."""
            self._has_split = cache.split_end(req) is not None
            if not self._fits(req):
                # Decoders took the room meanwhile. They go on, end or are retracted;
                # nobody passes the unfinished prompt.
                self.rem_input_tokens = 0
                return req
            limit = cache.resume_split(req)
            if limit:
                # SGLang's own bound, where it has set one just before.
                others: int | None = self.chunked_req_limit
                self.chunked_req_limit = limit if others is None else min(limit, others)
            left = super().add_chunked_req(req)
            if any(added is req for added in self.can_run_list):
                still = tokens_to_come(req) - req.prefix_len
                coordinator.admitted(req.prefix_len, req.extend_len, still)
                runtime.agreement.note(req.rid, req.prefix_len, req.extend_len)
                cache.keep_back(req)
            else:
                cache.undo_back(req)
            if left is not None:
                self._keep_rest(req)
            return left

        def _keep_rest(self, req: Any) -> None:
            """Keep room for the rest of an unfinished prompt and for its answer."""
            if self.rem_chunk_tokens is None or self.rem_chunk_tokens <= 0:
                return  # nobody follows in this pass
            self.memory_budget.reserve(
                len(req.full_untruncated_fill_ids) - req.extend_end,
                self._get_running_request_total_token_offset(req),
            )

        def _fits(self, req: Any) -> bool:
            """Say whether there is room for the next chunk, or no decoder to wait for.

            Its chunk cannot be refused later: SGLang stops where it gets no slots.
            """
            batch, chunk = self.running_batch, self.rem_chunk_tokens
            if chunk is None or batch is None or batch.is_empty():
                return True
            left = len(req.full_untruncated_fill_ids) - req.prefix_len
            return bool(self.ceil_paged_tokens(min(left, chunk)) <= self.cur_rem_tokens)

    return TieredPrefillAdder
