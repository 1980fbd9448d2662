"""What `waiting.py` knows of one load, and what it asks of those who read from disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sgl_tiered.cache.load_report import LoadReport
from sgl_tiered.core.plans import Decision, LoadPlan

__all__ = ["Resume", "Staged", "StagedT", "Staging", "WaitingLoad"]

Int32s = npt.NDArray[np.int32]


class Staged(Protocol):
    """A read into staging memory."""

    @property
    def done(self) -> bool:
        """True once the read ended."""
        ...

    @property
    def arrived(self) -> Int32s:
        """Positions in the plan of the pages that have arrived and are good."""
        ...

    @property
    def num_left(self) -> int:
        """Pages still to come."""
        ...

    @property
    def num_unbegun(self) -> int:
        """Pages of it whose part of the read was not begun."""
        ...

    @property
    def started_s(self) -> float | None:
        """When it began; None before."""
        ...

    def turn_round(self) -> None:
        """Read what was not begun from its end on."""
        ...

    def cancel(self) -> None:
        """Leave out what was not begun."""
        ...


StagedT = TypeVar("StagedT", bound=Staged)


class Staging(Protocol[StagedT]):
    """Reads pages that cannot be read in place into rows of memory."""

    @property
    def largest_read_pages(self) -> int:
        """Pages that one read can have at most, when nothing else is staged."""
        ...

    @property
    def num_free_rows(self) -> int:
        """Rows that a read submitted now could have."""
        ...

    def try_submit(self, plan: LoadPlan, positions: Int32s) -> StagedT | None:
        """Start reading ``plan.addresses[positions]``; None if rows are short."""
        ...

    def release(self, staged: StagedT) -> None:
        """Give the rows back; during the read they are kept until it ends."""
        ...


@dataclass(frozen=True, slots=True)
class Resume:
    """How a split prompt goes on: load pages, then compute; or compute a few more.

    Attributes:
        load_pages: pages after the computed ones that can be loaded now.
        compute_pages: without a load, how many to compute next; 0 for all that is left.
    """

    load_pages: int = 0
    compute_pages: int = 0


@dataclass(slots=True, eq=False)
class WaitingLoad(Generic[StagedT]):
    """What is known of one request's load between its arrival and its end.

    Attributes:
        digest: namespace.
        tokens: int32 token ids of the prompt so far.
        max_pages: pages that may be reused (the last token is always computed).
        decision: the cache's last answer, where no plan is committed.
        plan: the committed load.
        staged: the read of the plan's disk pages, where it has any.
        waits: the read has to be waited for before anything is loaded.
        num_good: leading pages of the plan that can be loaded, once nothing ``waits``.
        bad_pages: indices into the plan whose bytes failed a check.
        is_split: the front is computed while the back is read.
        front: with ``is_split``, leading pages of the plan that are loaded first.
        compute_to: position in the plan at which the first pass over the front ends.
        back_from: position from which on the back is loaded; None before.
        patience_s: how long the read may be waited for.
        expected_s: when the read should have ended.
        give_up_at_s: when waiting for the read ends; None before it was waited for.
        ask_again_s: when the next look was asked for.
        waiting_since_s: when waiting for another request's load began.
        memory_only: the disk was given up for this request.
        started: a load to the device has begun.
        reason: one clause about the last decision, for reports.
        report: what was decided, and what came of it.
    """

    digest: bytes
    tokens: Int32s
    max_pages: int
    decision: Decision | None = None
    plan: LoadPlan | None = None
    staged: StagedT | None = None
    waits: bool = False
    num_good: int = 0
    bad_pages: list[int] = field(default_factory=list)
    is_split: bool = False
    front: int = 0
    compute_to: int = 0
    back_from: int | None = None
    patience_s: float = 0.0
    expected_s: float = 0.0
    give_up_at_s: float | None = None
    ask_again_s: float = -1.0
    waiting_since_s: float | None = None
    memory_only: bool = False
    started: bool = False
    reason: str = ""
    report: LoadReport = field(default_factory=LoadReport)

    @property
    def has_plan(self) -> bool:
        """Whether a load of its own is committed."""
        return self.plan is not None
