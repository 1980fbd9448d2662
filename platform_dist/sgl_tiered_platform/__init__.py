"""Entry point of SGLang's platform group; it only decides whether to be active.

SGLang calls every installed platform's ``activate`` and refuses to start if two say
yes. This one is a fallback: it says no whenever anything else would serve.
"""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points

__all__ = ["NAME", "activate"]

NAME = "sgl_tiered_cpu"
_GROUP = "sglang.srt.platforms"
_CLASS = "sgl_tiered.engines.sglang.cpu_platform.TieredCpuPlatform"
# Set while the others are asked, so that two fallbacks that ask each other end.
_asking: ContextVar[bool] = ContextVar("_asking", default=False)
_logger = logging.getLogger(__name__)


def activate() -> str | None:
    """Return the CPU platform's class path if it should serve, else None.

    It serves where torch sees no accelerator, unless SGLang's own CPU engine was
    asked for (``SGLANG_USE_CPU_ENGINE=1``) or another installed platform is active.
    With ``SGLANG_PLATFORM=sgl_tiered_cpu`` it serves without asking the others.

    Raises:
        RuntimeError: if it was selected by name where torch sees an accelerator.
    """
    import torch

    selected = os.environ.get("SGLANG_PLATFORM") == NAME
    if torch.accelerator.is_available():
        if selected:
            raise RuntimeError(
                f"SGLANG_PLATFORM={NAME} is for machines without an accelerator, and "
                "torch sees one; hide it (CUDA_VISIBLE_DEVICES='') or unset "
                "SGLANG_PLATFORM."
            )
        return None
    if selected:
        return _CLASS
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or _asking.get():
        return None
    return None if _another_is_active() else _CLASS


def _another_is_active() -> bool:
    token = _asking.set(True)
    try:
        return any(_is_active(entry) for entry in _others())
    finally:
        _asking.reset(token)


def _others() -> list[EntryPoint]:
    """List the other platforms that SGLang would ask in this process."""
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")}
    allowed.discard("")
    return [
        entry
        for entry in entry_points(group=_GROUP)
        if entry.name != NAME and (not allowed or entry.name in allowed)
    ]


def _is_active(entry: EntryPoint) -> bool:
    try:
        return entry.load()() is not None
    except Exception as error:  # noqa: BLE001 - SGLang takes a broken one as inactive
        _logger.debug("platform %s could not be asked: %s", entry.name, error)
        return False
