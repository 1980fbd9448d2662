"""The model of both benches: half of the layers of ``bench``.

With it 300 requests take a minute or two on 2 cores. A token takes half the time to
compute and has half the KV, so that what either is worth beside the other is as in
``bench``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.model import PRESETS, make_model

__all__ = ["FACTS", "TOKEN_BYTES", "half_bench", "host_tier"]

_SHAPE = replace(PRESETS["bench"], num_layers=PRESETS["bench"].num_layers // 2)
TOKEN_BYTES = _SHAPE.kv_bytes_per_token
"""KV of a token."""
FACTS: dict[str, Any] = asdict(_SHAPE)
"""What the model is, for records."""


def half_bench(folder: Path) -> Path:
    """Return the folder of the model, made if it is not there yet."""
    return make_model(_SHAPE, folder.resolve())


def host_tier(tokens: int) -> tuple[str, ...]:
    """Return our flags for a host tier of so many tokens.

    To the byte: ``Tiers`` counts in megabytes, of which there are few here.
    """
    size = str(tokens * TOKEN_BYTES)
    return ("--radix-cache-backend", "tiered", "--tiered-host-size", size)
