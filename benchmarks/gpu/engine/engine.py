"""A small engine with SGLang's overlap schedule, around the product's loads and stores.

The scheduler's thread builds a batch on the schedule stream, launches its forward on
the forward stream, and only then takes the results of the batch before. So a request
that has ended still runs once more, its slots are given to others while that forward
runs, and a prompt's next chunk is built while the one before is computed. The cache
below the device, its region, loader, offloader and layer counter are the product's,
called as the SGLang adapter calls them (``engines/sglang/cache.py``).

``dropped`` names what is left out on purpose: a negative control has to give a wrong
answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine.machine import Machine
from engine.model import Model, Shape
from engine.tree import PagePool, PrefixTree

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.plans import LoadPlan, OffloadPlan
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.engines.device.pools import page_layout
from sgl_tiered.engines.device.tokens import device_pages, page_numbers
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue, OffloadFinished
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.stream_pool import LoadWay
from sgl_tiered.policies.eviction.base import EvictionFacts
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.serving.layer_counter import LayerCounter
from sgl_tiered.tiers.host import HostTier

__all__ = ["CONTROLS", "Engine", "Request", "Sizes"]

CONTROLS = ("load_mark", "layer_wait", "consumer", "offload_mark", "offload_lock")
"""What can be left out: a load waits for the work that its slots are still in; the
model waits for a layer's load, and is told whose loads it waits for; a store waits for
the work that writes its pages, which stay until it has ended. That a load's sources are
pinned cannot be shown with one tier below the device: whatever overwrites them is a
store, which waits for the forward that waits for the load."""
_PATIENCE_S = 60.0
_END_TOKENS = 24
"""Every so many tokens one ends an answer before its most tokens are reached."""


@dataclass(frozen=True)
class Sizes:
    """Of the pools, and of what runs at a time.

    Attributes:
        num_pages: of the device.
        host_pages: of the host tier.
        max_running: requests at a time.
        max_tokens: of a request, prompt and answer.
        chunk_tokens: of prompts that one batch computes.
    """

    num_pages: int
    host_pages: int
    max_running: int
    max_tokens: int
    chunk_tokens: int


@dataclass(eq=False)
class Request:
    """A prompt, and what has become of it.

    Attributes:
        prompt: int32 tokens.
        most_new: tokens of its answer at most.
        answer, digests: of each step, as they came.
        device_pages, loaded_pages: of its prompt that were found.
        first_token_s: from its admission to its first token.
    """

    rid: str
    prompt: np.ndarray
    most_new: int
    row: int = -1
    nodes: list[int] = field(default_factory=list)
    num_pages: int = 0
    num_computed: int = 0
    num_launched: int = 0
    num_offloaded: int = 0
    answer: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    device_pages: int = 0
    loaded_pages: int = 0
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    has_ended: bool = False

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([self.prompt, np.array(self.answer, np.int32)])


@dataclass(eq=False)
class _Item:
    """A request's part of a prefill."""

    request: Request
    begin: int
    end: int
    ids: torch.Tensor
    slots: Any = None
    x: Any = None

    @property
    def is_last(self) -> bool:
        return self.end == len(self.request.prompt)


@dataclass(eq=False)
class _Batch:
    """One launch."""

    items: list[_Item]
    decodes: list[Request]
    consumer: int = -1
    ticket: Any = None
    plans: list[LoadPlan] = field(default_factory=list)
    rows: Any = None
    counts: Any = None
    decode: Any = None
    out: Any = None
    result: Any = None
    done: Any = None
    begin: Any = None
    end: Any = None

    @property
    def owners(self) -> list[Request]:
        """The requests that get a token, in the order of the result."""
        return [item.request for item in self.items if item.is_last] + self.decodes


class Engine:
    """One rank.

    Args:
        machine: the device.
        shape: of the model.
        sizes: of the pools.
        way: how loads go.
        dropped: of ``CONTROLS``.
        lag_s: a forward is held up for so long before it begins.
        newest_first: what was used last is dropped first, on the device and on the
            host: what is under way then meets its eviction.
    """

    def __init__(
        self,
        machine: Machine,
        shape: Shape,
        sizes: Sizes,
        *,
        way: LoadWay,
        dropped: frozenset[str] = frozenset(),
        lag_s: float = 0.0,
        newest_first: bool = False,
    ) -> None:
        assert dropped <= set(CONTROLS), f"none of {CONTROLS}: {dropped}"
        self._machine, self.shape, self.sizes = machine, shape, sizes
        self._dropped, self._lag_s = dropped, lag_s
        device = machine.torch
        self.model = Model(shape, device)
        page = shape.page_tokens
        size = ((sizes.num_pages + 1) * page, shape.num_heads, shape.head_dim)
        self._kv = SimpleNamespace(
            k_buffer=[self._buffer(size) for _ in range(shape.num_layers)],
            v_buffer=[self._buffer(size) for _ in range(shape.num_layers)],
        )
        self._keys = [_numbers(one) for one in self._kv.k_buffer]
        self._values = [_numbers(one) for one in self._kv.v_buffer]
        layout = page_layout(self._kv, page)
        self.layout = layout
        machine.synchronize()
        clock, self._completions = SystemClock(), CompletionQueue()
        self.metrics = MetricsRegistry()
        self.pool = machine.pool(self._kv, layout, way=way)
        # As a start of the product does; nothing is on the device yet.
        self.pool.warm(np.array([1]))
        register = machine.register("host size")
        self.host = HostTier(layout.slot_bytes, sizes.host_pages, register=register)
        # The product's cache gets slots as they are pinned; this one has all at once.
        pinned = threading.Event()
        self.host.watch_ready(
            lambda num: pinned.set() if num == sizes.host_pages else None
        )
        assert pinned.wait(_PATIENCE_S), "the device does not pin the host tier"
        cost = CostModel(
            PrefillCost(1000, shape.num_layers, 16, 1e9),
            {TierId.HOST: LinkCost(1e-5, 5e10)},
        )
        tier = TierConfig(TierId.HOST, sizes.host_pages)
        self.cache = TieredCache(
            CacheConfig(layout, (tier,), "always", load_overlaps=True),
            cost=cost,
            eviction={TierId.HOST: _NewestFirst() if newest_first else LRUPolicy()},
            clock=clock,
        )
        work = (self._completions, clock, self.metrics)
        self._loader = LayerwiseLoader(self.pool, *work)
        self._offloader = OffloadWorker(self.pool, self.host, *work)
        self._counter = LayerCounter(shape.num_layers)
        self._digest = self.cache.open_namespace(Namespace("m", "bfloat16", page))
        self._pages = PagePool(sizes.num_pages, device)
        self.tree = PrefixTree(
            self._pages,
            page,
            self._upload,
            2 * sizes.num_pages,
            device,
            newest_first=newest_first,
        )
        rows = (sizes.max_running + 1, sizes.max_tokens + page)
        self._rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self._free_rows = list(range(1, sizes.max_running + 1))
        self._future = torch.zeros(rows[0], dtype=torch.int64, device=device)
        self._offsets = torch.arange(page, dtype=torch.int64, device=device)
        machine.synchronize()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._chunked: Request | None = None
        self._last: _Batch | None = None
        self._offloads: dict[int, tuple[OffloadPlan, list[int]]] = {}
        # Pages that admitted requests may still take.
        self._reserved: dict[Request, int] = {}
        self.ended: list[Request] = []
        self.forwards: list[tuple[Any, Any]] = []
        self.num_loads = self.num_offloads = self.num_pending = 0
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self.stall_s = 0.0

    def _buffer(self, size: tuple[int, int, int]) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16, device=self._machine.torch)

    # -- Outside ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        assert len(request.prompt) + request.most_new <= self.sizes.max_tokens
        self._waiting.append(request)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        busy = (self._waiting, self._running, self._chunked, self._last)
        return not any(busy)

    def step(self) -> None:
        """Go round once: build, launch, then take the results of the batch before."""
        self.num_steps += 1
        with self._machine.on(self._machine.schedule):
            with self._timed("pump"):
                self._pump()
            batch = self._next_batch()
            if batch is not None:
                self._launch(batch)
            last, self._last = self._last, batch
            if last is not None:
                self._take(last)

    def drain(self) -> None:
        """Wait for the stores that are under way."""
        assert self._offloader.drain(_PATIENCE_S), "a store did not end"
        with self._machine.on(self._machine.schedule):
            self._pump()

    def forget_device(self) -> None:
        """Drop all pages that no request has."""
        with self._machine.on(self._machine.schedule):
            self.tree.evict(self.sizes.num_pages)

    def close(self) -> None:
        """End what runs and unpin the region."""
        self._machine.synchronize()
        self._loader.close(_PATIENCE_S)
        self._offloader.close(_PATIENCE_S)
        self._machine.synchronize()
        self.host.close()

    # -- Building a batch --------------------------------------------------------

    def _next_batch(self) -> _Batch | None:
        if self._chunked is not None:
            # Its chunk before may still be computed: what is stored waits for that.
            self._checkpoint(self._chunked, self._chunked.num_computed)
        batch = _Batch([], [])
        room = self.sizes.chunk_tokens
        jobs: list[LoadJob] = []
        if self._chunked is not None:
            room -= self._add_chunk(batch, self._chunked, room)
        for _ in range(len(self._waiting)):
            if room <= 0 or self._chunked is not None or not self._free_rows:
                break
            request = self._waiting.popleft()
            found = self._admit(request)
            if found is None:
                self._waiting.append(request)
                continue
            if found is not False:
                plan, job = found
                batch.plans.append(plan)
                jobs.append(job)
            room -= self._add_chunk(batch, request, room)
        if not batch.items:
            batch.decodes = [one for one in self._running if not one.has_ended]
            if not batch.decodes:
                return None
            self._extend(batch.decodes)
        if jobs:
            self._submit(batch, jobs)
        return batch

    def _admit(self, request: Request) -> Any:
        """Take a row, what the device has, and slots for what the host has.

        Returns:
            None where it has to wait; False where nothing is loaded; the load.
        """
        page = self.shape.page_tokens
        max_pages = (len(request.prompt) - 1) // page
        nodes = self.tree.match(request.prompt, max_pages)
        with self._timed("plan"):
            decision = self.cache.lookup(
                self._digest,
                request.prompt,
                len(nodes),
                max_pages=max_pages - len(nodes),
            )
            if decision.lookup is Lookup.PENDING:
                self.num_pending += 1
                return None
        total = -(-(len(request.prompt) + request.most_new + 1) // page)
        self.tree.lock(nodes)
        if not self._has_room(total - len(nodes)):
            self.tree.unlock(nodes)
            return None
        request.row, request.admitted_s = self._free_rows.pop(), time.perf_counter()
        request.nodes, request.device_pages = nodes, len(nodes)
        self._reserved[request] = total - len(nodes)
        if nodes:
            self._write_row(request, 0, self.tree.pages_of(nodes))
        request.num_pages = len(nodes)
        request.num_computed = len(nodes) * page
        with self._timed("plan"):
            plan = self.cache.commit_load(decision)
        if plan is None:
            return False
        pages = self._take_pages(request, plan.num_pages)
        self._write_row(request, len(nodes), pages)
        request.loaded_pages = plan.num_pages
        request.num_computed += plan.num_pages * page
        with self._timed("plan"):
            positions = np.arange(plan.num_pages)
            segment = Segment.of_tier(self.host, plan.addresses, positions)
            numbers = page_numbers(self.pool, pages * page, page)
            self.num_loads += 1
            return plan, LoadJob(plan, (segment,), numbers)

    def _has_room(self, count: int) -> bool:
        """Whether so many pages could be had beside what is promised to others."""
        promised = sum(self._reserved.values())
        return count + promised <= self._pages.num_free + self.tree.num_unlocked

    def _take_pages(self, request: Request, count: int) -> torch.Tensor:
        short = count - self._pages.num_free
        if short > 0:
            self.tree.evict(short)
        self._reserved[request] = max(self._reserved[request] - count, 0)
        return self._pages.take(count)

    def _write_row(self, request: Request, first: int, pages: torch.Tensor) -> None:
        page = self.shape.page_tokens
        slots = (pages[:, None] * page + self._offsets).reshape(-1)
        self._rows[request.row, first * page : first * page + len(slots)] = slots
        request.num_pages = first + len(pages)

    def _add_chunk(self, batch: _Batch, request: Request, room: int) -> int:
        """Put as much of a prompt into the batch as there is room for."""
        page = self.shape.page_tokens
        begin = request.num_computed
        end = min(len(request.prompt), begin + room)
        if end < len(request.prompt):
            # A chunk ends with a page, so that the tree can take it.
            end = max(end // page * page, min(begin + page, len(request.prompt)))
        needed = -(-end // page) - request.num_pages
        if needed > 0:
            pages = self._take_pages(request, needed)
            self._write_row(request, request.num_pages, pages)
        ids = self._upload(request.prompt[begin:end].tolist())
        batch.items.append(_Item(request, begin, end, ids))
        request.num_computed = end
        is_last = end == len(request.prompt)
        self._chunked = None if is_last else request
        if is_last:
            request.num_launched = 1
            self._running.append(request)
        return end - begin

    def _extend(self, requests: Sequence[Request]) -> None:
        """Take a page for each request whose next token begins one."""
        page = self.shape.page_tokens
        for one in requests:
            at = len(one.prompt) + one.num_launched - 1
            one.num_launched += 1
            if at // page >= one.num_pages:
                self._write_row(one, one.num_pages, self._take_pages(one, 1))

    def _submit(self, batch: _Batch, jobs: list[LoadJob]) -> None:
        with self._timed("submit"):
            if "load_mark" in self._dropped:
                with _without_mark(self.pool):
                    batch.ticket = self._loader.submit(jobs)
            else:
                batch.ticket = self._loader.submit(jobs)
            batch.consumer = self._counter.add(batch.ticket)

    # -- The forward ---------------------------------------------------------------

    def _launch(self, batch: _Batch) -> None:
        machine = self._machine
        batch.rows = self._upload([request.row for request in batch.owners])
        lengths = [len(one.prompt) + one.num_launched - 1 for one in batch.decodes]
        batch.counts = self._upload(lengths)
        built = machine.record()
        with machine.on(machine.forward):
            machine.forward.wait_event(built)
            batch.begin = machine.record()
            if "consumer" not in self._dropped:
                self._counter.set_consumer(batch.consumer)
            # What the scheduler writes next it writes behind this event.
            self._read_shared(batch, max(lengths, default=0))
            read = machine.record()
            machine.delay(self._lag_s)
            self._forward(batch)
            batch.end = machine.record()
            self._send_result(batch)
            if batch.ticket is not None:
                with self._timed("wait_queued"):
                    assert batch.ticket.wait_queued(), batch.ticket.failed
                if "layer_wait" not in self._dropped:
                    batch.ticket.wait_last_layer()
        machine.schedule.wait_event(read)
        self.forwards.append((batch.begin, batch.end))

    def _read_shared(self, batch: _Batch, longest: int) -> None:
        """Copy the slots, which the scheduler may write anew during the forward."""
        for item in batch.items:
            item.slots = self._rows[item.request.row, : item.end].clone()
        if not batch.decodes:
            return
        positions = batch.counts - 1
        places = torch.arange(longest, device=self._machine.torch)
        slots = self._rows[batch.rows][:, :longest]
        here = slots.gather(1, positions[:, None])[:, 0]
        is_before = places[None, :] < positions[:, None]
        # Page 0 is padding, and is left out of the sums.
        slots = torch.where(is_before, slots, 0)
        batch.decode = (positions, slots, here, is_before)

    def _forward(self, batch: _Batch) -> None:
        machine, model, decode = self._machine, self.model, batch.decode
        num_tokens = sum(item.end - item.begin for item in batch.items)
        num_tokens += len(batch.decodes)
        state: dict[str, torch.Tensor] = {}

        def embed() -> None:
            for item in batch.items:
                item.x = model.embed(item.ids)
            if decode is not None:
                # As SGLang's future map: the host does not know these tokens yet.
                state["x"] = model.embed(self._future[batch.rows])

        def layer_work(layer: int) -> None:
            for item in batch.items:
                self._prefill_layer(layer, item)
            if decode is not None:
                state["x"] = self._decode_layer(layer, state["x"], decode)
            model.busy(num_tokens)

        def pick() -> None:
            last = [item.x[-1:] for item in batch.items if item.is_last]
            last += [state["x"]] if decode is not None else []
            if last:
                states = torch.cat(last)
                tokens = model.pick(states)
                self._future[batch.rows] = tokens
                batch.out = torch.cat([tokens, model.digest(states)])

        machine.run(embed)
        for layer in range(self.shape.num_layers):
            if "layer_wait" not in self._dropped:
                self._counter.wait_until(layer)
            machine.run(partial(layer_work, layer), cost_ms=1.0)
        machine.run(pick)

    def _prefill_layer(self, layer: int, item: _Item) -> None:
        keys, values = self.model.kv(layer, item.x)
        before, here = item.slots[: item.begin], item.slots[item.begin :]
        self._keys[layer][here] = keys
        self._values[layer][here] = values
        seen = self.model.before(
            self._keys[layer][before], self._values[layer][before], None
        )
        item.x = self.model.mix(item.x, seen, keys, values, item.begin)

    def _decode_layer(self, layer: int, x: torch.Tensor, decode: Any) -> torch.Tensor:
        positions, slots, here, is_before = decode
        keys, values = self.model.kv(layer, x)
        self._keys[layer][here] = keys
        self._values[layer][here] = values
        seen = self.model.before(
            self._keys[layer][slots], self._values[layer][slots], is_before
        )
        return self.model.mix_single(x, seen, keys, values, positions)

    def _send_result(self, batch: _Batch) -> None:
        """Queue the copy of tokens and digests to the host."""
        count = 2 * len(batch.owners)
        batch.result = self._machine.host_numbers(count)

        def copy() -> None:
            if count:
                batch.result.copy_(batch.out, non_blocking=True)

        self._machine.run(copy)
        batch.done = self._machine.record()

    # -- Results -------------------------------------------------------------------

    def _take(self, batch: _Batch) -> None:
        if batch.ticket is not None:
            with self._timed("wait_landed"):
                assert batch.ticket.wait(), batch.ticket.failed
            self.stall_s += batch.ticket.stall_s
            for plan in batch.plans:
                self.cache.finish_load(plan, landed=True)
        with self._timed("wait_result"):
            batch.done.synchronize()
        numbers = batch.result.tolist()
        count = len(batch.owners)
        prefilled = {item.request for item in batch.items}
        for number, request in enumerate(batch.owners):
            if request.has_ended:
                # It ran once more before its end was known.
                continue
            request.answer.append(numbers[number])
            request.digests.append(numbers[count + number])
            if len(request.answer) == 1:
                request.first_token_s = time.perf_counter() - request.admitted_s
            token = request.answer[-1]
            if len(request.answer) == request.most_new or not token % _END_TOKENS:
                self._finish(request)
            elif request in prefilled:
                self._checkpoint(request, len(request.prompt))

    def _finish(self, request: Request) -> None:
        """Give all whole pages to the tree, and what is behind them back."""
        request.has_ended = True
        self._running.remove(request)
        # The last token's KV is not there, or is just being written.
        self._checkpoint(request, len(request.prompt) + len(request.answer) - 1)
        self.tree.unlock(request.nodes)
        first, page = len(request.nodes), self.shape.page_tokens
        if first < request.num_pages:
            row = self._rows[request.row]
            slots = row[first * page : request.num_pages * page : page]
            self._pages.give(slots // page)
        del self._reserved[request]
        self._free_rows.append(request.row)
        self.ended.append(request)

    def _checkpoint(self, request: Request, num_tokens: int) -> None:
        """Publish a request's whole pages on the device, and store them below."""
        page = self.shape.page_tokens
        num_pages = num_tokens // page
        held = len(request.nodes)
        tokens = request.tokens[: num_pages * page]
        if num_pages > held:
            row = self._rows[request.row]
            pages = row[held * page : num_pages * page : page] // page
            nodes, known = self.tree.insert(tokens, request.nodes, pages)
            self.tree.lock(nodes)
            request.nodes = request.nodes + nodes
            if known:
                # The tree had them: its pages are read from now on.
                kept = request.num_pages
                self._write_row(request, held, self.tree.pages_of(nodes))
                request.num_pages = kept
        if num_pages <= request.num_offloaded:
            return
        with self._timed("plan"):
            plan = self.cache.plan_offload(
                self._digest, tokens, seen_pages=request.num_offloaded
            )
        request.num_offloaded = num_pages
        if plan is not None:
            self._offload(request, plan)

    def _offload(self, request: Request, plan: OffloadPlan) -> None:
        with self._timed("offload"):
            tree = SimpleNamespace(
                page_size=self.shape.page_tokens,
                tiered=SimpleNamespace(parts=SimpleNamespace(device=self.pool)),
                req_to_token_pool=SimpleNamespace(req_to_token=self._rows),
            )
            req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=request.row))
            pages = device_pages(tree, req, plan.positions)
            mark = [] if "offload_mark" in self._dropped else self.pool.mark()
            nodes = request.nodes[: int(plan.positions.max()) + 1]
            if "offload_lock" in self._dropped:
                nodes = []
            self.tree.lock(nodes)
            self._offloads[plan.plan_id] = (plan, nodes)
            self.num_offloads += 1
            self._offloader.submit(plan, pages, mark)

    def _pump(self) -> None:
        for event in self._completions.drain():
            if isinstance(event, OffloadFinished):
                _, nodes = self._offloads.pop(event.plan.plan_id)
                self.tree.unlock(nodes)
                assert not event.result.error, event.result.error
                self.cache.finish_offload(event.plan, event.result)

    def _upload(self, numbers: Sequence[int]) -> torch.Tensor:
        """Bring whole numbers to the device, on the thread's stream; never waits."""
        is_cuda = self._machine.torch.type == "cuda"
        found = torch.tensor(numbers, dtype=torch.int64, pin_memory=is_cuda)
        return found.to(self._machine.torch, non_blocking=True)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - began_s
            self.seconds[name] = self.seconds.get(name, 0.0) + spent_s


class _NewestFirst:
    """Evicts what was used last: for tests, as it is of no use."""

    name = "newest"
    needs_queue = False
    needs_reuse = False

    def priority(self, facts: EvictionFacts) -> float:
        """Return a smaller number for what was used later."""
        return -float(facts.access_sequence)


def _numbers(buffer: torch.Tensor) -> torch.Tensor:
    """View [slots, heads, dim] of 16 bits as int32 [slots, width]."""
    return buffer.view(buffer.shape[0], -1).view(torch.int32)


@contextmanager
def _without_mark(pool: Any) -> Iterator[None]:
    """Let the pool's marks name no work."""
    pool.mark = list
    try:
        yield
    finally:
        del pool.mark
