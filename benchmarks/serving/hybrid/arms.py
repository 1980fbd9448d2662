"""The compared servers: the same model, device pool and host bytes, one OMP thread.

KV-only is our own engine: layer-wise KV that streams at every step, without
activations. The device's pool is so small that nearly all context is streamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sgl_tiered_workloads.model import ModelPreset
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.systems import CPU_FLAGS, Device, Tiers, tiered_spec
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = [
    "ARMS",
    "HALF_PAGES",
    "ITEM_BYTES",
    "MODEL",
    "PAGE",
    "TOKEN_BYTES",
    "Arm",
    "Link",
    "Scale",
    "batch_of",
    "question",
    "resident_spec",
    "spec_of",
]

PAGE = 16
ITEM_BYTES = 4
MODEL = ModelPreset(
    num_layers=12, hidden=512, num_heads=8, num_kv_heads=8, intermediate=1344
)
"""MHA, 40 M parameters with 8,192 words; served in float32."""
TOKEN_BYTES = 2 * MODEL.hidden * ITEM_BYTES
"""K and V of a token in one layer; as an activation it has half."""
POOL_TOKENS = 1_536
"""Of the device. Staging takes a third of it, and activations their part, so that a few
per cent of the batch's context find room beside them."""
HALF_PAGES = 184
"""Of the staging memory: a prefix with its question, or two prompts."""
CHUNK_TOKENS = 1_024
_SLACK_TOKENS = 512
_HOST_BYTES = 32_000_000
"""Of the tier below the region, which nothing here reaches."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A server.

    Attributes:
        name: in keys and tables.
        activations: what ``--tiered-activations`` is told.
        calibration: the server's file; None for none.
    """

    name: str
    activations: str
    calibration: Path | None = None


ARMS = {
    "kv_only": Arm("kv_only", "off"),
    "act_only": Arm("act_only", "1.0"),
    "hybrid": Arm("hybrid", "auto"),
}


@dataclass(frozen=True, slots=True)
class Link:
    """The emulated link between host and device; each direction has all of it.

    Attributes:
        bytes_per_s: 0 for none emulated.
        weight_bytes: of a layer's weights, at each forward; 0 for none.
    """

    bytes_per_s: float = 0.0
    weight_bytes: int = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the server's flags."""
        if not self.bytes_per_s:
            return ()
        rate = f"{self.bytes_per_s / 1e3:.0f}KB"
        flags = [
            f"--tiered-emulate=host:read-bandwidth={rate},write-bandwidth={rate}",
        ]
        if self.weight_bytes:
            flags.append(f"--tiered-emulate-weights={self.weight_bytes}")
        return tuple(flags)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        num_requests: of the batch.
        shortest, longest: prompts, in tokens; the others lie between.
        answer: tokens of each answer.
        repeats: servers of each arm.
        prefixes: that are reloaded in turn.
        prefix_tokens: of each.
        reloads: that count, on each server.
        pairs: of runs without an emulated link.
    """

    num_requests: int = 10
    shortest: int = 768
    longest: int = 1_536
    answer: int = 24
    repeats: int = 2
    prefixes: int = 5
    prefix_tokens: int = 2_880
    reloads: int = 20
    pairs: int = 6

    @property
    def prompts(self) -> tuple[int, ...]:
        """Lengths of the batch's prompts."""
        lengths = np.linspace(self.shortest, self.longest, self.num_requests)
        return tuple(int(length) for length in lengths.round())

    @property
    def batch_tokens(self) -> int:
        """What the batch has in the end."""
        return sum(self.prompts) + self.num_requests * self.answer

    @property
    def contexts(self) -> tuple[int, ...]:
        """Of each request, half way through its answer."""
        return tuple(length + self.answer // 2 for length in self.prompts)

    @property
    def prefix_room(self) -> int:
        """Tokens of all prefixes, with what was asked."""
        per_prefix = self.reloads // self.prefixes + 2
        return self.prefixes * (self.prefix_tokens + per_prefix * 4 * PAGE)


def batch_of(scale: Scale, generator: np.random.Generator) -> list[PlannedRequest]:
    """Return requests that share nothing, for one message."""
    return [
        PlannedRequest(
            f"b{number}", random_tokens(generator, length, VOCAB_TOKENS), scale.answer
        )
        for number, length in enumerate(scale.prompts)
    ]


def question(
    prefix: tuple[int, ...], generator: np.random.Generator, key: str
) -> PlannedRequest:
    """Return a prefix with a page of its own behind it, and one token to answer.

    A second one would stream the prefix once more.
    """
    tail = random_tokens(generator, PAGE, VOCAB_TOKENS)
    return PlannedRequest(key, (*prefix, *tail), 1)


def spec_of(
    arm: Arm, model: Path, scale: Scale, link: Link, *, reloads: bool = False
) -> ServerSpec:
    """Return how to start an arm's server.

    Args:
        arm: which.
        model: its folder.
        scale: of the batch; the host region holds it, and a little more.
        link: emulated or not.
        reloads: the region is to hold the prefixes as well.
    """
    tokens = scale.batch_tokens + _SLACK_TOKENS
    if reloads:
        tokens += scale.prefix_room
    return _spec(arm, model, scale, tokens, POOL_TOKENS, HALF_PAGES, link)


def resident_spec(model: Path, scale: Scale) -> ServerSpec:
    """Return a server that holds the batch on the device: what a step computes."""
    tokens = 2 * (scale.batch_tokens + _SLACK_TOKENS)
    arm = Arm("resident", "off")
    return _spec(arm, model, scale, tokens, tokens, HALF_PAGES, Link())


def _spec(
    arm: Arm,
    model: Path,
    scale: Scale,
    region_tokens: int,
    pool_tokens: int,
    half_pages: int,
    link: Link,
) -> ServerSpec:
    device = Device(
        model,
        pool_tokens,
        PAGE,
        (
            *CPU_FLAGS,
            "--dtype=float32",
            f"--max-running-requests={scale.num_requests}",
            f"--chunked-prefill-size={CHUNK_TOKENS}",
        ),
    )
    # One page more than its rows: the spare one.
    region = (region_tokens // PAGE + 2) * PAGE * TOKEN_BYTES * MODEL.num_layers
    staging = 2 * half_pages * PAGE * TOKEN_BYTES
    flags = (
        "--tiered-layerkv=on",
        "--tiered-layerkv-decode=stream",
        "--tiered-layerkv-retain=" + ("auto" if arm.name == "resident" else "0"),
        f"--tiered-layerkv-host-size={region}",
        f"--tiered-layerkv-staging-size={staging}",
        "--tiered-load-policy=always",
        *_activations(arm),
        *link.flags,
    )
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return tiered_spec(device, Tiers(_HOST_BYTES), arm.name, flags, env)


def _activations(arm: Arm) -> tuple[str, ...]:
    if arm.activations == "off":
        return ()
    flags = (f"--tiered-activations={arm.activations}",)
    if arm.calibration is not None:
        flags += (f"--tiered-calibration={arm.calibration}",)
    return flags
