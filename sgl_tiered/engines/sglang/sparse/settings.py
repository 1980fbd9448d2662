"""The settings of sparse KV, and what it does not go with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_tiered.engines.sglang.own_pool import refuse_with_own_pool
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.sparsity.profile import SparsityProfile
from sgl_tiered.policies.sparsity.registry import SELECTIONS

__all__ = [
    "KEEP_FAULT",
    "SPARSITY_CHOICES",
    "SparsitySettings",
    "read_sparsity",
    "refuse_device",
    "refuse_other_model",
    "refuse_with_sparsity",
]

SPARSITY_CHOICES: Mapping[str, tuple[str, ...]] = {
    "sparsity": ("off", "load", "store"),
    "sparsity_policy": SELECTIONS,
}
KEEP_FAULT = "keep"
"""Word of ``--tiered-fault-corrupt`` that keeps the wrong tokens."""
DEFAULT_KEEP = 0.5
DEFAULT_POLICY = "car"
DEFAULT_QUERIES = 512
"""Of 2,048 new tokens (one layer, 8 heads of 64, one thread of a busy machine) asking
all took 1.8 times as long as their attention, 512 of them 0.4 times, 128 0.2 times. Of
the half that all rank best, on random keys, 512 found 96 %, and 128 78 %."""
MIN_QUERIES = 128


@dataclass(frozen=True, slots=True)
class SparsitySettings:
    """What a server with ``--tiered-sparsity load`` or ``store`` was told.

    Attributes:
        keep: share of all layers' tokens that a load brings to the device.
        policy: who selects the tokens.
        profile: of the model, for ratios by layer; None for none.
        budget: instead of ``keep``, the share of long-range attention that may be lost;
            None where ``keep`` counts.
        queries: of a pass of a prefill, how many are asked at most what they read.
        on_store: the others are left out when pages are offloaded already.
    """

    keep: float = DEFAULT_KEEP
    policy: str = DEFAULT_POLICY
    profile: SparsityProfile | None = None
    budget: float | None = None
    queries: int = DEFAULT_QUERIES
    on_store: bool = False

    def tokens_of(self, page_tokens: int) -> int:
        """Return how many tokens of each page are stored, where some are left out."""
        return math.ceil(self.keep * page_tokens - 1e-9)


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
    if mode == "off":
        for name in _OWN:
            if settings.get(name) is not None:
                raise ConfigError(
                    _flag(name),
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
    policy = settings.get("sparsity_policy", DEFAULT_POLICY)
    if policy not in SELECTIONS:
        raise ConfigError(
            "--tiered-sparsity-policy",
            f"{policy!r} is unknown",
            f"use {', '.join(SELECTIONS)}",
        )
    keep, budget = _keep(settings), _budget(settings)
    if mode == "store":
        _refuse_on_store(settings, policy)
    return SparsitySettings(
        keep, policy, _profile(settings), budget, _queries(settings), mode == "store"
    )


def refuse_other_model(
    profile: SparsityProfile,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    fingerprint: str,
) -> None:
    """Refuse a profile of another model than the server's.

    Args:
        profile: as read from its file.
        num_layers, num_heads, num_kv_heads: of the server's model.
        fingerprint: of its architecture, weights and engine.

    Raises:
        ConfigError: one sentence that says what differs.
    """
    flag, name = "--tiered-sparsity-profile", profile.model or "another model"
    for what, theirs, ours in (
        ("layers", profile.num_layers, num_layers),
        ("query heads", profile.num_heads, num_heads),
        ("KV heads", profile.num_kv_heads, num_kv_heads),
    ):
        if theirs != ours:
            raise ConfigError(
                flag,
                f"is of {name} with {theirs} {what}, and the server's model has {ours}",
                _NEW_PROFILE,
            )
    # An empty one is not known.
    if profile.fingerprint and profile.fingerprint != fingerprint:
        engine = f" ({profile.engine})" if profile.engine else ""
        raise ConfigError(
            flag,
            f"is of {name}, whose weights, configuration or engine{engine} differ from "
            "the server's by their digest",
            _NEW_PROFILE,
        )


def refuse_with_sparsity(server_args: Any) -> None:
    """Refuse what sparse KV was not shown to work with.

    Raises:
        ConfigError: one sentence that names the other flag.
    """
    refuse_with_own_pool(
        "--tiered-sparsity",
        "needs pages of several tokens, of which it drops some",
        server_args,
    )
    if (getattr(server_args, "tp_size", 1) or 1) > 1:
        raise ConfigError(
            "--tiered-sparsity",
            "does not go with --tp-size above 1 yet",
            "leave one of the two out",
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


_NOT_WITH: dict[str, tuple[object, str]] = {
    "layerkv": ("on", "leave one of the two out"),
    "write_policy": ("on-evict", "use auto, write-through or selective"),
    "prefetch_to": ("device", "use host"),
}

_OWN = tuple(
    f"sparsity_{name}" for name in ("keep", "policy", "profile", "budget", "queries")
)
"""What has no effect without sparse KV."""
_NEW_PROFILE = "measure this model with sgl-tiered profile"


# Within a page, the other selections have no say: they weigh tokens of a prefix.
_ON_STORE = ("car", "car-uniform")


def _refuse_on_store(settings: Mapping[str, Any], policy: str) -> None:
    if policy not in _ON_STORE:
        raise ConfigError(
            "--tiered-sparsity-policy",
            f"{policy} does not go with --tiered-sparsity store: it chooses in pages",
            f"use {' or '.join(_ON_STORE)}, or --tiered-sparsity load",
        )
    for name in ("sparsity_profile", "sparsity_budget"):
        if settings.get(name) is not None:
            raise ConfigError(
                _flag(name),
                "does not go with --tiered-sparsity store, which keeps as many tokens "
                "of every layer",
                "use --tiered-sparsity-keep, or --tiered-sparsity load",
            )


def _flag(name: str) -> str:
    return f"--tiered-{name.replace('_', '-')}"


def _keep(settings: Mapping[str, Any]) -> float:
    value = settings.get("sparsity_keep")
    if value is None:
        return DEFAULT_KEEP
    if not _is_number(value) or not 0.0 < value <= 1.0:
        raise ConfigError(
            "--tiered-sparsity-keep",
            f"{value!r} is not a share to keep",
            "give a number above 0 and at most 1",
        )
    return float(value)


def _budget(settings: Mapping[str, Any]) -> float | None:
    flag, value = "--tiered-sparsity-budget", settings.get("sparsity_budget")
    if value is None:
        return None
    if not _is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError(
            flag,
            f"{value!r} is not a share of attention to lose",
            "give a number from 0 to below 1",
        )
    if settings.get("sparsity_keep") is not None:
        raise ConfigError(
            flag,
            "and --tiered-sparsity-keep both say how much is kept",
            "give one of the two",
        )
    if settings.get("sparsity_profile") is None:
        raise ConfigError(
            flag,
            "needs a profile to know what the model's layers lose",
            "add --tiered-sparsity-profile FILE, which sgl-tiered profile writes",
        )
    return float(value)


def _profile(settings: Mapping[str, Any]) -> SparsityProfile | None:
    """Read the file; whether it is of the model is seen when that is loaded."""
    value = settings.get("sparsity_profile")
    if value is None:
        return None
    try:
        return SparsityProfile.load(Path(str(value)).expanduser())
    except ConfigError as error:
        raise ConfigError(
            "--tiered-sparsity-profile", error.problem, error.remedy
        ) from None


def _queries(settings: Mapping[str, Any]) -> int:
    value = settings.get("sparsity_queries")
    if value is None:
        return DEFAULT_QUERIES
    if not isinstance(value, int) or isinstance(value, bool) or value < MIN_QUERIES:
        raise ConfigError(
            "--tiered-sparsity-queries",
            f"{value!r} is no number of queries to ask",
            f"give a whole number from {MIN_QUERIES}",
        )
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
