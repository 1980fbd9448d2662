"""Disaggregated serving: one request, sent to a prefill and to a decode instance.

The two find each other by three fields that SGLang's own front adds: the prefill
instance's bootstrap host and port, and a room, a number that names this exchange. Both
get the same body. The decode instance answers; what the prefill instance answers is
only looked at for failures, so its input logprobs are not merged into the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sgl_tiered.router.config import InstanceConfig

__all__ = ["with_bootstrap"]

_MAX_ROOM = 2**63 - 1


def with_bootstrap(
    body: Mapping[str, Any],
    num_prompts: int,
    prefill: InstanceConfig,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return the body with the three fields; one room per prompt of a batch.

    Args:
        body: the parsed JSON object; not changed.
        num_prompts: in the body.
        prefill: the instance that computes the prompt.
        rng: draws the rooms.
    """
    rooms = [int(room) for room in rng.integers(0, _MAX_ROOM, size=num_prompts)]
    fields: dict[str, Any] = {
        "bootstrap_host": prefill.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": rooms[0],
    }
    if _is_batch(body):
        fields = {
            "bootstrap_host": [prefill.host] * num_prompts,
            "bootstrap_port": [prefill.bootstrap_port] * num_prompts,
            "bootstrap_room": rooms,
        }
    return {**body, **fields}


def _is_batch(body: Mapping[str, Any]) -> bool:
    """Return whether the body has a list of prompts, be it of one."""
    for field in ("text", "input_ids", "prompt"):
        value = body.get(field)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return True
    return False
