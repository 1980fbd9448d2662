"""SLO admission inside SGLang's prefill adder: targets, clocks and parts of prompts.

What is held, and for how long, is decided in `sgl_tiered.policies.admission`, which the
simulator shares. Here SGLang's requests become its facts. A held request ends the
search of a pass with ``OTHER``, so it keeps its place and those behind it theirs. A
prompt in progress that is held is left out of the pass, and nobody else is admitted
past it. While nothing decodes nothing is held, so the scheduler's loop never turns
without work because of this.

Times are seconds of the runtime's clock, which is ``time.perf_counter`` as in
SGLang's own ``time_stats``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sgl_tiered.core.clock import Clock
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.engines.sglang.decoders import Decoders
from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.seams import tiered_runtime
from sgl_tiered.engines.sglang.splitting import prefill_adder_class
from sgl_tiered.engines.sglang.step_times import (
    StepTimes,
    context_tokens,
    first_decode_cost,
)
from sgl_tiered.metrics.ledger import WaitReason
from sgl_tiered.policies.admission.control import AdmissionControl, Waiter
from sgl_tiered.policies.admission.pieces import LEAST_PIECE_SHARE
from sgl_tiered.policies.admission.registry import NO_ADMISSION, make_admission
from sgl_tiered.serving.agreement import ARRIVED, Agreement
from sgl_tiered.serving.options import Options

__all__ = ["ServedAdmission", "adder_class"]

StepSeconds = Callable[[float, float], float]
"""Seconds of a step of so many requests with so many tokens of context in all."""


class ServedAdmission:
    """What one scheduler knows for its admission.

    Args:
        config: names the policy and the targets of requests that bring none.
        runtime: predicts passes; ``predicted_pass_s``.
        lengths: what is predicted of the answers under way.
        decode: time of a step, learned here.
        clock: SGLang's time base.
        page_tokens: tokens of a page.
        chunk_tokens: of SGLang's chunked prefill; None or less than 1 without.
        agreement: between the ranks; None for a single one.
        pace_s: seconds of a token with so many requests and so many tokens of context
            in all, where not all of them take part in each step; None for the step's
            (Eq. 1's T_future).
        paused_s: how long a request was paused between its tokens, None for one that
            is now: prefill delays nobody who waits for a turn. None for no pauses.
    """

    def __init__(
        self,
        config: Options,
        runtime: Any,
        lengths: LengthReader,
        decode: DecodeCost,
        clock: Clock,
        *,
        page_tokens: int,
        chunk_tokens: int | None,
        agreement: Agreement | None = None,
        pace_s: StepSeconds | None = None,
        paused_s: Callable[[str], float | None] | None = None,
    ) -> None:
        self._agreement = agreement or Agreement(clock)
        self._steps = StepTimes(self._agreement.learned(decode.observe))
        self._runtime = runtime
        self._clock = clock
        self._decode = decode
        self._pace_s = pace_s or decode.seconds
        self._paused_s = paused_s or (lambda rid: 0.0)
        self._decoders = Decoders(config, lengths, self._agreement)
        least = int(max(chunk_tokens or 0, 0) * LEAST_PIECE_SHARE)
        self.control = AdmissionControl(
            make_admission(config.slo.admission), page_tokens, least
        )

    def begin_pass(
        self, running: list[Any], begun: Any | None, waiting: list[Any]
    ) -> None:
        """Begin a pass.

        Args:
            running: SGLang's requests that decode.
            begun: whose prompt is computed in part; None for nobody.
            waiting: the queue.
        """
        now_s = self._clock.now()
        reqs = [req for req in running if not req.finished()]
        batch, contexts = len(reqs), context_tokens(reqs)

        def step_s(num_added: int) -> float:
            grown = (batch + num_added) / max(batch, 1)
            return self._pace_s(batch + num_added, contexts * grown)

        facts = []
        for req in reqs:
            paused_s = self._paused_s(req.rid)
            if paused_s is None:
                continue
            one = self._decoders.running(req, now_s - paused_s)
            if one is not None:
                facts.append(one)
        self.control.begin_pass(facts, step_s, now_s)
        queue = waiting if begun is None else [begun, *waiting]
        self.control.see_queue(
            [req.rid for req in queue],
            lambda n: self._waiter(queue[n], 0),
        )

    def bring_due_first(self, waiting: list[Any]) -> None:
        """Move the most overdue request, if any is due, to the head of the queue."""
        first = self.control.first_due(
            [req.rid for req in waiting], lambda n: self._waiter(waiting[n], 0)
        )
        if first:
            waiting.insert(0, waiting.pop(first))

    def fit(
        self,
        req: Any,
        prefix: int,
        new: int,
        *,
        can_cut: bool,
        has_room: Callable[[int], bool] | None = None,
    ) -> int:
        """Return how many of ``new`` tokens after ``prefix`` may be computed now.

        They count as part of the pass once ``commit`` says so.
        """

        def pass_s(num_tokens: int) -> float:
            return self._pass_s(req, prefix, num_tokens)

        waiter = self._waiter(req, prefix)
        return self.control.fit(waiter, pass_s, new, can_cut=can_cut, has_room=has_room)

    def commit(self, rid: str) -> None:
        """Note that what ``fit`` has let in last of a request joins the pass."""
        self.control.commit(rid)

    def observe_step(self, batch: Any) -> None:
        """Learn from a decode step."""
        self._steps.observe(batch)

    def forget(self, rid: str) -> None:
        """Forget a request that has left."""
        self._decoders.forget(rid)
        self.control.forget(rid)

    def stats(self) -> dict[str, Any]:
        """Return what was decided so far, for ``GET /tiered/stats``."""
        return {
            "policy": self.control.policy.name,
            **asdict(self.control.counts),
            "bad_targets": self._decoders.num_bad_targets,
            "step_s": {f"batch_{n}": self._decode.seconds(n, 0) for n in (1, 16)},
            "steps_observed": self._decode.num_observations,
        }

    def _waiter(self, req: Any, prefix: int) -> Waiter:
        num_tokens = len(req.origin_input_ids) + len(req.output_ids)
        return Waiter(
            req.rid,
            self._agreement.moment_s(
                req.rid, ARRIVED, req.time_stats.scheduler_recv_time
            ),
            self._decoders.targets(req).ttft_s,
            self._pass_s(req, prefix, num_tokens - prefix),
            is_resumed=len(req.output_ids) > 0,
        )

    def _pass_s(self, req: Any, prefix: int, new: int) -> float:
        seconds: float = self._runtime.predicted_pass_s(req.rid, prefix, new)
        return seconds


def adder_class(original: Any, scheduler: Any) -> Any:
    """Return the adder that splits prompts, and holds them where that is asked for."""
    base = _holding_adder_class(original, scheduler)
    runtime = tiered_runtime(scheduler.tree_cache)
    if runtime is None or runtime.config.layerkv is None:
        return base
    from sgl_tiered.engines.sglang.layered.admission import layered_adder_class

    return layered_adder_class(base, scheduler, runtime)


def _holding_adder_class(original: Any, scheduler: Any) -> Any:
    base = prefill_adder_class(original, scheduler)
    runtime = tiered_runtime(scheduler.tree_cache)
    if runtime is None or runtime.config.slo.admission == NO_ADMISSION:
        return base
    if runtime.admission is None:
        runtime.admission = _served(runtime, scheduler)
    from sglang.srt.managers.schedule_policy import AddReqResult

    def held() -> None:
        runtime.explainer.stops_for(WaitReason.SLO)

    return _slo_adder_class(base, scheduler, runtime.admission, AddReqResult, held)


def _served(runtime: Any, scheduler: Any) -> ServedAdmission:
    config = runtime.config
    is_layered = config.layerkv is not None
    return ServedAdmission(
        config,
        runtime,
        runtime.lengths,
        first_decode_cost(config, runtime.cost.prefill),
        runtime.clock,
        page_tokens=runtime.page_tokens,
        chunk_tokens=scheduler.chunked_prefill_size,
        agreement=runtime.agreement,
        pace_s=runtime.pace_s if is_layered else None,
        paused_s=runtime.paused_s if is_layered else None,
    )


def _slo_adder_class(
    base: Any,
    scheduler: Any,
    admission: ServedAdmission,
    verdicts: Any,
    held: Callable[[], None],
) -> Any:
    """Return an adder on top of ``base`` that asks the admission.

    Args:
        base: SGLang's ``PrefillAdder``, or a class on top of it.
        scheduler: whose queue it is.
        admission: asked for each prompt.
        verdicts: SGLang's ``AddReqResult``.
        held: told when a search ends because a prompt is held.
    """

    class SloPrefillAdder(base):
        """Holds what would make decoders late; cuts what can be cut."""

        asks_for_room = True
        """It calls ``_has_room`` for what it lets in, and for no more than that."""

        def _has_room(self, req: Any, prefix: int, new: int, *, is_begun: bool) -> bool:
            """Return whether memory has room for a part; told by a class on top."""
            del req, prefix, new, is_begun
            return True

        def _part(
            self, req: Any, prefix: int, new: int, *, can_cut: bool, is_begun: bool
        ) -> int:
            """Return how many of ``new`` tokens join the pass; say why if none do."""
            is_full = False

            def has_room(part: int) -> bool:
                nonlocal is_full
                is_full = not self._has_room(req, prefix, part, is_begun=is_begun)
                return not is_full

            part = admission.fit(req, prefix, new, can_cut=can_cut, has_room=has_room)
            if not part and not is_full:
                held()
            return part

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.chunked_req_limit: int | None
            batch = self.running_batch
            running = [] if batch is None else batch.reqs
            begun = scheduler.chunked_req
            admission.begin_pass(running, begun, scheduler.waiting_queue)
            # Priorities are the operator's word on who may overtake whom.
            if not scheduler.enable_priority_scheduling:
                admission.bring_due_first(scheduler.waiting_queue)

        def _select_prefill_admission(self, req: Any, **facts: Any) -> Any:
            """Hold a prompt, or end its part where the decoders' patience ends."""
            chosen = super()._select_prefill_admission(req, **facts)
            if isinstance(chosen, verdicts):
                return chosen
            can_cut = (
                self.rem_chunk_tokens is not None
                and self.new_chunked_req is None
                and not facts.get("has_chunked_req")
                and facts.get("truncation_align_size") is None
                and self.dllm_config is None
            )
            new = chosen.extend_len
            part = self._part(
                req, chosen.prefix_len, new, can_cut=can_cut, is_begun=False
            )
            if part == new:
                return chosen
            if not part:
                return verdicts.OTHER
            return type(chosen)(chosen.prefix_len, part, 0, True, chosen.replay_len)

        def _commit_prefill_admission(self, req: Any, chosen: Any, *rest: Any) -> None:
            """Count what joins the pass: SGLang may have asked twice."""
            super()._commit_prefill_admission(req, chosen, *rest)
            admission.commit(req.rid)

        def add_chunked_req(self, req: Any) -> Any:
            """Let the unfinished prompt go on, by less, or not in this pass."""
            left = len(req.full_untruncated_fill_ids) - req.prefix_len
            room = left if self.rem_chunk_tokens is None else self.rem_chunk_tokens
            new = min(left, room)
            if new <= 0:
                return super().add_chunked_req(req)
            part = self._part(req, req.prefix_len, new, can_cut=True, is_begun=True)
            if not part:
                # Nobody passes it: SGLang has one unfinished prompt at a time, and
                # counts every pass as one of its.
                self.rem_input_tokens = 0
                return req
            if part < new:
                others = self.chunked_req_limit
                self.chunked_req_limit = part if others is None else min(part, others)
            begun = super().add_chunked_req(req)
            if any(added is req for added in self.can_run_list):
                admission.commit(req.rid)
            return begun

    return SloPrefillAdder
