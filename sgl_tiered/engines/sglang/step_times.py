"""How long passes take: for a decoder from launch to launch, for the device without
what was launched before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_tiered.cost.calibrated import calibrated_decode
from sgl_tiered.cost.calibration import read_calibration
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.prefill import PrefillSnapshot
from sgl_tiered.serving.options import Options

__all__ = ["PassTimes", "StepTimes", "context_tokens", "first_decode_cost"]


class PassTimes:
    """What each pass of one scheduler has taken of its device."""

    def __init__(self) -> None:
        self._last_end_s = float("-inf")

    def ended(self, launch_s: float, now_s: float) -> float:
        """Return the seconds of a pass whose results have just come.

        The overlap schedule launches a pass under the one before. Until the results of
        that one come it waits, which is no part of what it takes itself.

        Args:
            launch_s: when it was launched.
            now_s: on the same clock.
        """
        begin_s = max(launch_s, self._last_end_s)
        self._last_end_s = now_s
        return now_s - begin_s


class StepTimes:
    """Watches the batches of one scheduler.

    Args:
        learn: told of each decode step that another batch followed at once: requests,
            tokens of their contexts, seconds, and by how much each of ``totals`` grew.
        totals: numbers that forwards add to; asked once a batch was launched, when on
            a CPU its forward has ended.
    """

    def __init__(
        self,
        learn: Callable[..., object],
        totals: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        self._learn = learn
        self._totals = totals
        self._before: tuple[float, ...] = totals()
        # Pass, launch and what is to be told of the step before, if it decoded.
        self._step: tuple[int, float, int, int, tuple[float, ...]] | None = None

    def observe(self, batch: Any) -> None:
        """Take note of a batch that was launched.

        Whether or not SGLang prepares the next step under the current one, a decoder
        waits from its launch to the launch of the next.
        """
        step, self._step = self._step, None
        totals = self._totals()
        grew = tuple(now - then for now, then in zip(totals, self._before, strict=True))
        self._before = totals
        if not batch.forward_mode.is_decode():
            return
        reqs = batch.reqs
        contexts = context_tokens(reqs)
        self._step = (batch.forward_iter, batch.launch_ts, len(reqs), contexts, grew)
        # Turns without a forward count no pass, though a step may have waited in them.
        if step is None or batch.after_idle_gap:
            return
        if step[0] + 1 == batch.forward_iter:
            _, launch_s, size, num_tokens, added = step
            self._learn(size, num_tokens, batch.launch_ts - launch_s, *added)


def context_tokens(reqs: list[Any]) -> int:
    """Return the context of all requests together."""
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)


def first_decode_cost(config: Options, prefill: PrefillSnapshot) -> DecodeCost:
    """Return what a step is taken to cost before any was seen.

    Args:
        config: names the calibration, if there is one.
        prefill: what a step is guessed from without.
    """
    if config.loads.calibration is not None:
        # The factory has checked that it fits the model.
        found = calibrated_decode(read_calibration(config.loads.calibration))
        if found is not None:
            return found
    return DecodeCost.guessed(prefill)
