"""Free layer-pages over the coming stages: LayerKV's Eq. 5.

Source: LayerKV (papers: layerkv), section 3.1.1:

    Avail(t + 1) = Avail(t) + Released(t) - Allocated(t)                           (5)

Released are the pages of answers that end, each at the median of its predicted length.
Allocated is, as the paper has it, one further page per sequence and stage, and what is
planned for prefill. The paper leaves the length of a stage open; here it is
``page_tokens`` decode steps, in which a sequence needs one further page and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["STAGES", "Int64s", "RunningPages", "forecast", "taken_ahead"]

Int64s = npt.NDArray[np.int64]

STAGES = 2
"""To look ahead: what leaves needs a part of one, and nothing is decided within one."""


@dataclass(frozen=True, slots=True)
class RunningPages:
    """What a request that decodes holds of the device, and for how long.

    One that is paused neither grows nor ends: it is left out.

    Attributes:
        num_layer_pages: on the device, all layers together.
        tokens_left: median of the predicted length less what is out; at least 1.
        growth: layer-pages of each further page: L, where the page that is written is
            on the device in all layers.
    """

    num_layer_pages: int
    tokens_left: int
    growth: int


def forecast(
    avail: int,
    running: Sequence[RunningPages],
    num_stages: int,
    page_tokens: int,
    planned: Sequence[int] = (),
) -> Int64s:
    """Return Avail(0) to Avail(num_stages), in layer-pages; int64 [num_stages + 1].

    Values below 0 say how much is missing. O(running + num_stages).

    Args:
        avail: free now.
        running: all that decode.
        num_stages: to look ahead, each of ``page_tokens`` decode steps.
        page_tokens: tokens of a page.
        planned: layer-pages that prefill takes in each of the first stages.
    """
    # By how much a stage's growth differs from that of the one before, and what comes
    # free in it: plain integers, as this runs before every decode step.
    slopes, ends = [0] * (num_stages + 1), [0] * num_stages
    for facts in running:
        growth = facts.growth
        slopes[0] -= growth
        num = -(-facts.tokens_left // page_tokens)
        if num <= num_stages:
            num = max(num, 1)
            slopes[num] += growth
            # What it took on the way comes back with the rest.
            ends[num - 1] += facts.num_layer_pages + num * growth
    found, slope = [avail], 0
    for stage in range(num_stages):
        slope += slopes[stage]
        taken = planned[stage] if stage < len(planned) else 0
        found.append(found[-1] + slope + ends[stage] - taken)
    return np.array(found, np.int64)


def taken_ahead(running: Sequence[RunningPages], page_tokens: int) -> int:
    """Return the layer-pages that the coming ``STAGES`` take at worst; O(running).

    What answers that end give back counts from the stage on in which they end, so it
    may be negative.

    Args:
        running: all that decode, paused ones left out.
        page_tokens: tokens of a page.
    """
    if not running:
        return 0
    return -int(forecast(0, running, STAGES, page_tokens).min())
