"""What of SGLang a pool of our own does not go with, whatever the pool is for."""

from __future__ import annotations

from typing import Any

from sgl_tiered.errors import ConfigError

__all__ = ["refuse_with_own_pool"]

# What moves KV behind the scheduler's back was not tried. What the tiers refuse
# altogether (HiCache, speculation, other modes) is not here.
_UNTRIED = (
    "enable_mixed_chunk",
    "enable_dynamic_chunking",
    "enable_two_batch_overlap",
    "enable_memory_saver",
    "prefill_only_disable_kv_cache",
)


def refuse_with_own_pool(flag: str, why_pages: str, server_args: Any) -> None:
    """Refuse what our pools and attention were not shown to work with.

    Args:
        flag: that asks for the pool.
        why_pages: what it needs of pages, and why.
        server_args: as given; what nobody has named is not refused.

    Raises:
        ConfigError: one sentence that names the other flag.
    """
    page_size = getattr(server_args, "page_size", None)
    if page_size is not None and page_size < 2:
        raise ConfigError(flag, why_pages, "add --page-size 16")
    for name in _UNTRIED:
        value = getattr(server_args, name, None)
        if value:
            theirs = "--" + name.replace("_", "-")
            raise ConfigError(
                flag, f"does not go with {theirs} {value!r} yet", "leave that out"
            )
    # Where no device is named, the CPU platform switches it off.
    if getattr(server_args, "device", "cpu") == "cpu" and not getattr(
        server_args, "disable_overlap_schedule", True
    ):
        raise ConfigError(
            flag,
            "does not go with the overlap schedule yet",
            "add --disable-overlap-schedule",
        )
