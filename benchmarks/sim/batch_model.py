"""A batch whose weights and context are streamed: as KV, as activations, or both.

The setting of HybridServe (papers: hybridserve): one device, more weights and KV than
it holds, a batch of equal requests that starts and ends together. There is no queue and
no cache; only the order of transfers and computation is modelled, decode step by decode
step. What is kept as what is decided by ``policies/activations``, with regressions of
this device's own times, fitted as measured ones are.

A decode step does all mini-batches of a layer before the next layer. Three things are
waited for: the link, on which a mini-batch's pages (activations first) and its part of
the next layer's weights follow each other; the device, which rebuilds what has arrived
and then computes the layer; and the two halves of the buffers, of pages and of weights.
All layers are alike, so a few stand for all.

Every system has what the device leaves beside buffers and the streamed layers: KV only
keeps weights there first and then KV, as the paper configures FlexGen; HybridServe's
stream all weights and keep activations first and then KV. Only ``BALANCED`` chooses.

Not modelled: copies to the host under a decode step (the other direction, and little),
hidden states of a prefill that do not fit, the overhead of many small copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from sgl_tiered.cost.calibration import TokensFit
from sgl_tiered.cost.fitting import TokensSample, fit_tokens
from sgl_tiered.policies.activations.allocation import HostFacts, allocate
from sgl_tiered.policies.activations.balance import balanced_split, device_pages
from sgl_tiered.policies.activations.base import LayerFacts, PageLine
from sgl_tiered.policies.activations.batches import (
    BufferPages,
    RequestPages,
    mini_batches,
)
from sgl_tiered.policies.activations.ratio import PageRatio
from sgl_tiered.sim.hardware import HardwareProfile
from sgl_tiered.sim.models import ModelShape
from sgl_tiered.sim.times import times_of_profile

__all__ = [
    "BatchResult",
    "BatchSetup",
    "Context",
    "LayerTimes",
    "MiniBatch",
    "layer_pipeline",
    "simulate_batch",
]

DEVICE_SHARE = 0.9
"""Of the device's memory that is used: vLLM's default; HybridServe stands on vLLM."""
BUFFER_SHARE = 0.1
"""Of the device's memory for the buffers of pages; the paper does not state it."""
PAGE_TOKENS = 16
"""vLLM's default."""
_PREFILL_TOKENS = 2_048
"""Of one prefill mini-batch, or one prompt; only overheads depend on it."""
_REBUILD_OVERHEAD_S = 10e-6
"""Of launching one rebuild, a round figure."""
_SAMPLED_TOKENS = (256, 1_024, 4_096, 16_384)
"""At which the two regressions are sampled."""
_SAMPLED_STEPS = 6
"""Decode steps that stand for all: times are linear in the context, but for pages."""
_WARM_LAYERS, _MEASURED_LAYERS = 3, 6
_WEIGHT_CHOICES = 8
"""Shares of the weights on the device that ``BALANCED`` tries, beside none."""


class Context(Enum):
    """How the context is kept.

    ``EVEN`` is as many pages of each in host memory, ``HYBRID`` the paper's Algorithm
    1, ``BALANCED`` what is best for the batch by ``policies/activations/balance.py``,
    of some shares of the weights on the device the one with the shortest layer.
    """

    KV = "KV only"
    ACT = "ACT only"
    EVEN = "1:1"
    HYBRID = "Algorithm 1"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True)
class BatchSetup:
    """A device, a model, and a batch of equal requests.

    Attributes:
        host_bytes: memory of the host, weights included.
        output_tokens: of each answer; the first comes from the prefill.
        device_share, buffer_share: see the module's constants.
    """

    hardware: HardwareProfile
    model: ModelShape
    batch: int
    prompt_tokens: int
    output_tokens: int
    host_bytes: float
    page_tokens: int = PAGE_TOKENS
    device_share: float = DEVICE_SHARE
    buffer_share: float = BUFFER_SHARE


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a batch took.

    Attributes:
        prefill_s, decode_s: both phases.
        tokens_per_s: answers' tokens over both phases.
        busy_share: of the decode phase in which the device computes.
        kv_bytes, act_bytes, weight_bytes: to the device in the decode phase.
        ratio: of pages of activations to KV.
        num_mini_batches: of the last decode step.
        device_act, device_kv: pages of a layer on the device in the last step.
        resident_share: of the weights that stay on the device.
    """

    prefill_s: float
    decode_s: float
    tokens_per_s: float
    busy_share: float
    kv_bytes: float
    act_bytes: float
    weight_bytes: float
    ratio: PageRatio
    num_mini_batches: int
    device_act: int
    device_kv: int
    resident_share: float


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Seconds of one mini-batch in one layer."""

    load_act_s: float
    load_kv_s: float
    kv_gen_s: float
    forward_s: float


class LayerTimes:
    """What one layer takes on a device by data sheet, and its regressions.

    Attributes:
        kv_token_bytes, act_token_bytes, weight_bytes: of one layer.
        weights_s: to load these weights.
        kv_gen, load_kv: what the policies are told, fitted to samples.
    """

    def __init__(self, hardware: HardwareProfile, model: ModelShape) -> None:
        layers = model.num_layers
        outside = model.vocab * model.hidden_size
        per_layer = (model.num_compute_params - outside) // layers
        self._times = times_of_profile(hardware, model)
        self._num_layers = layers
        self._link = hardware.host
        self._flops = hardware.flops_per_s * hardware.compute_share
        self._memory = hardware.memory_bytes_per_s * hardware.memory_share
        self._kv_values = 2 * model.num_kv_heads * model.head_size
        self._hidden = model.hidden_size
        self.kv_token_bytes = model.kv_token_bytes // layers
        self.act_token_bytes = 2 * model.hidden_size
        self.weight_bytes = per_layer * model.weight_bytes_per_param
        self.weights_s = self.load_s(self.weight_bytes)
        self.kv_gen = _fitted(self.kv_gen_s)
        self.load_kv = _fitted(lambda num: self.load_s(num * self.kv_token_bytes))

    def load_s(self, num_bytes: float) -> float:
        """Return the time of one transfer to the device; 0 for nothing."""
        if num_bytes <= 0:
            return 0.0
        return self._link.latency_s + num_bytes / self._link.bytes_per_s

    def kv_gen_s(self, num_tokens: int) -> float:
        """Return the time to rebuild K and V of tokens; 0 for none.

        Two operations per value of the K and V slices and token, or, where that takes
        longer, reading these and the activations and writing K and V.
        """
        if num_tokens <= 0:
            return 0.0
        values = self._hidden * self._kv_values
        moved = 2 * (values + num_tokens * (self._hidden + self._kv_values))
        compute_s = 2.0 * values * num_tokens / self._flops
        return _REBUILD_OVERHEAD_S + max(compute_s, moved / self._memory)

    def forward_s(self, num_requests: int, context_tokens: int) -> float:
        """Return the time of a decode step's layer; contexts are summed."""
        step_s = self._times.decode_step_s(num_requests, context_tokens)
        return step_s / self._num_layers

    def prefill_s(self, num_requests: int, prompt_tokens: int) -> float:
        """Return the time of a prefill's layer, over all mini-batches."""
        size = max(_PREFILL_TOKENS // prompt_tokens, 1)
        whole, rest = divmod(num_requests, size)
        seconds = whole * self._times.prefill_s([(0, prompt_tokens)] * size)
        if rest:
            seconds += self._times.prefill_s([(0, prompt_tokens)] * rest)
        return seconds / self._num_layers


def simulate_batch(setup: BatchSetup, context: Context) -> BatchResult:
    """Return what a batch takes with its context kept in one way."""
    return _Batch(setup, context).run()


def layer_pipeline(
    batches: Sequence[MiniBatch], weights_s: float, num_layers: int
) -> list[float]:
    """Return when each of some equal layers ends, the first one's weights being there.

    Args:
        batches: of every layer, in order.
        weights_s: to load the next layer's weights; each mini-batch's loads are
            followed by an equal part of it.
        num_layers: how many layers.
    """
    part_s = weights_s / len(batches)
    link_s = device_s = 0.0
    # Ends of the mini-batches: with two halves, pages wait for the one before the last.
    before_last_s = last_s = layer_before_s = 0.0
    ends = []
    for _ in range(num_layers):
        for one in batches:
            act_s = max(link_s, before_last_s) + one.load_act_s
            link_s = act_s + one.load_kv_s
            rebuilt_s = max(device_s, act_s) + one.kv_gen_s
            device_s = max(rebuilt_s, link_s) + one.forward_s
            before_last_s, last_s = last_s, device_s
            if part_s:
                # Into the half that the layer before used.
                link_s = max(link_s, layer_before_s) + part_s
        layer_before_s = device_s
        ends.append(device_s)
    return ends


class _Batch:
    """One run; sizes are those of a layer unless they say otherwise."""

    def __init__(self, setup: BatchSetup, context: Context) -> None:
        self._setup = setup
        self._layer = layer = LayerTimes(setup.hardware, setup.model)
        self._kv_page_bytes = layer.kv_token_bytes * setup.page_tokens
        self._act_page_bytes = layer.act_token_bytes * setup.page_tokens
        self._kv_gen = self._page_line(layer.kv_gen)
        self._load_kv = self._page_line(layer.load_kv)
        act_share = layer.act_token_bytes / layer.kv_token_bytes
        self._load_act = PageLine(
            self._load_kv.overhead_s, self._load_kv.page_s * act_share
        )
        most = self._most_resident()
        self._keep_weights(most if context is Context.KV else 0.0)
        self._ratio = self._ratio_of(context, most)
        self._buffers = self._buffer_pages()

    def run(self) -> BatchResult:
        setup, layers = self._setup, self._setup.model.num_layers
        num_steps = setup.output_tokens - 1
        picked = [
            setup.prompt_tokens + round((n + 0.5) * num_steps / _SAMPLED_STEPS)
            for n in range(_SAMPLED_STEPS)
        ]
        decode_s = busy_s = kv_pages = act_pages = 0.0
        share = num_steps / len(picked)
        for tokens in picked:
            step_s, computed_s, loaded = self._step(tokens)
            decode_s += share * step_s
            busy_s += share * computed_s
            kv_pages += share * layers * loaded.num_kv
            act_pages += share * layers * loaded.num_act
        prefill_s = self._prefill_s()
        last = self._facts(setup.prompt_tokens + num_steps)
        held = device_pages(last, self._num_act(last))
        return BatchResult(
            prefill_s=prefill_s,
            decode_s=decode_s,
            tokens_per_s=setup.batch * setup.output_tokens / (prefill_s + decode_s),
            busy_share=busy_s / decode_s,
            kv_bytes=kv_pages * self._kv_page_bytes,
            act_bytes=act_pages * self._act_page_bytes,
            weight_bytes=num_steps * layers * self._streamed_bytes,
            ratio=self._ratio,
            num_mini_batches=len(self._packed(setup.prompt_tokens + num_steps)),
            device_act=held.num_act,
            device_kv=held.num_kv,
            resident_share=self._resident_share,
        )

    # -- Memory --------------------------------------------------------------------

    def _room(self) -> float:
        """Return the device's bytes, over all layers, for weights and pages."""
        setup, model = self._setup, self._setup.model
        memory = setup.hardware.memory_bytes
        room = memory * (setup.device_share - setup.buffer_share)
        return room - model.vocab * model.hidden_size * model.weight_bytes_per_param

    def _most_resident(self) -> float:
        """Return the largest share of the weights that the device can hold."""
        all_weights = self._setup.model.num_layers * self._layer.weight_bytes
        if all_weights <= self._room():
            return 1.0
        # The layer that computes, and the one that is loaded meanwhile.
        return max(self._room() - 2 * self._layer.weight_bytes, 0.0) / all_weights

    def _keep_weights(self, share: float) -> None:
        """Keep this share of every layer's weights on the device, and pages beside."""
        layer, num_layers = self._layer, self._setup.model.num_layers
        self._resident_share = share
        self._streamed_bytes = layer.weight_bytes * (1.0 - share)
        self._weights_s = layer.load_s(self._streamed_bytes)
        room = self._room() - share * num_layers * layer.weight_bytes
        if self._streamed_bytes:
            room -= 2 * layer.weight_bytes
        self._device_bytes = max(int(room / num_layers), 0)

    def _buffer_pages(self) -> BufferPages:
        """Share the buffers in the ratio: two halves of pages, one of rebuilt KV."""
        share = self._ratio.act_share
        each = 2 * share * self._act_page_bytes + 2 * (1 - share) * self._kv_page_bytes
        each += share * self._kv_page_bytes
        num = self._setup.hardware.memory_bytes * self._setup.buffer_share / each
        return BufferPages(int(num * share), int(num * (1 - share)))

    def _page_line(self, fit: TokensFit) -> PageLine:
        return PageLine(fit.overhead_s, fit.token_s * self._setup.page_tokens)

    # -- Policy --------------------------------------------------------------------

    def _ratio_of(self, context: Context, most_resident: float) -> PageRatio:
        if context is Context.KV:
            return PageRatio(0, 1)
        if context is Context.ACT:
            return PageRatio(1, 0)
        if context is Context.EVEN:
            return PageRatio(1, 1)
        if context is Context.BALANCED:
            return self._balanced_ratio(most_resident)
        model = self._setup.model
        found = allocate(
            HostFacts(
                room_bytes=int(self._setup.host_bytes - model.weight_bytes),
                kv_page_bytes=model.num_layers * self._kv_page_bytes,
                act_page_bytes=model.num_layers * self._act_page_bytes,
                num_device_act=self._device_bytes // self._act_page_bytes,
                load_weights_s=self._weights_s,
                kv_gen=self._kv_gen,
                load_kv=self._load_kv,
            )
        )
        return PageRatio(found.num_act, found.num_kv)

    def _balanced_ratio(self, most_resident: float) -> PageRatio:
        """Keep the best share of weights, and return the best ratio beside it."""
        middle = self._setup.prompt_tokens + self._setup.output_tokens // 2
        found = []
        for n in range(_WEIGHT_CHOICES + 1):
            share = most_resident * n / _WEIGHT_CHOICES
            self._keep_weights(share)
            found.append((share, balanced_split(self._facts(middle))))
        share, split = min(found, key=lambda one: one[1].seconds)
        self._keep_weights(share)
        return PageRatio(split.num_act, split.num_kv)

    def _facts(self, tokens: int) -> LayerFacts:
        """Return a layer's facts when every request has so many tokens."""
        batch = self._setup.batch
        pages = -(-tokens // self._setup.page_tokens) * batch
        # Each mini-batch reads the layer's weights; half a buffer of KV is one's.
        buffers = self._setup.hardware.memory_bytes * self._setup.buffer_share
        num = min(max(math.ceil(2 * pages * self._kv_page_bytes / buffers), 1), batch)
        each = -(-batch // num)
        return LayerFacts(
            num_pages=pages,
            device_bytes=self._device_bytes,
            kv_page_bytes=self._kv_page_bytes,
            act_page_bytes=self._act_page_bytes,
            kv_gen=self._kv_gen,
            load_kv=self._load_kv,
            load_act=self._load_act,
            load_weights_s=self._weights_s,
            compute_s=num * self._layer.forward_s(each, tokens * batch // num),
        )

    def _num_act(self, facts: LayerFacts) -> int:
        pages = facts.num_pages // self._setup.batch
        return self._ratio.act_of(pages) * self._setup.batch

    def _packed(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        facts = self._facts(tokens)
        num_act = self._num_act(facts) // self._setup.batch
        num_kv = facts.num_pages // self._setup.batch - num_act
        requests = [RequestPages(num_act, num_kv)] * self._setup.batch
        return mini_batches(requests, self._buffers, self._kv_gen, self._load_kv)

    # -- Time ----------------------------------------------------------------------

    def _step(self, tokens: int) -> tuple[float, float, RequestPages]:
        """Return a step's time, its computation, and the pages loaded in a layer."""
        setup, layer = self._setup, self._layer
        facts = self._facts(tokens)
        num_act = self._num_act(facts)
        held = device_pages(facts, num_act)
        loaded = RequestPages(
            num_act - held.num_act, facts.num_pages - num_act - held.num_kv
        )
        batches = []
        for members in self._packed(tokens):
            # What is on the device is shared by the requests evenly.
            part = len(members) / setup.batch
            rebuilt = round(num_act * part * setup.page_tokens)
            batches.append(
                MiniBatch(
                    layer.load_s(loaded.num_act * part * self._act_page_bytes),
                    layer.load_s(loaded.num_kv * part * self._kv_page_bytes),
                    layer.kv_gen_s(rebuilt),
                    layer.forward_s(len(members), len(members) * tokens),
                )
            )
        num = _WARM_LAYERS + _MEASURED_LAYERS
        ends = layer_pipeline(batches, self._weights_s, num)
        layer_s = (ends[-1] - ends[_WARM_LAYERS - 1]) / _MEASURED_LAYERS
        busy_s = sum(one.kv_gen_s + one.forward_s for one in batches)
        num_layers = setup.model.num_layers
        return layer_s * num_layers, busy_s * num_layers, loaded

    def _prefill_s(self) -> float:
        """Return the prefill: computation, weights and copies to the host overlap."""
        setup = self._setup
        facts = self._facts(setup.prompt_tokens)
        num_act = self._num_act(facts)
        held = device_pages(facts, num_act)
        to_host = (num_act - held.num_act) * self._act_page_bytes
        to_host += (facts.num_pages - num_act - held.num_kv) * self._kv_page_bytes
        compute_s = self._layer.prefill_s(setup.batch, setup.prompt_tokens)
        layer_s = max(compute_s, self._weights_s, self._layer.load_s(to_host))
        return self._weights_s + setup.model.num_layers * layer_s


def _fitted(seconds_of: Callable[[int], float]) -> TokensFit:
    samples = [TokensSample(num, seconds_of(num)) for num in _SAMPLED_TOKENS]
    fit = fit_tokens(samples)
    assert fit is not None, samples
    return fit
