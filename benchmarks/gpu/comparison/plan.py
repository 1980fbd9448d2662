"""What is measured, in which order: cells, and the servers that run for them.

Servers run one after the other. The first one is plain SGLang's: it says how large the
device pool is, and its answers are what the others' are compared with. Runs without
reuse go plain, ours, ours, plain, so that drift of the machine falls on both alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from comparison.settings import Model, Sizes
from comparison.systems import (
    DISK,
    GATE,
    LOADS,
    NO_REUSE,
    PLAIN,
    SYSTEMS,
    TIERED,
    TTFT,
)

__all__ = ["LOAD_NAMES", "Cell", "Session", "lengths_that_fit", "num_prompts", "plan"]

LOAD_NAMES = ("shared_prefix", "multi_turn")
_HOST_SHARE = 0.95
"""Of the host memory, that prompts of one length may fill."""
_MARGIN_TOKENS = 128
"""Of a hit's prompt and answer, over the hit."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured in one piece, and written down as soon as it is.

    Attributes:
        system: of whom.
        part: what: ``gate``, ``ttft``, ``disk``, ``noreuse``, or a load.
        case: a length in tokens, or the number of a run.
    """

    system: str
    part: str
    case: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.system}.{self.part}.{self.case}"


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a system's server, and what is measured while it runs."""

    system: str
    cells: tuple[Cell, ...]


def num_prompts(length: int, pool_tokens: int) -> int:
    """Return how many prompts of a length push each other out of the device pool.

    Between two uses of one, all the others pass: more than the pool holds.
    """
    return pool_tokens // length + 2


def lengths_that_fit(
    lengths: Sequence[int], model: Model, pool_tokens: int, host_bytes: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the lengths that can be measured, and why the others cannot.

    Args:
        lengths: that are wanted.
        model: with its context.
        pool_tokens: of the device.
        host_bytes: of host memory.
    """
    fit, left_out = [], {}
    for length in lengths:
        every = num_prompts(length, pool_tokens) * length * model.token_bytes
        if length + _MARGIN_TOKENS > model.context_tokens:
            left_out[length] = f"the context has {model.context_tokens:,} tokens"
        elif 2 * length > pool_tokens:
            left_out[length] = f"the device pool has {pool_tokens:,} tokens"
        elif every > _HOST_SHARE * host_bytes:
            left_out[length] = (
                f"so many prompts that the device loses each are {every / 1e9:.1f} GB, "
                f"and host memory has {host_bytes / 1e9:.1f} GB"
            )
        else:
            fit.append(length)
    return tuple(fit), left_out


def plan(systems: Sequence[str], lengths: Sequence[int], sizes: Sizes) -> list[Session]:
    """Return the servers' starts, in order; what follows each other is one start.

    Args:
        systems: by name, in the order in which they are wanted; plain goes first.
        lengths: of hits.
        sizes: how much.
    """
    ordered = sorted(systems, key=lambda name: name != PLAIN)
    cells: list[Cell] = []
    if PLAIN in ordered:
        cells += _own(PLAIN, lengths, sizes)
        if TIERED in ordered:
            cells += _no_reuse(sizes.blocks)
    for name in ordered:
        if name != PLAIN:
            cells += _own(name, lengths, sizes)
    return [
        Session(name, tuple(group))
        for name, group in groupby(cells, key=lambda cell: cell.system)
    ]


def _own(name: str, lengths: Sequence[int], sizes: Sizes) -> Iterable[Cell]:
    """Return all that is measured of a system by itself."""
    parts = SYSTEMS[name].parts
    if GATE in parts:
        yield Cell(name, GATE)
    for part in (TTFT, DISK):
        if part in parts:
            yield from (Cell(name, part, length) for length in lengths)
    if LOADS in parts:
        for repeat in range(sizes.load_repeats):
            yield from (Cell(name, load, repeat) for load in LOAD_NAMES)


def _no_reuse(blocks: int) -> Iterable[Cell]:
    """Return cells in the order plain, ours, ours, plain; equal cases are a pair.

    Plain's second start answers the gate's prompts once more: whether it gives the same
    bits twice is what may be asked of the others.
    """
    for block in range(blocks):
        first, second = 2 * block, 2 * block + 1
        yield Cell(PLAIN, NO_REUSE, first)
        yield Cell(TIERED, NO_REUSE, first)
        yield Cell(TIERED, NO_REUSE, second)
        yield Cell(PLAIN, NO_REUSE, second)
        if block == 0:
            yield Cell(PLAIN, GATE, 1)
