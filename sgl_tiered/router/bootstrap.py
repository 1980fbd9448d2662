"""Disaggregated serving: one request, sent to a prefill and to a decode instance.

The two find each other by three fields that SGLang's own front adds: the prefill
instance's bootstrap host and port, and a room, a number that names this exchange. Both
get the same body. The decode instance answers; what the prefill instance answers is
only looked at for failures, so its input logprobs are not merged into the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from sgl_tiered.router.config import InstanceConfig
from sgl_tiered.router.prompts import Prompt
from sgl_tiered.router.refusals import RefusedError

__all__ = ["with_bootstrap"]

_MAX_ROOM = 2**63 - 1
_MAX_PROMPTS = 2**14
"""In one body, each with a room."""


def with_bootstrap(
    raw: bytes, prompt: Prompt, prefill: InstanceConfig, rng: np.random.Generator
) -> bytes:
    """Return the body with the three fields; one room per prompt of a batch.

    Args:
        raw: the body, a JSON object. The fields stand last in it, where they win over
            any of the same name.
        prompt: what the body says.
        prefill: the instance that computes the prompt.
        rng: draws the rooms.

    Raises:
        RefusedError: there are too many prompts in it.
    """
    num = prompt.num_prompts
    if num > _MAX_PROMPTS:
        raise RefusedError(
            413, "batch", f"{num} prompts are more than {_MAX_PROMPTS}: send fewer"
        )
    rooms = [int(room) for room in rng.integers(0, _MAX_ROOM, size=num)]
    fields: dict[str, Any] = {
        "bootstrap_host": prefill.host,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": rooms[0],
    }
    if prompt.is_batch:
        fields = {
            "bootstrap_host": [prefill.host] * num,
            "bootstrap_port": [prefill.bootstrap_port] * num,
            "bootstrap_room": rooms,
        }
    front = raw.rstrip(b" \t\r\n").removesuffix(b"}").rstrip(b" \t\r\n")
    comma = b"" if front.endswith(b"{") else b","
    return front + comma + msgspec.json.encode(fields).removeprefix(b"{")
