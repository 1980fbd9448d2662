"""Whether there is an accelerator."""

from __future__ import annotations

__all__ = ["has_accelerator"]


def has_accelerator() -> bool:
    """Return whether KV lies on a device of its own."""
    import torch

    return bool(torch.accelerator.is_available())
