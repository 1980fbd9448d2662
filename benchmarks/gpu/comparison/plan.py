"""What is measured, in which order: cells, and the servers that run for them.

Servers run one after the other, each system's more than once: in one order, and then in
the opposite one, so that drift of the machine, and what one leaves behind for the next,
falls on all alike. The first one is plain SGLang's: it says how large the device pool
is, and its answers are what the others' are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from comparison.settings import Model, Sizes
from comparison.systems import (
    DISK,
    GATE,
    LOADS,
    NO_REUSE,
    PLAIN,
    SYSTEMS,
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
        start: of the system's server, from 0.
        case: a length in tokens, or the number of a repeat.
    """

    system: str
    part: str
    start: int = 0
    case: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.system}.{self.part}.{self.case}.{self.start}"


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a system's server, and what is measured while it runs."""

    system: str
    start: int
    cells: tuple[Cell, ...]


def num_prompts(length: int, pool_tokens: int) -> int:
    """Return how many prompts of a length push each other out of the device pool.

    Between two uses of one, all the others pass: more than the pool holds.
    """
    return pool_tokens // length + 2


def lengths_that_fit(
    lengths: Sequence[int], model: Model, pool_tokens: int, host_bytes: int
) -> tuple[list[int], dict[str, str]]:
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
            why = f"the context has {model.context_tokens:,} tokens"
        elif 2 * length > pool_tokens:
            why = f"the device pool has {pool_tokens:,} tokens"
        elif every > _HOST_SHARE * host_bytes:
            why = (
                f"so many prompts that the device loses each are {every / 1e9:.1f} GB, "
                f"and host memory has {host_bytes / 1e9:.1f} GB"
            )
        else:
            fit.append(length)
            continue
        left_out[f"{length:,}"] = why
    return fit, left_out


def plan(systems: Sequence[str], lengths: Sequence[int], sizes: Sizes) -> list[Session]:
    """Return the servers' starts, in order.

    Args:
        systems: by name, in the order in which they are wanted; plain goes first.
        lengths: of hits.
        sizes: how much.
    """
    there = sorted(systems, key=lambda name: name != PLAIN)
    return [
        Session(name, start, tuple(_cells(name, start, lengths, sizes)))
        for start in range(sizes.starts)
        for name in (there if start % 2 == 0 else there[::-1])
    ]


def _cells(
    name: str, start: int, lengths: Sequence[int], sizes: Sizes
) -> Iterable[Cell]:
    """Return what is measured in one start; the gate comes before all that is timed.

    Plain's second start answers the gate's prompts once more: whether it gives the same
    bits twice is what may be asked of the others.
    """
    parts = SYSTEMS[name].parts
    if start == 0 or (name == PLAIN and start == 1):
        yield Cell(name, GATE, start)
    if NO_REUSE in parts:
        yield Cell(name, NO_REUSE, start)
    for part in (TTFT, DISK):
        if part in parts:
            yield from (Cell(name, part, start, length) for length in lengths)
    if LOADS in parts:
        for repeat in range(sizes.load_repeats):
            yield from (Cell(name, load, start, repeat) for load in LOAD_NAMES)
