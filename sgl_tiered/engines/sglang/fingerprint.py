"""Which model computed this KV: a fingerprint of architecture and weights.

Weights are sampled, not read whole: elements at even distances of every tensor, which
takes milliseconds and changes with any training step or merge.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

__all__ = ["model_fingerprint"]

_SAMPLES_PER_TENSOR = 64
_VOLATILE_KEYS = ("_name_or_path", "transformers_version")


def model_fingerprint(model: torch.nn.Module, hf_config: Any, engine: str) -> str:
    """Return 32 hexadecimal digits that name the model as it is loaded now.

    Args:
        model: the loaded model, on any device.
        hf_config: its configuration (rotary settings and the like shape KV too).
        engine: name and version of what computes, since kernels may change rounding.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = {
        key: value
        for key, value in hf_config.to_dict().items()
        if key not in _VOLATILE_KEYS
    }
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(engine.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            count = min(_SAMPLES_PER_TENSOR, flat.numel())
            places = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64)
            sample = flat[places.long().to(flat.device)].cpu()
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
