"""The compared servers, and the link that makes a reload the larger part of TTFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reload.schedule import PAGE
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers, tiered_spec

__all__ = [
    "ALLOW",
    "ARMS",
    "COMPARED",
    "LOAD_POLICY",
    "LOAD_SHARE",
    "REFERENCE_POOL_TOKENS",
    "REFUSE",
    "Arm",
    "ModelFacts",
    "device_of",
    "link_bytes_per_s",
    "link_flag",
    "spec_of",
]

POOL_TOKENS = 4_096
"""Holds one prompt and not two, so that each has to come from below."""
REFERENCE_POOL_TOKENS = 32_768
HOST_TOKENS = 65_536
"""All that an arm ever computes: nothing is evicted from the host."""
LOAD_SHARE = 0.6
"""A dense reload takes this share of the time of computing the prefix: it is worth
while, and much longer than what a request takes besides."""
LOAD_POLICY = "always"
_KV_BYTES = 2
"""Of a number on the device: bfloat16."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A server, and what its requests allow.

    Attributes:
        name: in keys and tables.
        flags: of the tiers, beside what all have.
        wishes: ``custom_params`` of its requests for the tiers; None for none.
        is_sparse: drops tokens, and so reports the rows on the device.
    """

    name: str
    flags: tuple[str, ...] = ()
    wishes: Mapping[str, str] | None = None
    is_sparse: bool = False


ALLOW = {"lossy": "allow"}
REFUSE = {"lossy": "refuse"}


def _sparse(name: str, keep: float) -> Arm:
    flags = ("--tiered-sparsity=load", f"--tiered-sparsity-keep={keep}")
    return Arm(name, flags, ALLOW, is_sparse=True)


ARMS = (
    Arm("dense"),
    _sparse("at_50", 0.5),
    _sparse("at_25", 0.25),
    Arm("int4", ("--tiered-encoding=int4",), ALLOW),
)
COMPARED = ("dense", "at_50")
"""Measured in any case; others are left out where time is short."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's folder says of its shape.

    Attributes:
        num_layers: of the model.
        token_bytes: keys and values of a token over all layers.
        vocabulary: number of token ids.
    """

    num_layers: int
    token_bytes: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> ModelFacts:
        """Read ``config.json`` of a Llama and its like.

        Raises:
            KeyError: it lacks an entry.
            OSError: it cannot be read.
        """
        config = json.loads((folder / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        token_bytes = 2 * _KV_BYTES * layers * kv_heads * head_dim
        return cls(layers, token_bytes, config["vocab_size"])


def device_of(model: Path) -> Device:
    """Return the device level that all servers share."""
    return Device(model, POOL_TOKENS, PAGE, CPU_FLAGS)


def link_bytes_per_s(num_bytes: int, computed_s: float) -> float:
    """Return the link over which a dense reload takes ``LOAD_SHARE`` of computing.

    Args:
        num_bytes: of the prefix.
        computed_s: how long computing it takes on this machine.
    """
    return num_bytes / (LOAD_SHARE * computed_s)


def link_flag(bytes_per_s: float) -> str:
    """Return the link as ``--tiered-emulate`` takes it."""
    return f"host:bandwidth={bytes_per_s / 1e3:.0f}KB"


def spec_of(
    arm: Arm, device: Device, facts: ModelFacts, bytes_per_s: float
) -> ServerSpec:
    """Return how to start an arm's server."""
    flags = (
        f"--tiered-emulate={link_flag(bytes_per_s)}",
        f"--tiered-load-policy={LOAD_POLICY}",
        *arm.flags,
    )
    tiers = Tiers(HOST_TOKENS * facts.token_bytes)
    return tiered_spec(device, tiers, f"reload-{arm.name}", flags)
