"""A discrete-event model of one SGLang server around the real ``TieredCache``.

One pass at a time: a prefill pass where something waits and fits (prefill first),
otherwise decode steps of the running batch. Decode steps with one batch are one event:
their end is known in closed form, and an arrival cuts them at the next step's end, as
the scheduler looks at its queue between steps. When the pool is too full for a step,
requests are retracted in SGLang's order. Equal seeds give equal event logs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from sgl_tiered.cache.device_ranking import DeviceRanking
from sgl_tiered.cache.lookahead import QueueLookahead
from sgl_tiered.cache.prefetcher import measured_tpot_s
from sgl_tiered.policies.admission.registry import NO_ADMISSION
from sgl_tiered.policies.eviction.registry import make_eviction_policy
from sgl_tiered.policies.prefetch.base import Decoding
from sgl_tiered.sim.admission import Admission, PassPlan
from sgl_tiered.sim.answers import AnswerLengths
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.device_tree import DeviceTree, TreeNode
from sgl_tiered.sim.events import Event, EventLog, EventQueue, Priority
from sgl_tiered.sim.explain import SimLedger
from sgl_tiered.sim.holding import Holding
from sgl_tiered.sim.layers import LayerMemory, StepShape
from sgl_tiered.sim.lower import NAMESPACE, LowerTiers
from sgl_tiered.sim.records import (
    DecodeSegment,
    PrefillPass,
    RequestRecord,
    SimResult,
)
from sgl_tiered.sim.requests import SimWorkload
from sgl_tiered.sim.sequence import Sequence

__all__ = ["SimServer", "simulate"]

_RECHECK_STEPS = 16
"""Decode steps after which a request that did not fit is looked at again, although
nobody has finished: the reserved part of the answers shrinks. SGLang looks every step;
16 steps are less than a second, and the request waits for whole answers to end."""
_HELD_RECHECK_STEPS = 4
"""The same for one that is held: what the decoders can spare grows step by step."""
_TOKENIZER_S = 1e-4
"""Requests reach the scheduler one after the other, at least so far apart, as one
process tokenizes them all: the first of those that are sent together finds the device
idle and goes into a pass of its own."""


def simulate(config: ServerConfig, workload: SimWorkload) -> SimResult:
    """Run a workload to its end."""
    return SimServer(config, workload).run()


class SimServer:
    """One run; use ``run`` once.

    Args:
        config: of the server.
        workload: made for the same page size.
    """

    def __init__(self, config: ServerConfig, workload: SimWorkload) -> None:
        assert config.page_tokens == workload.page_tokens, "page sizes differ"
        self.config = config
        self.queue = EventQueue()
        self.log = EventLog()
        self.lookahead = _make_lookahead(config)
        self._digest = NAMESPACE.digest()
        ranking = _make_ranking(config, self.lookahead)
        self.tree = DeviceTree(config.capacity_pages, ranking, self._digest)
        self.lower: LowerTiers | None = None
        if config.tiers:
            self.lower = LowerTiers(
                config, self.queue, self.log, self._wake, self.tree, self.lookahead
            )
        self.lengths = AnswerLengths.make(config, workload.requests)
        self.ledger = SimLedger(config, self.queue, self.lower, len(workload.requests))
        self.layers: LayerMemory | None = None
        if config.layers is not None:
            book = None if self.lengths is None else self.lengths.book
            self.layers = LayerMemory(
                config, self.queue, book, lambda: self._wake(True)
            )
        self._holding: Holding | None = None
        if config.scheduler.slo_admission != NO_ADMISSION:
            assert self.lengths is not None, "checked with the settings"
            self._holding = Holding(config, self.lengths.book, self.layers)
        self.admission = Admission(
            config, self.tree, self.lower, self.ledger, self._holding, self.layers
        )
        self._workload = workload
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        # Those of them that take part in decode steps; the others are paused.
        self._decoding: list[Sequence] = []
        self._shape: StepShape | None = None
        self._segments: list[DecodeSegment] = []
        self._passes: list[PrefillPass] = []
        self._records: list[RequestRecord | None] = [None] * len(workload.requests)
        self._followers: dict[int, list[int]] = {}
        self._starts: deque[int] = deque()
        self._num_retractions = 0
        self._tokenizer_free_s = 0.0
        self._in_pass = False
        self._segment: DecodeSegment | None = None
        self._segment_end: Event | None = None
        self._step_event: Event | None = None

    def run(self) -> SimResult:
        """Run to the end of the last request."""
        requests = self._workload.requests
        for index, request in enumerate(requests):
            if request.after >= 0:
                self._followers.setdefault(request.after, []).append(index)
            else:
                self._starts.append(index)
        for _ in range(self._workload.num_clients or len(self._starts)):
            self._begin_next()
        self.queue.run()
        records = [record for record in self._records if record is not None]
        assert len(records) == len(self._records), "a request never ended"
        links = self.lower.links if self.lower is not None else []
        return SimResult(
            records=tuple(records),
            segments=tuple(self._segments),
            passes=tuple(self._passes),
            log=self.log,
            end_s=max((record.finished_s for record in records), default=0.0),
            num_retractions=self._num_retractions,
            peak_pages=self.tree.peak_pages,
            link_bytes={link.name: link.num_bytes for link in links},
            cache=self.lower.stats if self.lower is not None else None,
            layers=self.layers.counts if self.layers is not None else None,
            lengths=self.lengths.report() if self.lengths is not None else None,
        )

    def state(self) -> str:
        """Say how far the run is; any thread may ask."""
        num_ended = sum(record is not None for record in self._records)
        return f"{num_ended:,} of {len(self._records):,} requests"

    # -- Arrivals --------------------------------------------------------------

    def _begin_next(self) -> None:
        """Begin the next conversation, if there is one."""
        if self._starts:
            index = self._starts.popleft()
            arrival_s = self._workload.requests[index].arrival_s
            self._plan_arrival(index, max(arrival_s, self.queue.now()))

    def _plan_arrival(self, index: int, arrival_s: float) -> None:
        queued_s = arrival_s + self.config.times.request_s
        if self.lengths is not None:
            queued_s += self.lengths.ask(index)

        def arrive() -> None:
            self._arrive(index, arrival_s)

        def take_turn() -> None:
            turn_s = max(self.queue.now(), self._tokenizer_free_s)
            self._tokenizer_free_s = turn_s + _TOKENIZER_S
            self.queue.at(turn_s, Priority.ARRIVAL, arrive)

        self.queue.at(queued_s, Priority.ARRIVAL, take_turn)

    def _arrive(self, index: int, arrival_s: float) -> None:
        now_s = self.queue.now()
        seq = Sequence(index, self._workload.requests[index], arrival_s)
        self.log.add(now_s, "queued", index, seq.request.num_prompt_tokens)
        if not self.admission.can_ever_run(seq):
            self.log.add(now_s, "aborted", index)
            self.ledger.queued(seq)
            self._end(seq, aborted=True)
            return
        if self.lengths is not None:
            self.lengths.entered(index)
        self._enqueue(seq, at_front=False)
        self._wake(True)

    def _enqueue(self, seq: Sequence, *, at_front: bool) -> None:
        self._waiting.insert(0 if at_front else len(self._waiting), seq)
        if self.lookahead is not None:
            num_pages = seq.matchable_pages(self.config.page_tokens)
            pages = seq.request.page_ids[:num_pages]
            self.lookahead.entered(seq.index, self._digest, pages)
        if self.lower is not None:
            num_pages = seq.matchable_pages(self.config.page_tokens)
            pages = seq.request.page_ids[:num_pages]
            _, num_matched = self.tree.match(seq.page_raw[: num_pages * 4])
            self.lower.track(seq.index, pages, num_matched)
        self.ledger.queued(seq)

    # -- The scheduler's loop --------------------------------------------------

    def _wake(self, may_admit: bool) -> None:
        """Look at the queue as soon as the device's current step has ended."""
        if self._segment is not None:
            if may_admit:
                self._cut_segment()
        elif not self._in_pass and self._step_event is None:
            self._step_event = self.queue.at(
                self.queue.now(), Priority.WAKE, self._step
            )

    def _step(self) -> None:
        self._step_event = None
        if self._in_pass or self._segment is not None:
            return
        if self.lower is not None:
            self.lower.offload_ahead(self.tree)
        plan = self.admission.next_pass(self._waiting, self._running, self.queue.now())
        if plan.parts:
            self._start_pass(plan)
            self._look_ahead(plan, self.config.times.prefill_s(plan.work))
        elif self._running:
            self._look_ahead(plan, 0.0)
            self._start_decode(held=plan.held)
        elif self.admission.chunked is not None and plan.blocked:
            # Pages still being offloaded are all that is left: their end wakes us.
            assert self.tree.tree_pages, "nothing runs and nothing can be freed"
        else:
            self.admission.ratio.reset()

    def _look_ahead(self, plan: PassPlan, busy_s: float) -> None:
        """Let the tiers read ahead for those who wait, while the device is busy."""
        lower = self.lower
        prefetcher = None if lower is None else lower.prefetcher
        if lower is None or prefetcher is None:
            return
        page, now_s = self.config.page_tokens, self.queue.now()
        head = plan.left[: prefetcher.window]
        subjects = []
        for seq in head:
            raw = seq.page_raw[: 4 * seq.matchable_pages(page)]
            # Not a use of these pages.
            subjects.append((seq.index, self.tree.find(raw)[1]))
        # What those that run, and those of this pass, will still take.
        answers = {
            seq.index: self._answer_tokens(seq)
            for seq in [*self._running, *head, *(part[0] for part in plan.parts)]
        }
        ends = [
            -(-(seq.input_tokens - seq.outputs + answers[seq.index]) // page)
            for seq in head
        ]
        passed = [(seq.outputs, now_s - seq.first_token_s) for seq in self._running]
        num_held = len(self._running) + len(plan.parts)
        lower.look_ahead(
            subjects,
            [seq.index for seq in plan.left[len(head) :]],
            busy_s=busy_s,
            is_blocked=plan.blocked or num_held >= self.config.scheduler.max_running,
            tpot_s=measured_tpot_s(passed),
            decoding=[
                Decoding(answers[seq.index], past_s)
                for seq, (_, past_s) in zip(self._running, passed, strict=True)
            ],
            sizes=ends,
            reserved_pages=sum(
                -(-max(answers[seq.index] - seq.outputs, 0) // page)
                for seq in [*self._running, *(part[0] for part in plan.parts)]
            ),
        )

    def _answer_tokens(self, seq: Sequence) -> int:
        """Return how long an answer is expected to be; exactly, without a predictor."""
        if self.lengths is not None:
            said = self.lengths.book.prediction(seq.index, seq.outputs)
            if said is not None:
                return said.median
        return seq.request.num_output_tokens

    # -- Prefill ---------------------------------------------------------------

    def _start_pass(self, plan: PassPlan) -> None:
        self._in_pass = True
        now_s = self.queue.now()
        num_bytes = cxl_bytes = 0
        loading = [seq for seq, _, _ in plan.parts if seq.load_bytes]
        for seq, context, new in plan.parts:
            if self.lookahead is not None:
                self.lookahead.running(seq.index)
            if seq.admitted_s < 0:
                seq.admitted_s = now_s
            self.log.add(now_s, "prefill", seq.index, context, new)
            num_bytes += seq.load_bytes
            cxl_bytes += seq.cxl_bytes
            seq.load_bytes = seq.cxl_bytes = 0
        compute_s = self.config.times.prefill_s(plan.work)

        def end() -> None:
            self._end_pass(plan, now_s, compute_s, num_bytes)

        if not num_bytes:
            pass_s = compute_s
            if self.layers is not None:
                pass_s = self.layers.start_pass(plan.parts, compute_s)
            self.queue.at(now_s + pass_s, Priority.PASS, end)
            return
        assert self.lower is not None
        # Layer by layer: the last layer is computed once it has come; what was
        # computed before that is hidden. A thread that copies hides nothing.
        num_layers = self.config.num_layers
        overlapped = self.config.load_mode == "layerwise"
        after_s = compute_s / num_layers if overlapped else compute_s

        def loaded() -> None:
            for seq in loading:
                seq.load_s += self.queue.now() - now_s
            end_s = self.queue.now() + after_s
            self.queue.at(max(end_s, now_s + compute_s), Priority.PASS, end)

        self.lower.load(num_bytes, cxl_bytes, loaded)

    def _end_pass(
        self, plan: PassPlan, start_s: float, compute_s: float, num_bytes: int
    ) -> None:
        now_s = self.queue.now()
        self._in_pass = False
        num_tokens = sum(new for _, new in plan.work)
        stall_s = max(0.0, now_s - start_s - compute_s)
        self._passes.append(
            PrefillPass(start_s, now_s, len(plan.parts), num_tokens, num_bytes, stall_s)
        )
        for (seq, context, new), is_whole in zip(
            plan.parts, plan.is_whole, strict=True
        ):
            seq.kv_tokens = context + new
            if self.layers is not None:
                self.layers.end_pass(seq)
            self._publish(seq)
            if is_whole:
                self._first_token(seq, now_s)
        self._step()

    def _first_token(self, seq: Sequence, now_s: float) -> None:
        seq.outputs += 1
        self.ledger.first_token(seq)
        if seq.first_token_s < 0:
            seq.first_token_s = now_s
        else:
            seq.resumed_s.append(now_s)
        self.log.add(now_s, "token", seq.index, seq.outputs)
        if seq.tokens_left == 0:
            self._finish(seq)
        else:
            seq.span_start = len(self._segments)
            self._running.append(seq)
            if self.layers is not None:
                self._decoding.append(seq)

    def _publish(self, seq: Sequence) -> None:
        """Give whole pages to the tree, end the load, offload what is new."""
        if not self.config.device_reuse:
            return
        seq.publish(self.tree, self.config.page_tokens)
        if self.lower is None:
            return
        self.lower.settle(seq.index)
        if seq.tree_pages <= seq.offloaded_pages:
            return
        seen_pages, seq.offloaded_pages = seq.offloaded_pages, seq.tree_pages
        pages = seq.request.page_ids[: seq.tree_pages]
        if self.lower.defers:
            self.lower.defer(pages, seen_pages)
            return
        node = seq.node
        assert node is not None
        self.tree.lock(node)
        unlock = self._unlocker(node)
        if not self.lower.offload(seq.index, pages, unlock, seen_pages):
            self.tree.unlock(node)

    def _unlocker(self, node: TreeNode) -> Callable[[], None]:
        return lambda: self.tree.unlock(node)

    # -- Decode ----------------------------------------------------------------

    def _start_decode(self, *, held: bool) -> None:
        self._take_turns()
        if self._pages_for(1) > self.tree.available_pages:
            self._retract()
            if not self._running:
                self._wake(True)
                return
        running = self._decoding
        batch = len(running)
        if not batch:
            # All wait for copies to the host; the first that lands wakes us.
            return
        num_steps = min(seq.tokens_left for seq in running)
        if self._waiting or self.admission.chunked is not None:
            most = _HELD_RECHECK_STEPS if held else _RECHECK_STEPS
            num_steps = min(num_steps, most)
        num_steps = self._steps_with_room(num_steps)
        contexts = sum(seq.kv_tokens for seq in running) + batch
        first_s = self.config.times.decode_step_s(batch, contexts)
        growth_s = self.config.times.decode_context_token_s * batch
        if self.layers is not None:
            num_steps = self.layers.steps(running, num_steps)
            self._shape = self.layers.shape(running)
            first_s, growth_s = self._shape.first_s, self._shape.growth_s
        self._segment = DecodeSegment(
            start_s=self.queue.now(),
            first_s=first_s,
            growth_s=growth_s,
            num_steps=num_steps,
            batch=batch,
        )
        self._plan_segment_end()

    def _take_turns(self) -> None:
        """Settle who decodes; without layer-wise memory, everybody."""
        before, now = self._decoding, self._running
        if self.layers is not None:
            now = self.layers.choose(self._running)
            num = len(self._segments)
            for seq in set(before).difference(now):
                seq.spans.append((seq.span_start, num))
            for seq in set(now).difference(before):
                seq.span_start = num
        self._decoding = now

    def _plan_segment_end(self) -> None:
        segment = self._segment
        assert segment is not None
        end_s = segment.start_s + segment.seconds(segment.num_steps)
        self._segment_end = self.queue.at(end_s, Priority.PASS, self._end_decode)

    def _cut_segment(self) -> None:
        """Let the segment end with the step that is under way."""
        segment, event = self._segment, self._segment_end
        assert segment is not None
        assert event is not None
        passed_s = self.queue.now() - segment.start_s
        low, high = 1, segment.num_steps
        while low < high:
            middle = (low + high) // 2
            if segment.seconds(middle) >= passed_s:
                high = middle
            else:
                low = middle + 1
        if low < segment.num_steps:
            event.cancel()
            self._segment = DecodeSegment(
                segment.start_s, segment.first_s, segment.growth_s, low, segment.batch
            )
            self._plan_segment_end()

    def _end_decode(self) -> None:
        segment = self._segment
        assert segment is not None
        num_pages = self._pages_for(segment.num_steps)
        # Before each step SGLang frees a page for every request, needed or not.
        is_vllm = self.config.scheduler.admission == "vllm"
        used_before = self._pages_for(segment.num_steps - 1)
        spare = 0 if is_vllm else segment.batch - (num_pages - used_before)
        taken = self.tree.take_private(num_pages, spare)
        assert taken, f"{num_pages} pages were there when the segment began"
        self._segment = self._segment_end = None
        self._segments.append(segment)
        self.admission.ratio.decay(segment.num_steps)
        page = self.config.page_tokens
        ended = []
        for seq in self._decoding:
            held = -(-seq.kv_tokens // page)
            seq.kv_tokens += segment.num_steps
            seq.private_pages += -(-seq.kv_tokens // page) - held
            seq.outputs += segment.num_steps
            if seq.tokens_left == 0:
                ended.append(seq)
        if self._shape is not None and self.layers is not None:
            self.layers.end_steps(self._decoding, segment.num_steps, self._shape)
        if ended:
            self._running = [seq for seq in self._running if seq.tokens_left]
            self._decoding = [seq for seq in self._decoding if seq.tokens_left]
        for seq in ended:
            seq.spans.append((seq.span_start, len(self._segments)))
            self._finish(seq)
        self._step()

    def _pages_for(self, num_steps: int) -> int:
        page = self.config.page_tokens
        return sum(
            -(-(seq.kv_tokens + num_steps) // page) + (-seq.kv_tokens // page)
            for seq in self._decoding
        )

    def _steps_with_room(self, num_steps: int) -> int:
        """Return how many of these steps the pool has room for; at least one."""
        available = self.tree.available_pages
        low, high = 1, num_steps
        if self._pages_for(high) <= available:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self._pages_for(middle) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    # -- Ends ------------------------------------------------------------------

    def _retract(self) -> None:
        """Take pages from running requests until a step fits."""
        is_vllm = self.config.scheduler.admission == "vllm"
        if is_vllm:
            # The newest goes first, and is the first to come back.
            keep = sorted(self._running, key=lambda seq: seq.arrival_s)
        else:
            keep = sorted(
                self._running,
                key=lambda seq: (seq.outputs, -seq.request.num_prompt_tokens),
                reverse=True,
            )
        now_s = self.queue.now()
        while self._pages_for(1) > self.tree.available_pages:
            seq = keep.pop()
            if seq in self._decoding:
                seq.spans.append((seq.span_start, len(self._segments)))
            self._running.remove(seq)
            if self.layers is not None:
                self._decoding = [one for one in self._decoding if one is not seq]
            if not self._running and self.admission.chunked is None:
                # Pages under offload are all that is left; it comes back for them.
                assert self.lower is not None, "one request alone does not fit"
            self.log.add(now_s, "retracted", seq.index, seq.outputs)
            seq.num_retractions += 1
            self._num_retractions += 1
            self._release(seq)
            if self.lookahead is not None:
                self.lookahead.left(seq.index)
            if self.lower is not None:
                self.lower.forget(seq.index)
            self._enqueue(seq, at_front=is_vllm)
        self.admission.ratio.retracted(self._running)

    def _finish(self, seq: Sequence) -> None:
        now_s = self.queue.now()
        self._publish(seq)
        self._release(seq)
        self.ledger.finished(seq)
        if self.lookahead is not None:
            self.lookahead.finished(seq.index)
        if self.lower is not None:
            self.lower.forget(seq.index)
        if self.lengths is not None:
            self.lengths.book.finished(seq.index, seq.outputs)
        self.log.add(now_s, "finished", seq.index, seq.outputs)
        self._end(seq, aborted=False)

    def _release(self, seq: Sequence) -> None:
        seq.release(self.tree)
        if self.layers is not None:
            self.layers.release(seq)

    def _end(self, seq: Sequence, *, aborted: bool) -> None:
        now_s = self.queue.now()
        if aborted:
            self.ledger.aborted(seq)
        self._records[seq.index] = seq.record(now_s, aborted=aborted)
        followers = self._followers.pop(seq.index, [])
        if not followers and self._workload.num_clients:
            self._begin_next()
        for follower in followers:
            request = self._workload.requests[follower]
            arrival_s = max(request.arrival_s, now_s + request.think_s)
            self._plan_arrival(follower, arrival_s)


def _make_lookahead(config: ServerConfig) -> QueueLookahead | None:
    names = [config.device_eviction, *([config.eviction] if config.tiers else [])]
    rng = np.random.default_rng(config.seed)
    needed = any(make_eviction_policy(name, rng).needs_queue for name in names)
    return QueueLookahead(1) if needed else None


def _make_ranking(
    config: ServerConfig, lookahead: QueueLookahead | None
) -> DeviceRanking | None:
    """Return the ranking of the device's tree; None for SGLang's own LRU."""
    if config.device_eviction == "lru":
        return None
    return DeviceRanking(
        make_eviction_policy(
            config.device_eviction, np.random.default_rng(config.seed)
        ),
        config.capacity_pages,
        1,
        lookahead,
        real_page_tokens=config.page_tokens,
    )
