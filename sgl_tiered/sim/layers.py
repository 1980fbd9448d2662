"""Layer-wise memory of the simulated device: LayerKV's, or with pausing.

The engine's pool is logical: one page of it has a row per layer in host memory, and any
of its layers may be on the device, in a layer-page. What is decided is decided by
``policies/layers``; here is only what it costs: layer-pages, and one link each way.

- A prompt is offloaded under its computation, layer by layer, through two layers'
  pages; what stays is copied to the host after it, so that it can leave later at once.
- A page that is written is on the device in all layers; once full it is copied too.
- Decode steps stream what is on the host alone: a step takes the longer of computing
  and streaming. What the link has left pulls layers back.

Law: ``free + held by requests + of passes + leaving == capacity``, in layer-pages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sgl_tiered.pipelines.shares import GUARANTEED, Share
from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.policies.layers.allotment import allotted_layers
from sgl_tiered.policies.layers.forecast import RunningPages, taken_ahead
from sgl_tiered.policies.layers.pressure import LayersHeld, Pressure
from sgl_tiered.policies.layers.registry import make_turns
from sgl_tiered.policies.layers.retention import (
    layer_offload_s,
    least_retained,
    prefill_layer_pages,
    retained_in_room,
)
from sgl_tiered.policies.layers.turns import TurnFacts, TurnPlan, TurnRoom
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.sim.config import ServerConfig
from sgl_tiered.sim.events import EventQueue, Priority
from sgl_tiered.sim.records import LayerCounts
from sgl_tiered.sim.sequence import Sequence

__all__ = ["LayerMemory", "StepShape"]

_NEVER_PAUSED = 1 << 30
_ROUNDING_BYTES = 1e-3


@dataclass(frozen=True, slots=True)
class StepShape:
    """Decode steps of one batch: the first's seconds, and how much longer each is."""

    first_s: float
    growth_s: float
    stream_bytes: int


@dataclass(slots=True, eq=False)
class _Layers:
    """One request's pages.

    Attributes:
        num_layers: on the device, or on their way to it, of its whole pages.
        num_pages: whole pages of it.
        num_open: pages that are written: 0 or 1.
        coming: of ``num_layers``, those on their way.
        on_host_s: when all whole pages are on the host.
        turn_tokens, last_token_s: see ``TurnFacts``.
        paused_s: in all, but for the pause that it is in.
    """

    num_layers: int
    num_pages: int = 0
    num_open: int = 0
    coming: int = 0
    on_host_s: float = 0.0
    turn_tokens: int = _NEVER_PAUSED
    last_token_s: float = -1.0
    is_paused: bool = False
    paused_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Return:
    """Layers of a request on their way back, one after the other."""

    layers: _Layers
    num_layers: int
    layer_bytes: float
    bytes_left: float


class LayerMemory:
    """The device's layer-pages and its link; use one per run.

    Args:
        config: of the server; its ``layers`` are set.
        queue: simulated time.
        book: predictions; None where nothing is predicted.
        on_room: called when layer-pages came free by themselves.
    """

    def __init__(
        self,
        config: ServerConfig,
        queue: EventQueue,
        book: LengthBook | None,
        on_room: Callable[[], None],
    ) -> None:
        setup = config.layers
        assert setup is not None
        self.counts = LayerCounts()
        self._config = config
        self._setup = setup
        self._queue = queue
        self._book = book
        self._on_room = on_room
        self._page = config.page_tokens
        self._num_layers = config.num_layers
        self._layer_page_bytes = config.page_bytes / config.num_layers
        staging = 2 * -(-setup.max_context_tokens // self._page)
        pages = config.device_tokens // self._page
        self.capacity = pages * config.num_layers - staging
        self.free = self.capacity
        self._pressure = Pressure(
            config.num_layers, self.capacity, setup.low_share, setup.return_share
        )
        self._turns = make_turns(setup.decode)
        self._tpot_slo_s = config.scheduler.tpot_slo_s or NO_TARGET
        self._of: dict[int, _Layers] = {}
        self._in_pass: set[int] = set()
        self._buffers = 0
        # Whose copies to the host have not landed.
        self._leaving = 0
        self._down_free_s = 0.0
        self._returns: deque[_Return] = deque()
        self._has_paused = False
        # Since then, so much was streamed.
        self._link_from_s = 0.0
        self._link_bytes = 0.0

    # -- Admission and prefill --------------------------------------------------

    def can_ever_run(self, seq: Sequence) -> bool:
        """Return whether a step of it alone could be staged."""
        request = seq.request
        tokens = request.num_prompt_tokens + request.num_output_tokens
        return tokens <= self._setup.max_context_tokens

    def admit(
        self, seq: Sequence, context: int, new: int, running: Seq[Sequence]
    ) -> bool:
        """Give a part of a prompt the layer-pages of its pass; False without room.

        Others' layers leave for it. It keeps x layers, and as many more as there is
        room for.
        """
        times, setup = self._config.times, self._setup
        layers = self._of.get(seq.index)
        num_pages = -(-new // self._page)
        if layers is None:
            layer_bytes = self._config.kv_token_bytes / self._num_layers
            offload_s = layer_offload_s(new, layer_bytes, setup.down.bytes_per_s)
            prefill_s = times.prefill_s([(context, new)])
            least = least_retained(self._num_layers, offload_s, prefill_s)
        else:
            least = layers.num_layers
        # The last page stays open in all layers, and a decoder will need its next one.
        margin = 2 * self._num_layers
        needed = prefill_layer_pages(self._num_layers, least, num_pages) + margin
        if needed > self.free + self._leaving:
            self._relieve(needed - self.free - self._leaving, running)
        if needed > self.free:
            return False
        kept = least
        if layers is None:
            # Those that wait came first: what is free is theirs.
            room = 0
            if not any(self._of[one.index].is_paused for one in running):
                keep = self._pressure.to_keep(self.free, self._ahead(running))
                room = min(keep, self.free - margin)
            prompt_pages = -(-(seq.input_tokens + 1) // self._page)
            kept = retained_in_room(self._num_layers, least, prompt_pages, room)
            layers = self._of[seq.index] = _Layers(kept)
        buffers = prefill_layer_pages(self._num_layers, kept, num_pages)
        buffers -= kept * num_pages
        held = self._held(layers)
        layers.num_pages += num_pages
        layers.num_open = 1
        self.free -= self._held(layers) - held + buffers
        self._buffers += buffers
        self._in_pass.add(seq.index)
        return True

    def start_pass(
        self, parts: Seq[tuple[Sequence, int, int]], compute_s: float
    ) -> float:
        """Return the seconds of a pass: its computation, or what the link takes."""
        now_s = self._queue.now()
        token_bytes = self._config.kv_token_bytes
        num_layers = self._num_layers
        layer_s = compute_s / num_layers
        down_bytes = kept_bytes = up_bytes = 0.0
        for seq, context, new in parts:
            kept = self._of[seq.index].num_layers / num_layers
            down_bytes += (1.0 - kept) * new * token_bytes
            kept_bytes += kept * new * token_bytes
            up_bytes += (1.0 - kept) * context * token_bytes
        seconds = compute_s
        rate = self._setup.down.bytes_per_s
        if down_bytes:
            first_s = max(now_s + layer_s, self._down_free_s)
            # Spread over the layers: the last one's copy begins when it is computed.
            last_s = down_bytes / rate / num_layers
            end_s = max(first_s + down_bytes / rate, now_s + compute_s + last_s)
            seconds = max(seconds, end_s - 2.0 * last_s - now_s)
            self._down_free_s = end_s
        buffers, self._buffers = self._buffers, 0
        self._leave_at(self._down_free_s if down_bytes else now_s, buffers)
        seconds = max(seconds, up_bytes / self._setup.up.bytes_per_s)
        self.counts.stall_s += seconds - compute_s
        self.counts.streamed_bytes += int(up_bytes)
        self.counts.offloaded_bytes += int(down_bytes + kept_bytes)
        self._down_free_s = max(self._down_free_s, now_s) + kept_bytes / rate
        for seq, _, _ in parts:
            self._of[seq.index].on_host_s = self._down_free_s
        self._link_bytes += up_bytes
        return seconds

    def end_pass(self, seq: Sequence) -> None:
        """Note that a part of its prompt is computed."""
        layers = self._of[seq.index]
        self._in_pass.discard(seq.index)
        self._settle(layers, seq.kv_tokens)
        layers.last_token_s = self._queue.now()

    # -- Decode ------------------------------------------------------------------

    def choose(self, running: list[Sequence]) -> list[Sequence]:
        """Return who decodes next, in the order of ``running``; layers go and come."""
        by_age = sorted(running, key=lambda seq: (seq.arrival_s, seq.index))
        now_s = self._queue.now()
        self._end_returns(now_s)
        room = self._room()
        contexts = sum(seq.kv_tokens for seq in running)
        batch_s = self._turns.pace_s(1, contexts // max(len(running), 1), room)
        facts = [self._facts(seq, now_s, batch_s) for seq in by_age]
        plan = self._turns.choose(facts, room)
        self._has_paused = bool(plan.paused)
        chosen = self._with_pages(by_age, plan)
        self._place(by_age, plan)
        self._relieve_ahead(by_age, plan, chosen)
        for seq in by_age:
            layers = self._of[seq.index]
            is_paused = seq.index not in chosen
            self.counts.num_pauses += is_paused and not layers.is_paused
            if is_paused:
                layers.turn_tokens = 0
            elif layers.is_paused:
                layers.paused_s += now_s - layers.last_token_s
            layers.is_paused = is_paused
        return [seq for seq in running if seq.index in chosen]

    def steps(self, decoding: Seq[Sequence], most: int) -> int:
        """Return how many steps these may run before something is decided anew."""
        most = min(most, self._page)
        if self._has_paused and self._is_link_bound(decoding):
            # It is streamed because it is due, or nobody is on the device.
            return 1
        while (
            most > 1 and self._new_pages(decoding, most) * self._num_layers > self.free
        ):
            most //= 2
        if self._returns:
            shape = self.shape(decoding)
            spare = shape.first_s * self._setup.up.bytes_per_s - shape.stream_bytes
            if spare > 0.0:
                num_steps = int(self._returns[0].bytes_left / spare) + 1
                most = min(most, num_steps)
        return most

    def shape(self, decoding: Seq[Sequence]) -> StepShape:
        """Return how long steps of these take."""
        times, batch = self._config.times, len(decoding)
        contexts = sum(seq.kv_tokens for seq in decoding) + batch
        compute_s = times.decode_step_s(batch, contexts)
        growth_s = times.decode_context_token_s * batch
        num_bytes = sum(self._host_bytes(self._of[seq.index]) for seq in decoding)
        link_s = num_bytes / self._setup.up.bytes_per_s
        if self._returns:
            # What returns has its share, though a step waits for what is streamed.
            link_s /= 1.0 - GUARANTEED[Share.PROMOTE]
        if num_bytes:
            # The first layer's staging is ahead of all computation of the step but the
            # last of the step before: one of L layers is not hidden.
            link_s += compute_s / self._num_layers
        return StepShape(max(compute_s, link_s), growth_s, num_bytes)

    def _is_link_bound(self, decoding: Seq[Sequence]) -> bool:
        """Return whether streaming is what a step waits for."""
        num_bytes = sum(self._host_bytes(self._of[seq.index]) for seq in decoding)
        contexts = sum(seq.kv_tokens for seq in decoding)
        compute_s = self._config.times.decode_step_s(len(decoding), contexts)
        return num_bytes > compute_s * self._setup.up.bytes_per_s

    def end_steps(
        self, decoding: Seq[Sequence], num_steps: int, shape: StepShape
    ) -> None:
        """Note tokens; ``kv_tokens`` of each are counted already."""
        now_s = self._queue.now()
        self.counts.streamed_bytes += shape.stream_bytes * num_steps
        self._link_bytes += shape.stream_bytes * num_steps
        for seq in decoding:
            layers = self._of[seq.index]
            before = layers.num_pages
            self._settle(layers, seq.kv_tokens)
            num_bytes = (layers.num_pages - before) * self._config.page_bytes
            self.counts.offloaded_bytes += num_bytes
            rate = self._setup.down.bytes_per_s
            self._down_free_s = max(self._down_free_s, now_s) + num_bytes / rate
            layers.on_host_s = max(layers.on_host_s, self._down_free_s)
            layers.turn_tokens += num_steps
            layers.last_token_s = now_s

    def release(self, seq: Sequence) -> None:
        """Take everything back from one that ended or lost its pages."""
        layers = self._of.pop(seq.index, None)
        if layers is None:
            return
        self._returns = deque(one for one in self._returns if one.layers is not layers)
        self.free += self._held(layers)

    def paused_s(self, seq: Sequence) -> float | None:
        """Return how long it has been paused so far; None for one that is now."""
        layers = self._of[seq.index]
        return None if layers.is_paused else layers.paused_s

    def pace_s(self, num_running: int, context_tokens: int) -> float:
        """Return the seconds of a token with so many running, for Eq. 1."""
        return self._turns.pace_s(max(num_running, 1), context_tokens, self._room())

    def check(self) -> None:
        """Assert the law of an idle device."""
        assert (self.free, self._of) == (self.capacity, {}), (self.free, self.capacity)

    # -- Layer-pages ---------------------------------------------------------------

    def _held(self, layers: _Layers) -> int:
        return layers.num_layers * layers.num_pages + self._num_layers * layers.num_open

    def _host_bytes(self, layers: _Layers) -> int:
        away = self._num_layers - layers.num_layers + layers.coming
        return int(away * layers.num_pages * self._layer_page_bytes)

    def _settle(self, layers: _Layers, kv_tokens: int) -> None:
        """Count its pages anew: whole ones, and the one that is open."""
        held = self._held(layers)
        layers.num_pages = kv_tokens // self._page
        layers.num_open = int(kv_tokens % self._page > 0)
        self.free += held - self._held(layers)
        assert self.free >= 0, self.free

    def _keep(self, layers: _Layers, num_layers: int) -> None:
        """Let layers of it leave until so many are left."""
        num_gone = layers.num_layers - num_layers
        layers.num_layers = num_layers
        self._leave_at(layers.on_host_s, num_gone * layers.num_pages)
        if not layers.coming:
            return
        # What is on its way turns back first.
        for one in reversed(self._returns):
            if one.layers is layers:
                num_turned = min(num_gone, one.num_layers)
                num_gone -= num_turned
                one.num_layers -= num_turned
                layers.coming -= num_turned
                one.bytes_left = min(one.bytes_left, one.num_layers * one.layer_bytes)
        self._returns = deque(one for one in self._returns if one.num_layers)

    def _leave_at(self, time_s: float, num: int) -> None:
        """Free layer-pages once their copies have landed."""
        if time_s <= self._queue.now():
            self.free += num
            return

        def left() -> None:
            self._leaving -= num
            self.free += num
            self._on_room()

        if num:
            self._leaving += num
            self._queue.at(time_s, Priority.TRANSFER, left)

    def _relieve(self, needed: int, running: Seq[Sequence]) -> None:
        """Let layers of the most recent requests leave."""
        by_age = sorted(running, key=lambda seq: (seq.arrival_s, seq.index))
        self._offload([self._of[seq.index] for seq in by_age], needed)

    def _offload(self, claims: Seq[_Layers], needed: int) -> None:
        held = [LayersHeld(one.num_layers, one.num_pages) for one in claims]
        for change in self._pressure.offloads(held, needed):
            self._keep(claims[change.position], change.num_layers)

    def _new_pages(self, decoding: Seq[Sequence], num_steps: int) -> int:
        page = self._page
        return sum(
            -(-(seq.kv_tokens + num_steps) // page) + (-seq.kv_tokens // page)
            for seq in decoding
        )

    def _with_pages(self, by_age: Seq[Sequence], plan: TurnPlan) -> set[int]:
        """Return those of the plan that have room for a token; others' layers leave."""
        chosen = {by_age[n].index for n in plan.decode}
        claims = [by_age[n] for n in plan.order]
        while True:
            decoding = [seq for seq in by_age if seq.index in chosen]
            missing = self._new_pages(decoding, 1) * self._num_layers - self.free
            if missing <= 0:
                return chosen
            free = self.free
            missing -= self._leaving
            self._offload([self._of[seq.index] for seq in claims], missing)
            if self.free > free:
                continue
            # Copies are under way: the least claim to a page waits for them.
            begin = (seq for seq in reversed(claims) if not seq.kv_tokens % self._page)
            chosen.remove(next(seq.index for seq in begin if seq.index in chosen))

    def _place(self, by_age: Seq[Sequence], plan: TurnPlan) -> None:
        """Give the device to those with the best claims; others' layers leave."""
        decoding = [by_age[n] for n in plan.decode]
        step = self._new_pages(decoding, 1) * self._num_layers
        # Each has a page that is written, or will begin one, in all layers; and Eq. 5.
        others = len(by_age) * self._num_layers
        others += self._pressure.reserve(self._ahead(decoding), step)
        claims = [self._of[by_age[n].index] for n in plan.claims]
        allotted = allotted_layers(
            self._num_layers, [one.num_pages for one in claims], self.capacity - others
        )
        for layers, num in zip(claims, allotted, strict=True):
            if num < layers.num_layers:
                self._keep(layers, num)
        spare = self.free - step
        for layers, num in zip(claims, allotted, strict=True):
            wanted = num - layers.num_layers
            if layers.num_pages:
                # Not before the copies of those that leave for it have landed.
                wanted = min(wanted, max(spare, 0) // layers.num_pages)
            if wanted > 0:
                spare -= wanted * layers.num_pages
                self._return(layers, layers.num_layers + wanted)
            if layers.num_layers < num:
                break

    def _relieve_ahead(
        self, by_age: Seq[Sequence], plan: TurnPlan, chosen: set[int]
    ) -> None:
        """Send layers to the host before the room that they take is needed."""
        decoding = [seq for seq in by_age if seq.index in chosen]
        avail = self.free + self._leaving - self._ahead(decoding)
        claims = [self._of[by_age[n].index] for n in plan.order]
        self._offload(claims, self._pressure.shortage(avail))

    def _ahead(self, running: Seq[Sequence]) -> int:
        """Return what those that decode take in the coming stages (Eq. 5)."""
        pages = []
        for seq in running:
            layers = self._of[seq.index]
            held = RunningPages(
                self._held(layers), self._tokens_left(seq), self._num_layers
            )
            pages.append(held)
        return taken_ahead(pages, self._page)

    def _tokens_left(self, seq: Sequence) -> int:
        if self._book is not None:
            said = self._book.prediction(seq.index, seq.outputs)
            if said is not None:
                return max(said.median - seq.outputs, 1)
        # Without a predictor nobody is known to end.
        return 1 << 30

    # -- The link to the device -------------------------------------------------------

    def _return(self, layers: _Layers, num_layers: int) -> None:
        num = num_layers - layers.num_layers
        layers.num_layers = num_layers
        if not layers.num_pages:
            return
        self.free -= num * layers.num_pages
        layers.coming += num
        layer_bytes = layers.num_pages * self._layer_page_bytes
        self.counts.returned_bytes += int(num * layer_bytes)
        self._returns.append(_Return(layers, num, layer_bytes, num * layer_bytes))

    def _end_returns(self, now_s: float) -> None:
        """Give what streaming left of the link to those that return, in order."""
        passed_s = now_s - self._link_from_s
        spare = passed_s * self._setup.up.bytes_per_s - self._link_bytes
        self._link_from_s, self._link_bytes = now_s, 0.0
        while self._returns and spare > 0.0:
            one = self._returns[0]
            moved = min(spare, one.bytes_left)
            one.bytes_left -= moved
            spare -= moved
            num_left = math.ceil((one.bytes_left - _ROUNDING_BYTES) / one.layer_bytes)
            one.layers.coming -= one.num_layers - num_left
            one.num_layers = num_left
            if num_left:
                break
            self._returns.popleft()

    # -- What the policies are told ---------------------------------------------------

    def _room(self) -> TurnRoom:
        # What may return: not what the answers under way grow by.
        spare = self.free - self._pressure.high - len(self._of) * self._num_layers
        return TurnRoom(
            self._config.times.decode_step_s,
            self._setup.up.bytes_per_s,
            int(max(spare, 0) * self._layer_page_bytes),
            self.capacity // self._num_layers * self._page,
            self._config.kv_token_bytes,
            coming_bytes=int(sum(one.bytes_left for one in self._returns)),
        )

    def _facts(self, seq: Sequence, now_s: float, batch_s: float) -> TurnFacts:
        layers = self._of[seq.index]
        on_device = layers.num_layers * layers.num_pages * self._layer_page_bytes
        facts = TurnFacts(
            seq.kv_tokens,
            self._host_bytes(layers),
            int(on_device),
            max(now_s - layers.last_token_s, 0.0),
            layers.turn_tokens,
        )
        if self._book is None or not self._turns.needs_targets:
            return facts
        prediction = self._book.prediction(seq.index, seq.outputs)
        assert prediction is not None, "every request that is queued enters the book"
        running = RunningFacts.at(
            now_s,
            str(seq.index),
            seq.outputs,
            seq.first_token_s,
            self._tpot_slo_s,
            prediction,
        )
        return facts.with_target(running, batch_s)
