"""How long a device computes: from a profile and a model, or from a calibration.

A prefill pass over parts of prompts (n new tokens after a context of p each):

    overhead + max(weights, token * sum n) + pair * sum n * (p + (n + 1) / 2)
        + context_token * sum p

and a decode step of a batch:

    overhead + max(weights, request * batch) + context_token * sum of contexts

``weights`` is the time to read all weights once, below which no pass goes. With tensor
parallelism every term but the overhead is divided by the number of devices, and each
layer adds two all-reduces over the new tokens. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.hardware import HardwareProfile
from sgl_tiered.sim.models import ModelShape

__all__ = ["DeviceTimes", "StandInCost", "times_of_profile"]

_PASS_OVERHEAD_S = 2e-3
"""Scheduling and launches of one pass of an engine on a GPU, a round figure."""


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Coefficients of the formulas in the module's docstring.

    ``request_s`` is paid once per request, before it is queued (HTTP, tokenizer).
    """

    prefill_overhead_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_overhead_s: float
    decode_request_s: float
    decode_context_token_s: float
    weights_s: float = 0.0
    request_s: float = 0.0
    prefill_context_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.decode_step_s(1, 1) <= 0.0 or self.prefill_s([(0, 1)]) <= 0.0:
            raise ConfigError(
                "device times",
                "a pass takes no time",
                "give positive coefficients",
            )

    def prefill_s(self, parts: Sequence[tuple[int, int]]) -> float:
        """Return the time of one pass over (context tokens, new tokens) parts."""
        num_tokens = num_context_tokens = 0
        pairs = 0.0
        for context, new in parts:
            num_tokens += new
            num_context_tokens += context
            pairs += new * (context + (new + 1) / 2)
        linear_s = max(self.weights_s, self.prefill_token_s * num_tokens)
        linear_s += self.prefill_context_token_s * num_context_tokens
        return self.prefill_overhead_s + linear_s + self.prefill_pair_s * pairs

    def decode_base_s(self, batch: int) -> float:
        """Return the part of a step that does not depend on the contexts."""
        linear_s = max(self.weights_s, self.decode_request_s * batch)
        return self.decode_overhead_s + linear_s

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Return the time of one step; contexts are summed over the batch."""
        contexts_s = self.decode_context_token_s * context_tokens
        return self.decode_base_s(batch) + contexts_s


def times_of_profile(
    hardware: HardwareProfile,
    model: ModelShape,
    *,
    tensor_parallel: int = 1,
    request_s: float = 0.0,
) -> DeviceTimes:
    """Return the times that the data sheet and the assumed shares give."""
    num = tensor_parallel
    flops = hardware.flops_per_s * hardware.compute_share * num
    bandwidth = hardware.memory_bytes_per_s * hardware.memory_share * num
    token_s = 2.0 * model.num_compute_params / flops
    reduce_token_s, reduce_s = _all_reduce(hardware, model, num)
    context_token_s = model.kv_token_bytes * model.kv_copies(num) / bandwidth
    return DeviceTimes(
        prefill_overhead_s=_PASS_OVERHEAD_S + reduce_s,
        prefill_token_s=token_s + reduce_token_s,
        prefill_pair_s=4.0 * model.num_layers * model.attention_width / flops,
        decode_overhead_s=_PASS_OVERHEAD_S + reduce_s,
        decode_request_s=token_s + reduce_token_s,
        decode_context_token_s=max(
            context_token_s, model.decode_flops_per_token / flops
        ),
        weights_s=model.weight_bytes / bandwidth,
        request_s=request_s,
        prefill_context_token_s=context_token_s,
    )


def _all_reduce(
    hardware: HardwareProfile, model: ModelShape, num: int
) -> tuple[float, float]:
    """Return seconds per token and per pass of two ring all-reduces per layer."""
    if num == 1:
        return 0.0, 0.0
    # A ring moves 2 (n - 1) / n of the data over each device's link in 2 (n - 1) hops.
    share = 2.0 * (num - 1) / num
    per_token = 2 * model.num_layers * 2 * model.hidden_size * share
    hops_s = 2 * (num - 1) * hardware.peer.latency_s
    return per_token / hardware.peer.bytes_per_s, 2 * model.num_layers * hops_s


class StandInCost(CostModel):
    """The planner's costs where one stand-in token is a page of the real prompt.

    Knows the device's real times, so that the simulated planner is perfectly
    calibrated; a planner with wrong costs is simulated with other ``times``.
    """

    def __init__(
        self,
        times: DeviceTimes,
        page_tokens: int,
        links: Mapping[TierId, LinkCost],
    ) -> None:
        # The base class's own prefill cost is never asked.
        super().__init__(PrefillCost(1, 1, 1, 1.0), links)
        self._times = times
        self._page_tokens = page_tokens

    def recompute_s(self, prefix_tokens: int, new_tokens: int) -> float:
        """Return the time of a pass over ``new_tokens`` pages."""
        if new_tokens <= 0:
            return 0.0
        page = self._page_tokens
        return self._times.prefill_s([(prefix_tokens * page, new_tokens * page)])
