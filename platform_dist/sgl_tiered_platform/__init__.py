"""Entry point of SGLang's platform group; it only decides whether to be active."""

from __future__ import annotations

__all__ = ["activate"]


def activate() -> str | None:
    """Return the CPU platform's class path where torch sees no accelerator."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "sgl_tiered.engines.sglang.cpu_platform.TieredCpuPlatform"
