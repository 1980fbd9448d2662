"""Several modelled servers behind the product's global scheduler (MemServe, Figure 8).

An instance computes by ``DeviceTimes`` and keeps its KV in a real ``TableStore``
(table, radix index, LRU), active and historical blocks alike. Who serves is decided by
a policy of ``policies/routing`` on facts gathered from the instances, which is what a
router knows that follows their events without delay. Kinds and caching are the paper's:

- colocated: prefill passes before decode steps, as vLLM 0.4 has it, no chunks.
- prefill and decode, ``caching`` 0: no KV is kept; 1: prefill keeps what it computed;
  2: decode keeps too, and only what it lacks is sent; 3: the answer's KV goes back.

A request's first token is the end of its prefill pass. Its KV then goes over the
decode instance's link, one transfer after the other, and it decodes from the next step
on. Room for the whole answer is taken when a request is admitted. Pools are one token
stream: no retraction. One seed, one result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Int32s, Int64s, UInt64s
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.policies.routing.base import (
    NUM_PLACES,
    FleetFacts,
    RequestFacts,
    RoutingPolicy,
)
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.sim.events import EventQueue, Priority
from sgl_tiered.sim.hardware import LinkSpeed
from sgl_tiered.sim.records import Float64s
from sgl_tiered.sim.times import DeviceTimes

__all__ = [
    "COLOCATED",
    "DECODE",
    "PREFILL",
    "ClusterConfig",
    "ClusterRequest",
    "ClusterResult",
    "simulate_cluster",
]

PREFILL, DECODE, COLOCATED = "prefill", "decode", "colocated"
_NAMESPACE = b"cluster"
_NONE: UInt64s = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """One request.

    Attributes:
        arrival_s: not sent before.
        prompt: int32 token ids, shape [num_tokens].
        answer: int32 token ids, known beforehand, shape [num_answer_tokens], one or
            more.
        session: which conversation.
        after: number of the request whose answer it waits for; -1 for none.
    """

    arrival_s: float
    prompt: Int32s
    answer: Int32s
    session: str = ""
    after: int = -1


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The instances and what they are made of.

    Attributes:
        kinds: of each instance.
        times: of each instance's device.
        pool_pages: KV pages of each.
        page_tokens: tokens in one.
        page_bytes: bytes of one, all layers.
        link: between two instances.
        caching: 0 to 3; a colocated instance keeps KV from 1 on.
        max_pass_tokens: new tokens of a prefill pass, but for a longer single prompt.
        max_batch: requests that decode together.
    """

    kinds: tuple[str, ...]
    times: DeviceTimes
    pool_pages: int
    page_tokens: int
    page_bytes: int
    link: LinkSpeed
    caching: int = 0
    max_pass_tokens: int = 4096
    max_batch: int = 256

    def __post_init__(self) -> None:
        kinds = set(self.kinds)
        if kinds not in ({COLOCATED}, {PREFILL, DECODE}):
            raise ConfigError(
                "kinds",
                f"{', '.join(self.kinds)} cannot serve together",
                "use colocated ones only, or prefill and decode ones",
            )
        if not 0 <= self.caching <= 3:
            raise ConfigError("caching", f"{self.caching} is no mode", "use 0 to 3")


@dataclass(frozen=True, slots=True, eq=False)
class ClusterResult:
    """What came out, per request and in all.

    Attributes:
        ttft_s: from sending to the first token, shape [num_requests].
        jct_s: to the last token, shape [num_requests].
        tpot_s: between two tokens after the first; NaN for answers of one token.
        cached_tokens: of the prompt where the prefill ran, shape [num_requests].
        sent_pages: KV pages that went over links, to decode and back.
        stored_pages: pages that became historical, over all instances.
        end_s: when the last request ended.
    """

    ttft_s: Float64s
    jct_s: Float64s
    tpot_s: Float64s
    cached_tokens: Int64s
    sent_pages: int
    stored_pages: int
    end_s: float


@dataclass(slots=True, eq=False)
class _Task:
    """A request under way.

    Attributes:
        number: of the request.
        sent_s: when it was sent.
        first_s: its first token.
        num_out: tokens of its answer so far.
        cached: tokens found where its prefill ran.
        held: its leading blocks that were there, pinned, on the instance that has it.
        own: its other blocks there.
    """

    number: int
    sent_s: float
    first_s: float = 0.0
    num_out: int = 0
    cached: int = 0
    held: UInt64s = field(default_factory=lambda: _NONE)
    own: UInt64s = field(default_factory=lambda: _NONE)


class _Instance:
    """One server: a store of KV, a queue, a batch."""

    def __init__(
        self, number: int, kind: str, config: ClusterConfig, clock: EventQueue
    ) -> None:
        self.name = f"i{number}"
        self.kind = kind
        self.keeps = config.caching >= (2 if kind == DECODE else 1)
        self.store = TableStore(
            number,
            PageLayout(1, config.page_tokens, 1),  # nobody reads the bytes
            {TierId.DEVICE: config.pool_pages},
            {TierId.DEVICE: LRUPolicy()},
            clock,
        )
        self.waiting: deque[_Task] = deque()
        # Prefill done elsewhere, waiting for room or for its KV.
        self.arriving: deque[tuple[_Task, _Instance]] = deque()
        self.running: list[_Task] = []
        self.waiting_tokens = 0
        self.num_tasks = 0
        self.is_busy = False
        self.link_free_s = 0.0


class _Cluster:
    """One run."""

    def __init__(
        self,
        config: ClusterConfig,
        requests: Sequence[ClusterRequest],
        policy: RoutingPolicy,
    ) -> None:
        self.config = config
        self.requests = requests
        self.policy = policy
        self.queue = EventQueue()
        self.instances = [
            _Instance(number, kind, config, self.queue)
            for number, kind in enumerate(config.kinds)
        ]
        self.followers: dict[int, list[int]] = {}
        self.ttft = np.full(len(requests), np.nan)
        self.jct = np.full(len(requests), np.nan)
        self.tpot = np.full(len(requests), np.nan)
        self.cached = np.zeros(len(requests), np.int64)
        self.sent_pages = self.stored_pages = self.turn = 0

    def run(self) -> ClusterResult:
        """Run to the end of the last request."""
        for number, request in enumerate(self.requests):
            if request.after >= 0:
                self.followers.setdefault(request.after, []).append(number)
            else:
                self._at(request.arrival_s, Priority.ARRIVAL, self._arrive, number)
        self.queue.run()
        unended = int(np.isnan(self.jct).sum())
        assert not unended, f"{unended} requests never ended"
        return ClusterResult(
            self.ttft,
            self.jct,
            self.tpot,
            self.cached,
            self.sent_pages,
            self.stored_pages,
            self.queue.now(),
        )

    # Routing.

    def _arrive(self, number: int) -> None:
        request = self.requests[number]
        first = COLOCATED if COLOCATED in self.config.kinds else PREFILL
        instance, cached = self._route(first, request)
        task = _Task(number, self.queue.now())
        instance.waiting.append(task)
        instance.waiting_tokens += len(request.prompt) - cached
        task.cached = cached
        instance.num_tasks += 1
        self._wake(instance)

    def _route(self, kind: str, request: ClusterRequest) -> tuple[_Instance, int]:
        """Return who is to serve, and the tokens that it seems to hold."""
        there = [each for each in self.instances if each.kind == kind]
        tokens = self.config.page_tokens
        held = [
            tokens * each.store.num_matching(_NAMESPACE, request.prompt)
            if each.keeps
            else 0
            for each in there
        ]
        holders = np.flatnonzero(np.array(held, np.int64))
        confirmed = np.array(held, np.int64)[holders]
        cached = np.zeros((len(holders), NUM_PLACES), np.int64)
        cached[:, TierId.DEVICE] = confirmed
        facts = FleetFacts(
            [each.name for each in there],
            np.array([each.waiting_tokens for each in there], np.int64),
            np.array([each.num_tasks for each in there], np.int64),
            holders,
            cached,
            confirmed,
        )
        asked = RequestFacts(len(request.prompt), request.session, self.turn)
        self.turn += 1
        best = self.policy.best(asked, facts)
        return there[best], held[best]

    # An instance.

    def _wake(self, instance: _Instance) -> None:
        """Begin transfers, and if it is idle a pass or a step, where there is work."""
        self._admit(instance)
        if instance.is_busy:
            return
        tasks = self._next_pass(instance)
        if tasks:
            parts = [
                (len(task.held) * self.config.page_tokens, self._num_new(task))
                for task in tasks
            ]
            instance.is_busy = True
            done_s = self.queue.now() + self.config.times.prefill_s(parts)
            self._at(done_s, Priority.PASS, self._end_pass, instance, tasks)
        elif instance.running:
            batch = list(instance.running)
            contexts = sum(
                len(self.requests[task.number].prompt) + task.num_out for task in batch
            )
            instance.is_busy = True
            end_s = self.queue.now()
            end_s += self.config.times.decode_step_s(len(batch), contexts)
            self._at(end_s, Priority.PASS, self._end_step, instance, batch)

    def _num_new(self, task: _Task) -> int:
        prompt = self.requests[task.number].prompt
        return len(prompt) - len(task.held) * self.config.page_tokens

    def _next_pass(self, instance: _Instance) -> list[_Task]:
        tasks: list[_Task] = []
        left = self.config.max_pass_tokens
        is_full = len(instance.running) >= self.config.max_batch
        while instance.waiting and not is_full:
            task = instance.waiting[0]
            request = self.requests[task.number]
            answer = len(request.answer) if instance.kind == COLOCATED else 0
            # One token at least is computed: its logits are what is asked for.
            num_tokens = len(request.prompt) + answer
            if not self._take_blocks(instance, task, request.prompt[:-1], num_tokens):
                break
            num_new = self._num_new(task)
            if tasks and num_new > left:
                self._give_blocks(instance, task)
                break
            instance.waiting.popleft()
            instance.waiting_tokens -= len(request.prompt) - task.cached
            task.cached = len(task.held) * self.config.page_tokens
            tasks.append(task)
            left -= num_new
        return tasks

    def _end_pass(self, instance: _Instance, tasks: list[_Task]) -> None:
        instance.is_busy = False
        for task in tasks:
            request = self.requests[task.number]
            task.first_s, task.num_out = self.queue.now(), 1
            self.ttft[task.number] = task.first_s - task.sent_s
            self.cached[task.number] = task.cached
            if len(request.answer) == 1:
                self._finish(instance, task)
            elif instance.kind == COLOCATED:
                instance.running.append(task)
            else:
                decode, _ = self._route(DECODE, request)
                decode.num_tasks += 1
                decode.arriving.append((task, instance))
                self._wake(decode)
        self._wake(instance)

    def _end_step(self, instance: _Instance, batch: list[_Task]) -> None:
        instance.is_busy = False
        for task in batch:
            task.num_out += 1
            if task.num_out >= len(self.requests[task.number].answer):
                instance.running.remove(task)
                self._finish(instance, task)
        self._wake(instance)

    # From prefill to decode, and back.

    def _admit(self, instance: _Instance) -> None:
        """Begin the transfers for which there is room at a decode instance."""
        while instance.arriving and len(instance.running) < self.config.max_batch:
            task, source = instance.arriving[0]
            request = self.requests[task.number]
            there = _Task(task.number, task.sent_s, task.first_s, 1, task.cached)
            num_tokens = len(request.prompt) + len(request.answer)
            if not self._take_blocks(instance, there, request.prompt, num_tokens):
                return
            instance.arriving.popleft()
            num_pages = -(-len(request.prompt) // self.config.page_tokens)
            done_s = self._send(instance, num_pages - len(there.held))
            self._at(
                done_s, Priority.TRANSFER, self._arrived, instance, there, source, task
            )

    def _arrived(
        self, instance: _Instance, there: _Task, source: _Instance, task: _Task
    ) -> None:
        prompt = self.requests[task.number].prompt
        self._keep_or_free(source, task, prompt)
        source.num_tasks -= 1
        instance.running.append(there)
        self._wake(instance)
        self._wake(source)

    def _send(self, to: _Instance, num_pages: int) -> float:
        """Take a transfer's turn on a receiver's link; return when it ends."""
        link, num_bytes = self.config.link, num_pages * self.config.page_bytes
        self.sent_pages += num_pages
        start_s = max(self.queue.now(), to.link_free_s)
        to.link_free_s = start_s + link.latency_s + num_bytes / link.bytes_per_s
        return to.link_free_s

    def _finish(self, instance: _Instance, task: _Task) -> None:
        request, now_s = self.requests[task.number], self.queue.now()
        self.jct[task.number] = now_s - task.sent_s
        if len(request.answer) > 1:
            gaps = len(request.answer) - 1
            self.tpot[task.number] = (now_s - task.first_s) / gaps
        # The last token's KV is never computed.
        tokens = np.concatenate([request.prompt, request.answer[:-1]])
        self._keep_or_free(instance, task, tokens)
        instance.num_tasks -= 1
        if instance.kind == DECODE and self.config.caching == 3:
            self._send_back(request, tokens)
        for number in self.followers.get(task.number, ()):
            due_s = max(self.requests[number].arrival_s, now_s)
            self._at(due_s, Priority.ARRIVAL, self._arrive, number)

    def _send_back(self, request: ClusterRequest, tokens: Int32s) -> None:
        """Send the answer's KV to the prefill instance with most of the prompt."""
        prefill = [each for each in self.instances if each.kind == PREFILL]
        held = [each.store.num_matching(_NAMESPACE, tokens) for each in prefill]
        best = int(np.argmax(held))
        num_pages = len(tokens) // self.config.page_tokens - held[best]
        if num_pages > 0:
            done_s = self._send(prefill[best], num_pages)
            self._at(done_s, Priority.TRANSFER, self._returned, prefill[best], tokens)

    def _returned(self, instance: _Instance, tokens: Int32s) -> None:
        task = _Task(-1, 0.0)
        if self._take_blocks(instance, task, tokens, len(tokens)):
            self._keep_or_free(instance, task, tokens)

    # Blocks.

    def _take_blocks(
        self, instance: _Instance, task: _Task, known: Int32s, num_tokens: int
    ) -> bool:
        """Pin what is there of ``known`` and allocate the rest, or change nothing."""
        store = instance.store
        held = store.match(_NAMESPACE, known) if instance.keeps else _NONE
        store.hold(held)
        num_pages = -(-num_tokens // self.config.page_tokens)
        own = store.alloc(TierId.DEVICE, num_pages - len(held))
        if own is None:
            store.release(held)
            return False
        task.held, task.own = held, own
        return True

    def _keep_or_free(self, instance: _Instance, task: _Task, tokens: Int32s) -> None:
        """Make a task's whole pages historical where KV is kept; free the others."""
        left, first = task.own, len(task.held)
        num_new = len(tokens) // self.config.page_tokens - first
        if instance.keeps and num_new > 0:
            whole = tokens[: (first + num_new) * self.config.page_tokens]
            done = instance.store.insert(_NAMESPACE, whole, left[:num_new], first)
            assert not done.refusal, done.refusal
            self.stored_pages += done.num_inserted
            left = np.concatenate([done.duplicates, left[num_new:]])
        task.own = left
        self._give_blocks(instance, task)

    def _give_blocks(self, instance: _Instance, task: _Task) -> None:
        instance.store.release(task.held)
        if len(task.own):
            error = instance.store.free(task.own)
            assert not error, error
        task.held = task.own = _NONE

    def _at(
        self, time_s: float, priority: Priority, call: Callable[..., None], *args: Any
    ) -> None:
        self.queue.at(time_s, priority, partial(call, *args))


def simulate_cluster(
    config: ClusterConfig, requests: Sequence[ClusterRequest], policy: RoutingPolicy
) -> ClusterResult:
    """Run requests to the end of the last one.

    Args:
        config: of the instances.
        requests: each behind the one that it waits for.
        policy: of the router, for prefill, decode and colocated instances alike.
    """
    return _Cluster(config, requests, policy).run()
