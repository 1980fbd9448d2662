"""How a transfer's end reaches the engine's thread: as a value in a queue.

Workers post from their threads; the engine drains on its own, between forwards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import (
    DemotePlan,
    LoadPlan,
    OffloadPlan,
    PromotePlan,
    TransferResult,
)

if TYPE_CHECKING:
    from sgl_tiered.pipelines.layerwise_load import LoadTicket
    from sgl_tiered.pipelines.staging import StagedRead

__all__ = [
    "Completion",
    "CompletionQueue",
    "DemoteFinished",
    "LoadFigures",
    "LoadFinished",
    "OffloadFinished",
    "PromoteFinished",
    "SlotsReady",
    "StageFinished",
]


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What the copies of a load tell of the tiers that it came from.

    Attributes:
        moved: bytes, and seconds of the copies, by the tier they lay in.
        sources: the tiers read in place; staging memory is none.
        failed: the one whose copy failed; None where none did.
    """

    moved: Mapping[TierId, tuple[int, float]]
    sources: frozenset[TierId]
    failed: TierId | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadFinished:
    """The jobs of one ``LayerwiseLoader.submit`` ended together.

    Attributes:
        ticket: the ticket that ``submit`` returned.
        plans: the plans of its jobs.
        landed: True if every layer of every job arrived.
        num_bytes: bytes copied to the device.
        seconds: that the copies took.
        error: one sentence, empty if landed.
        figures: of the tiers.
    """

    ticket: LoadTicket
    plans: tuple[LoadPlan, ...]
    landed: bool
    num_bytes: int
    seconds: float
    error: str
    figures: LoadFigures

    @property
    def stall_s(self) -> float:
        """Seconds that the model has waited for layers of this load so far."""
        return self.ticket.stall_s


@dataclass(frozen=True, slots=True, eq=False)
class StageFinished:
    """A read into the staging region ended.

    Attributes:
        plan: as given to ``try_submit``.
        positions: int32 [n], the pages of the plan that were read.
        staged: the handle that ``try_submit`` returned.
        result: one element per position.
    """

    plan: LoadPlan
    positions: npt.NDArray[np.int32]
    staged: StagedRead
    result: TransferResult


@dataclass(frozen=True, slots=True, eq=False)
class OffloadFinished:
    """A copy from the device to a memory tier ended."""

    plan: OffloadPlan
    result: TransferResult


@dataclass(frozen=True, slots=True, eq=False)
class DemoteFinished:
    """A copy to a slower tier ended; ``result.checksums`` are the target's."""

    plan: DemotePlan
    result: TransferResult


@dataclass(frozen=True, slots=True, eq=False)
class PromoteFinished:
    """A read into a memory tier ended, whole, in part or not at all.

    Attributes:
        plan: as submitted.
        positions: int32 [n], the pages of the plan that were read.
        result: one element per position; its seconds are those of the reads alone.
        is_alone: no other read shared the link.
    """

    plan: PromotePlan
    positions: npt.NDArray[np.int32]
    result: TransferResult
    is_alone: bool


@dataclass(frozen=True, slots=True)
class SlotsReady:
    """The slots of a memory tier below this number may be used from now on."""

    tier: TierId
    num_slots: int


Completion = (
    LoadFinished
    | StageFinished
    | OffloadFinished
    | DemoteFinished
    | PromoteFinished
    | SlotsReady
)


class CompletionQueue:
    """Unbounded and thread-safe: many post, one drains."""

    def __init__(self) -> None:
        self._queue: deque[Completion] = deque()
        self._arrived = threading.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, completion: Completion) -> None:
        """Append a completion; from any thread."""
        self._queue.append(completion)
        self._arrived.set()

    def drain(self) -> list[Completion]:
        """Take all completions, oldest first; cheap when there is none."""
        if not self._queue:
            return []
        # Cleared first: a post during the loop is either taken by it or sets it again.
        self._arrived.clear()
        taken = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until something can be drained; return False after the timeout."""
        return bool(self._queue) or self._arrived.wait(timeout_s)
