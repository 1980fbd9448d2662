"""What a decoder waits for a token: from the launch of its step to that of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_tiered.cost.calibrated import calibrated_decode
from sgl_tiered.cost.calibration import read_calibration
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.prefill import PrefillSnapshot
from sgl_tiered.engines.sglang.config import TieredConfig

__all__ = ["StepTimes", "context_tokens", "first_decode_cost"]


class StepTimes:
    """Watches the batches of one scheduler.

    Args:
        learn: told of each decode step that another batch followed at once: requests,
            tokens of their contexts, seconds.
    """

    def __init__(self, learn: Callable[[int, int, float], object]) -> None:
        self._learn = learn
        # Pass, launch, batch and contexts of the step before, if it was a decode step.
        self._step: tuple[int, float, int, int] | None = None

    def observe(self, batch: Any) -> None:
        """Take note of a batch that was launched.

        Whether or not SGLang prepares the next step under the current one, a decoder
        waits from its launch to the launch of the next.
        """
        before, self._step = self._step, None
        if not batch.forward_mode.is_decode():
            return
        reqs = batch.reqs
        contexts = context_tokens(reqs)
        self._step = (batch.forward_iter, batch.launch_ts, len(reqs), contexts)
        if before is not None and before[0] + 1 == batch.forward_iter:
            _, launch_s, size, num_tokens = before
            self._learn(size, num_tokens, batch.launch_ts - launch_s)


def context_tokens(reqs: list[Any]) -> int:
    """Return the context of all requests together."""
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)


def first_decode_cost(config: TieredConfig, prefill: PrefillSnapshot) -> DecodeCost:
    """Return what a step is taken to cost before any was seen.

    Args:
        config: names the calibration, if there is one.
        prefill: what a step is guessed from without.
    """
    if config.calibration is not None:
        # The factory has checked that it fits the model.
        found = calibrated_decode(read_calibration(config.calibration))
        if found is not None:
            return found
    return DecodeCost.guessed(prefill)
