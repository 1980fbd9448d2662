"""The settings of sparse KV, and what it does not go with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_tiered.errors import ConfigError

__all__ = [
    "KEEP_FAULT",
    "SPARSITY_CHOICES",
    "SparsitySettings",
    "read_sparsity",
    "refuse_with_sparsity",
]

SPARSITY_CHOICES: Mapping[str, tuple[str, ...]] = {"sparsity": ("off", "load", "store")}
KEEP_FAULT = "keep"
"""Word of ``--tiered-fault-corrupt`` that keeps the wrong tokens."""
DEFAULT_KEEP = 0.5


@dataclass(frozen=True, slots=True)
class SparsitySettings:
    """What a server with ``--tiered-sparsity load`` or ``store`` was told.

    Attributes:
        keep: share of a layer's tokens that a load brings to the device.
        on_store: the others are left out when pages are offloaded already.
    """

    keep: float = DEFAULT_KEEP
    on_store: bool = False

    def tokens_of(self, page_tokens: int) -> int:
        """Return how many tokens of each page are stored, where some are left out."""
        return math.ceil(self.keep * page_tokens)


def read_sparsity(settings: Mapping[str, Any]) -> SparsitySettings | None:
    """Read the settings by flag name without ``--tiered-``; None where it is off.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    mode = settings.get("sparsity", "off")
    if mode not in SPARSITY_CHOICES["sparsity"]:
        raise ConfigError(
            "--tiered-sparsity",
            f"{mode!r} is unknown",
            f"use {', '.join(SPARSITY_CHOICES['sparsity'])}",
        )
    keep = settings.get("sparsity_keep")
    if mode == "off":
        if keep is not None:
            raise ConfigError(
                "--tiered-sparsity-keep",
                "has no effect without sparse KV",
                "add --tiered-sparsity load",
            )
        return None
    for name, (unwanted, remedy) in _NOT_WITH.items():
        if settings.get(name) == unwanted:
            raise ConfigError(
                "--tiered-sparsity",
                f"does not go with --tiered-{name.replace('_', '-')} {unwanted} yet",
                remedy,
            )
    return SparsitySettings(
        DEFAULT_KEEP if keep is None else _share(keep), on_store=mode == "store"
    )


def refuse_with_sparsity(server_args: Any) -> None:
    """Refuse what sparse KV was not shown to work with.

    Raises:
        ConfigError: one sentence that names the other flag.
    """
    page_size = getattr(server_args, "page_size", None)
    if page_size is not None and page_size < 2:
        raise ConfigError(
            "--tiered-sparsity",
            "needs pages of several tokens, of which it drops some",
            "add --page-size 16",
        )
    if (getattr(server_args, "tp_size", 1) or 1) > 1:
        raise ConfigError(
            "--tiered-sparsity",
            "does not go with --tp-size above 1 yet",
            "leave one of the two out",
        )
    for name, (wanted, remedy) in _NEEDED.items():
        value = getattr(server_args, name, wanted)
        if value is not None and value != wanted:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                "--tiered-sparsity", f"does not go with {flag} {value!r} yet", remedy
            )
    # Where no device is named, the CPU platform switches it off.
    if getattr(server_args, "device", "cpu") == "cpu" and not getattr(
        server_args, "disable_overlap_schedule", True
    ):
        raise ConfigError(
            "--tiered-sparsity",
            "does not go with the overlap schedule yet",
            "add --disable-overlap-schedule",
        )


def refuse_device(device: str) -> None:
    """Refuse a device that sparse KV was not made for.

    Raises:
        ConfigError: it is not a CPU.
    """
    if device != "cpu":
        raise ConfigError(
            "--tiered-sparsity", f"runs on a CPU only, not on {device}", "leave it out"
        )


# Attention and the table of rows are ours on the CPU platform only, and what moves KV
# behind the scheduler's back was not tried. Speculation the tiers refuse themselves.
_NEEDED: dict[str, tuple[object, str]] = {
    "enable_mixed_chunk": (False, "leave that out"),
    "enable_dynamic_chunking": (False, "leave that out"),
    "enable_pdmux": (False, "leave that out"),
    "enable_two_batch_overlap": (False, "leave that out"),
    "enable_memory_saver": (False, "leave that out"),
    "prefill_only_disable_kv_cache": (False, "leave that out"),
}
_NOT_WITH: dict[str, tuple[object, str]] = {
    "layerkv": ("on", "leave one of the two out"),
    "write_policy": ("on-evict", "use write-through or selective"),
    "prefetch_to": ("device", "use host"),
}


def _share(value: object) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0.0 < value <= 1.0
    ):
        raise ConfigError(
            "--tiered-sparsity-keep",
            f"{value!r} is not a share to keep",
            "give a number above 0 and at most 1",
        )
    return float(value)
