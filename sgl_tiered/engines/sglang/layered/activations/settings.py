"""The settings of activations, and what they do not go with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError
from sgl_tiered.testing.emulation import Emulation

__all__ = [
    "FLAG",
    "ActivationSettings",
    "read_activations",
    "read_weight_bytes",
    "refuse_weights",
    "refuse_with_activations",
]

FLAG = "--tiered-activations"
_SIZE_FLAG = "--tiered-activations-device-size"
_WEIGHTS_FLAG = "--tiered-emulate-weights"
# They change weights per request, or what a projection is given, behind our back.
_UNTRIED = (
    "enable_lora",
    "lora_paths",
    "enable_torch_compile",
    "quantization",
)


@dataclass(frozen=True, slots=True)
class ActivationSettings:
    """What a server with ``--tiered-activations`` was told.

    Attributes:
        share: of a request's full pages that are kept as activations, above 0 and up
            to 1; None for what is best, or none at all (auto).
        device_bytes: of the device's memory for activations; 0 for as much as staging,
            open pages and a prefill's pages need.
    """

    share: float | None
    device_bytes: int = 0


def read_activations(settings: Mapping[str, Any]) -> ActivationSettings | None:
    """Read the settings by flag name without ``--tiered-``; None where all is KV.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    value = settings.get("activations", "off")
    size = settings.get("activations_device_size")
    # TOML knows numbers; a share of 0 is nothing to be built for.
    share = None if value == "auto" else _share(value)
    if share == 0.0:
        if size is not None:
            raise ConfigError(
                _SIZE_FLAG, "has no effect without activations", f"add {FLAG} auto"
            )
        return None
    if settings.get("layerkv", "off") != "on":
        raise ConfigError(
            FLAG,
            "keeps single layers, which only layer-wise KV does",
            "add --tiered-layerkv on",
        )
    device_bytes = 0
    if size not in (None, "auto"):
        device_bytes = parse_size(_SIZE_FLAG, size)
        if device_bytes == 0:
            raise ConfigError(_SIZE_FLAG, "is 0", "give a size such as 256MB, or auto")
    return ActivationSettings(share, device_bytes)


def read_weight_bytes(settings: Mapping[str, Any]) -> int:
    """Return the emulated bytes of weights per layer and forward; 0 for none.

    Whether there is an emulated link for them is for ``refuse_weights`` to see.

    Raises:
        ConfigError: there is no layer-wise KV, whose link they take, or no size.
    """
    value = settings.get("emulate_weights")
    if value is None:
        return 0
    if settings.get("layerkv", "off") != "on":
        raise ConfigError(
            _WEIGHTS_FLAG,
            "stands for weights on the link that layers of KV take",
            "add --tiered-layerkv on",
        )
    num_bytes = parse_size(_WEIGHTS_FLAG, value)
    if num_bytes == 0:
        raise ConfigError(_WEIGHTS_FLAG, "is 0", "give the bytes of a layer's weights")
    return num_bytes


def refuse_weights(weight_bytes: int, emulate: Sequence[Emulation]) -> None:
    """Refuse emulated weights without an emulated link.

    Raises:
        ConfigError: they have none.
    """
    links = [one for one in emulate if TierId.HOST in one.tiers and one.has_link]
    if weight_bytes and not links:
        raise ConfigError(
            _WEIGHTS_FLAG,
            "needs an emulated link of the host tier",
            "add --tiered-emulate host:bandwidth=...",
        )


def refuse_with_activations(
    server_args: Any, device: str, settings: ActivationSettings
) -> None:
    """Refuse what activations were not shown to work with.

    Args:
        server_args: as given; what nobody has named is not refused.
        device: that SGLang runs on.
        settings: what the server was told of activations.

    Raises:
        ConfigError: one sentence that names what is in the way.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            FLAG, f"is made for CPUs and CUDA, and not for {device}", "leave it out"
        )
    if device == "cuda" and (getattr(server_args, "tp_size", 1) or 1) > 1:
        raise ConfigError(
            FLAG,
            "does not go with --tp-size above 1 on CUDA yet",
            "leave one of the two out",
        )
    for name in _UNTRIED:
        if getattr(server_args, name, None):
            raise ConfigError(
                FLAG,
                f"does not go with --{name.replace('_', '-')} yet",
                "leave one of the two out",
            )
    if (getattr(server_args, "offload_group_size", None) or 0) > 0:
        raise ConfigError(
            FLAG,
            "does not go with --offload-group-size, which SGLang has for the experts "
            "of models whose KV is no K and V",
            "use --cpu-offload-gb, or leave one of the two out",
        )


def _share(value: object) -> float:
    """Return the share that a text or a number says; 0 for off."""
    if value == "off":
        return 0.0
    try:
        share = float(str(value))
    except ValueError:
        share = -1.0
    # Not "< 0": nan is no share either.
    if not 0.0 <= share <= 1.0:
        raise ConfigError(
            FLAG,
            f"{value!r} is neither a share nor a word",
            "give a number from 0 to 1, off or auto",
        )
    return share
