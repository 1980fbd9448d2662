"""The settings of layer-wise KV, and what they do not go with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.sizes import parse_size
from sgl_tiered.engines.sglang.layered.activations.settings import (
    ActivationSettings,
    read_activations,
    read_weight_bytes,
)
from sgl_tiered.engines.sglang.own_pool import refuse_with_own_pool
from sgl_tiered.errors import ConfigError

__all__ = [
    "CUDA_ATTENTION",
    "LAYERKV_CHOICES",
    "STAGING_FAULT",
    "LayerKvSettings",
    "names_attention",
    "read_layerkv",
    "refuse_on_cuda",
    "refuse_with_layerkv",
]

LAYERKV_CHOICES: Mapping[str, tuple[str, ...]] = {
    "layerkv": ("off", "on"),
    "layerkv_decode": ("pause", "stream"),
    "layerkv_guard": ("auto", "off"),
}
STAGING_FAULT = "staging"
"""Word of ``--tiered-fault-corrupt`` that breaks streaming."""
_MAX_LAYERS = 1024
CUDA_ATTENTION = "flashinfer"
_ATTENTION_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)


@dataclass(frozen=True, slots=True)
class LayerKvSettings:
    """What a server with ``--tiered-layerkv on`` was told.

    Attributes:
        host_bytes: memory for the layers that are not on the device; 0 for four times
            the device's pool.
        decode: pause (requests whose layers are not on the device may wait for their
            turn) or stream (nobody waits; layers are streamed at every step).
        retain: layers of a prompt that stay on the device; None for as many as its
            prefill cannot hide the copies of.
        staging_bytes: device memory through which layers are streamed, of the pool's
            own; 0 for one that holds one layer of the longest context, twice.
        has_guard: copies give way to collectives, where both use one link.
        activations: of pages that are kept as activations; None for none.
        weight_bytes: of each layer, which cross the emulated link before it begins
            (benchmarks); 0 for none.
    """

    host_bytes: int = 0
    decode: str = "pause"
    retain: int | None = None
    staging_bytes: int = 0
    has_guard: bool = True
    activations: ActivationSettings | None = None
    weight_bytes: int = 0


def read_layerkv(settings: Mapping[str, Any]) -> LayerKvSettings | None:
    """Read the settings by flag name without ``--tiered-``; None where it is off.

    Raises:
        ConfigError: one sentence about the first setting that is wrong.
    """
    is_on = _choice(settings, "layerkv", "off") == "on"
    given = sorted(name for name in settings if name.startswith("layerkv_"))
    if given and not is_on:
        raise ConfigError(
            _flag(given[0]),
            "has no effect without layer-wise KV",
            "add --tiered-layerkv on",
        )
    activations = read_activations(settings)
    weight_bytes = read_weight_bytes(settings)
    if not is_on:
        return None
    return LayerKvSettings(
        host_bytes=_size(settings, "layerkv_host_size"),
        decode=_choice(settings, "layerkv_decode", "pause"),
        retain=_retain(settings.get("layerkv_retain", "auto")),
        staging_bytes=_size(settings, "layerkv_staging_size"),
        has_guard=_choice(settings, "layerkv_guard", "auto") == "auto",
        activations=activations,
        weight_bytes=weight_bytes,
    )


def refuse_with_layerkv(server_args: Any) -> None:
    """Refuse what layer-wise KV was not shown to work with.

    Raises:
        ConfigError: one sentence that names the other flag.
    """
    refuse_with_own_pool(
        "--tiered-layerkv",
        "needs pages of several tokens, as layers are placed by pages",
        server_args,
    )


def refuse_on_cuda(server_args: Any) -> None:
    """Refuse what layer-wise KV on CUDA was not made for.

    Args:
        server_args: as given, or SGLang's view of what it has made of them; what
            nobody has named yet is not refused.

    Raises:
        ConfigError: one sentence that says what to add.
    """
    device = getattr(server_args, "device", None)
    if device not in (None, "cuda"):
        raise ConfigError(
            "--tiered-layerkv",
            f"does not go with --device {device} where there is CUDA",
            "leave that out",
        )
    for phase in ("decode", "prefill"):
        backend = _graphs(server_args, phase)
        if backend != "disabled":
            raise ConfigError(
                "--tiered-layerkv",
                f"runs without CUDA graphs, and {phase} has {backend!r} ones",
                "add --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill "
                "disabled",
            )
    if not getattr(server_args, "disable_overlap_schedule", False):
        raise ConfigError(
            "--tiered-layerkv",
            "does not go with the overlap schedule yet",
            "add --disable-overlap-schedule",
        )
    for name in _ATTENTION_FIELDS:
        if getattr(server_args, name, None) not in (None, CUDA_ATTENTION):
            raise ConfigError(
                "--tiered-layerkv",
                "is made for FlashInfer on CUDA",
                f"add --attention-backend {CUDA_ATTENTION}",
            )


def names_attention(given: Mapping[str, Any]) -> bool:
    """Return whether the user has chosen an attention backend."""
    return any(given.get(name) is not None for name in _ATTENTION_FIELDS)


def _graphs(server_args: Any, phase: str) -> str:
    """Return which CUDA graphs a phase has: SGLang's word, or what the flags ask."""
    config = getattr(server_args, "cuda_graph_config", None)
    resolved = getattr(getattr(config, phase, None), "backend", None)
    if resolved is not None:
        return str(resolved)
    if config is not None:
        # Not read by SGLang yet, which overrules the flags below by it.
        return "disabled"
    named = getattr(server_args, f"cuda_graph_backend_{phase}", None)
    if named is not None:
        return str(named)
    switches = ("disable_cuda_graph", f"disable_{phase}_cuda_graph")
    is_off = any(getattr(server_args, name, False) for name in switches)
    return "disabled" if is_off else "default"


def _choice(settings: Mapping[str, Any], name: str, default: str) -> str:
    value = settings.get(name, default)
    if value not in LAYERKV_CHOICES[name]:
        raise ConfigError(
            _flag(name),
            f"{value!r} is unknown",
            f"use {', '.join(LAYERKV_CHOICES[name])}",
        )
    return str(value)


def _size(settings: Mapping[str, Any], name: str) -> int:
    """Return a size in bytes; 0 where it was not given."""
    value = settings.get(name)
    if value is None or value == "auto":
        return 0
    size = parse_size(_flag(name), value)
    if size == 0:
        raise ConfigError(_flag(name), "is 0", "give a size such as 4GB")
    return size


def _retain(value: object) -> int | None:
    if value == "auto":
        return None
    text = str(value)
    if not text.isdigit() or int(text) > _MAX_LAYERS:
        raise ConfigError(
            _flag("layerkv_retain"),
            f"{value!r} is not a number of layers",
            "give a whole number from 0, or auto",
        )
    return int(text)


def _flag(name: str) -> str:
    return "--tiered-" + name.replace("_", "-")
