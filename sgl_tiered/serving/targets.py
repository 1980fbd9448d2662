"""A request's SLO: what it brings itself, else the server's flags.

A request brings it as ``custom_params`` of its sampling parameters, which SGLang takes
over ``/generate`` (in ``sampling_params``) and over the OpenAI endpoints (in the body;
the OpenAI client calls that ``extra_body``):

    {"custom_params": {"tiered": {"ttft_s": 2.0, "tpot_s": 0.05}}}

Seconds; null asks for no target at all. What is no positive number is left out, and the
server's own target holds: a wrong wish must not fail a request that can be served.
A TTFT below the server's floor counts as the floor: who is due goes before others, and
with a target of nothing a request would be due before all that have waited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_tiered.policies.admission.base import NO_TARGET

__all__ = ["PARAMS_KEY", "Targets", "request_targets"]

PARAMS_KEY = "tiered"


@dataclass(frozen=True, slots=True)
class Targets:
    """Wanted times in seconds; ``NO_TARGET`` for none.

    Attributes:
        ttft_s: to the first token.
        tpot_s: per token after it, on average.
    """

    ttft_s: float = NO_TARGET
    tpot_s: float = NO_TARGET


def request_targets(
    custom_params: Any, defaults: Targets, floor_s: float = 0.0
) -> tuple[Targets, bool]:
    """Return a request's targets, and whether all that it brought can count.

    Args:
        custom_params: of its sampling parameters.
        defaults: of requests that bring none.
        floor_s: least TTFT target that counts.
    """
    wishes = None
    if isinstance(custom_params, Mapping):
        wishes = custom_params.get(PARAMS_KEY)
    if wishes is None:
        return defaults, True
    if not isinstance(wishes, Mapping):
        return defaults, False
    found, is_good = {}, True
    for name in ("ttft_s", "tpot_s"):
        if name not in wishes:
            continue
        value = wishes[name]
        if value is None:
            found[name] = NO_TARGET
        elif _is_time(value):
            found[name] = float(value)
        else:
            is_good = False
    if found.get("ttft_s", floor_s) < floor_s:
        found["ttft_s"], is_good = floor_s, False
    return replace(defaults, **found), is_good


def _is_time(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
