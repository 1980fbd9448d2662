"""What a rank sees of its transfers: its own, or what all ranks see of theirs.

The pipelines of each rank end in their own time. Where there are several ranks, a
transfer has ended for the cache when it has ended on all of them: a page has arrived if
it has on every rank, is bad if it is on any, the time is the slowest rank's. Before
that nobody knows of its progress, and room in the pipelines' queues and in the staging
memory comes back with the common end, so that all ranks are refused alike. A pipeline
itself has room by then, since its own transfer has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from sgl_tiered.cache.prefetcher import Read, Reader
from sgl_tiered.cache.waiting_state import Staging
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Int32s, LoadPlan, PromotePlan, TransferResult
from sgl_tiered.errors import RanksPartedError
from sgl_tiered.pipelines.completions import (
    Completion,
    CompletionQueue,
    DemoteFinished,
    LoadFigures,
    LoadFinished,
    OffloadFinished,
    PromoteFinished,
    SlotsReady,
    StageFinished,
)
from sgl_tiered.pipelines.layerwise_load import LoadTicket
from sgl_tiered.pipelines.offload import MAX_QUEUED as MAX_OFFLOADS
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.promote import MAX_QUEUED as MAX_PROMOTIONS
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.pipelines.staging import StagedRead, StagingReader
from sgl_tiered.serving.agreement import Agreement

__all__ = ["SharedTransfers", "Transfers", "make_transfers"]

_STUCK_S = 5.0
"""After so long without a thread that could read, the disk is left out of lookups."""
_TOLD_S = 1.0
"""A store that moves bytes more often is not spoken of."""


class Transfers(Protocol):
    """The ends of a rank's transfers, and those who read from the disk for it."""

    @property
    def stager(self) -> Staging[StagedRead] | None:
        """Reads into staging memory; None without a disk."""
        ...

    @property
    def promoter(self) -> Reader | None:
        """Reads ahead of need; None where nobody does."""
        ...

    @property
    def takes_offload(self) -> bool:
        """Whether another offload may be submitted."""
        ...

    @property
    def is_stuck(self) -> bool:
        """Whether reads of the disk do not end."""
        ...

    @property
    def store_stuck_s(self) -> float:
        """Seconds since the store that runs has moved a byte; 0 if none runs."""
        ...

    def take(self) -> Sequence[Completion]:
        """Return the transfers that have ended since the last call."""
        ...

    def submitted_offload(self) -> None:
        """Note that an offload was submitted."""
        ...

    def queued(self, ticket: LoadTicket) -> bool:
        """Wait until a load to the device is there or queued; False if it failed.

        Where nothing of it is only queued it has landed then.
        """
        ...

    def landed(self, ticket: LoadTicket) -> bool:
        """Wait for a load to the device; return whether it landed."""
        ...


def make_transfers(
    agreement: Agreement,
    completions: CompletionQueue,
    offloader: OffloadWorker,
    stager: StagingReader | None,
    promoter: PromoteWorker | None,
) -> Transfers:
    """Return what fits the number of ranks.

    Args:
        agreement: between the ranks.
        completions: where the pipelines post.
        offloader: stores what is on the device.
        stager, promoter: read from the disk; None where there are none.
    """
    if agreement.is_shared:
        return SharedTransfers(agreement, completions, offloader, stager, promoter)
    return _OwnTransfers(completions, offloader, stager, promoter)


class _OwnTransfers:
    """Those of a rank that is alone: what the pipelines say."""

    def __init__(
        self,
        completions: CompletionQueue,
        offloader: OffloadWorker,
        stager: StagingReader | None,
        promoter: PromoteWorker | None,
    ) -> None:
        self.take = completions.drain
        self._offloader = offloader
        self.stager: Staging[StagedRead] | None = stager
        self.promoter: Reader | None = promoter
        self.takes_offload = True
        self._readers = [r for r in (stager, promoter) if r is not None]

    @property
    def is_stuck(self) -> bool:
        """Whether reads of the disk do not end."""
        return any(reader.stuck_s() > _STUCK_S for reader in self._readers)

    @property
    def store_stuck_s(self) -> float:
        """Seconds since the store that runs has moved a byte; 0 if none runs."""
        return self._offloader.stuck_s()

    def submitted_offload(self) -> None:
        """Take no note: the pipeline counts."""

    def queued(self, ticket: LoadTicket) -> bool:
        """Wait until a load to the device is there or queued; False if it failed."""
        return ticket.wait_queued()

    def landed(self, ticket: LoadTicket) -> bool:
        """Wait for a load to the device; return whether it landed."""
        return ticket.wait()


class SharedTransfers:
    """Those that have ended on all ranks; see the module's docstring.

    Args:
        agreement: between the ranks.
        completions: of this rank's pipelines.
        offloader: of this rank.
        stager, promoter: of this rank; None where there are none.
    """

    def __init__(
        self,
        agreement: Agreement,
        completions: CompletionQueue,
        offloader: OffloadWorker,
        stager: StagingReader | None,
        promoter: PromoteWorker | None,
    ) -> None:
        self._agreement = agreement
        self._completions = completions
        self._offloader = offloader
        self._readers = [r for r in (stager, promoter) if r is not None]
        self._stager = None if stager is None else _SharedStager(stager)
        self._promoter = None if promoter is None else _SharedPromoter(promoter)
        # This rank's ends, and everybody's, of transfers that run on some rank.
        self._mine: dict[str, Completion] = {}
        self._told: dict[str, dict[int, _End]] = {}
        self._num_offloads = 0
        self.is_stuck = False
        # Of all ranks the longest, as told at the last meeting.
        self.store_stuck_s = 0.0

    @property
    def stager(self) -> Staging[StagedRead] | None:
        """Reads into staging memory; None without a disk."""
        return self._stager

    @property
    def promoter(self) -> Reader | None:
        """Reads ahead of need; None where nobody does."""
        return self._promoter

    @property
    def takes_offload(self) -> bool:
        """Whether another offload may be submitted."""
        return self._num_offloads < MAX_OFFLOADS

    def submitted_offload(self) -> None:
        """Note that an offload was submitted."""
        self._num_offloads += 1

    def queued(self, ticket: LoadTicket) -> bool:
        """Wait until a load is there or queued on all ranks; costs a message."""
        return self._noted("queued", ticket.wait_queued())

    def landed(self, ticket: LoadTicket) -> bool:
        """Wait for a load on all ranks, which costs a message."""
        return self._noted("landed", ticket.wait())

    def _noted(self, what: str, mine: bool) -> bool:
        everywhere = self._agreement.all(mine)
        self._agreement.note(what, everywhere)
        return everywhere

    def take(self) -> list[Completion]:
        """Meet the other ranks; return what has ended on all of them now.

        Raises:
            RanksPartedError: what one tells of a transfer does not fit this rank's.
        """
        facts: dict[str, Any] = {}
        for event in self._completions.drain():
            name = _name(event)
            self._mine[name] = event
            facts.setdefault("ended", {})[name] = asdict(_end_of(event))
        if any(reader.stuck_s() > _STUCK_S for reader in self._readers):
            facts["stuck"] = True
        store_s = self._offloader.stuck_s()
        if store_s > _TOLD_S:
            facts["store_s"] = store_s
        met = self._agreement.meet(facts)
        self.store_stuck_s = max(told.get("store_s", 0.0) for told in met)
        self.is_stuck = any("stuck" in told for told in met)
        for rank, told in enumerate(met):
            for name, end in told.get("ended", {}).items():
                self._told.setdefault(name, {})[rank] = _End(**end)
        num_ranks = len(met) if self._agreement.is_shared else 1
        # Alone at the end: what ended here has ended.
        everywhere = [
            name
            for name, ends in self._told.items()
            if len(ends) >= num_ranks and name in self._mine
        ]
        return [self._merge(name) for name in sorted(everywhere)]

    def _merge(self, name: str) -> Completion:
        event = self._mine.pop(name)
        ends = self._told.pop(name)
        num_pages = _num_pages(event)
        for rank, one in ends.items():
            if max(*one.bad, *one.missing, -1, -1) >= num_pages:
                raise RanksPartedError(rank, self._agreement.num_ranks)
        end = _merged([ends[rank] for rank in sorted(ends)])
        self._agreement.note(name, end.missing, end.bad)
        match event:
            case SlotsReady():
                return event
            case LoadFinished():
                return _shared_load(event, end)
            case OffloadFinished(plan, result):
                self._num_offloads -= 1
                return OffloadFinished(plan, _result(plan.positions, result, end))
            case DemoteFinished(plan, result):
                return DemoteFinished(plan, _result(plan.pages, result, end))
            case StageFinished():
                assert self._stager is not None
                return self._stager.ended(event, end)
            case PromoteFinished(plan):
                assert self._promoter is not None
                self._promoter.ended(plan)
                positions, ok = _attempted(np.arange(plan.num_pages), end)
                result = _told_result(event.result, end, ok)
                return PromoteFinished(plan, positions, result, end.is_alone)
        raise AssertionError(f"unknown completion {event!r}")


@dataclass(frozen=True, slots=True)
class _End:
    """How a transfer ended on a rank, or on all.

    Attributes:
        num_bytes, seconds, error: as in ``TransferResult``.
        is_alone: no other transfer shared the link.
        missing: positions in the plan that were not attempted.
        bad: those that were, in vain.
        moved: of a load, bytes and seconds by tier.
        failed: of a load, the tier whose copy failed; None for none.
    """

    num_bytes: int
    seconds: float
    error: str
    is_alone: bool = True
    missing: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    moved: dict[str, list[float]] = field(default_factory=dict)
    failed: int | None = None


def _name(event: Completion) -> str:
    """Return a transfer's name, alike on all ranks and in order of its plan."""
    if isinstance(event, SlotsReady):
        return f"{event.num_slots:012d} {event.tier.label} {type(event).__name__}"
    plan = event.plans[0] if isinstance(event, LoadFinished) else event.plan
    return f"{plan.plan_id:012d} {type(event).__name__}"


def _num_pages(event: Completion) -> int:
    """Return how many positions an end can name; a load is good or bad as one."""
    if isinstance(event, SlotsReady | LoadFinished):
        return 1
    return len(event.plan.pages)


def _end_of(event: Completion) -> _End:
    if isinstance(event, SlotsReady):
        return _End(0, 0.0, "")
    if isinstance(event, LoadFinished):
        figures = event.figures
        return _End(
            event.num_bytes,
            event.seconds,
            event.error,
            bad=[] if event.landed else [0],
            moved={str(int(tier)): list(m) for tier, m in figures.moved.items()},
            failed=None if figures.failed is None else int(figures.failed),
        )
    result, is_alone = event.result, True
    wanted = np.arange(len(event.plan.pages))
    if isinstance(event, StageFinished):
        wanted, is_alone = event.staged.positions, event.staged.is_alone
        attempted = event.positions
    elif isinstance(event, PromoteFinished):
        attempted, is_alone = event.positions, event.is_alone
    else:
        attempted = wanted
    return _End(
        int(result.num_bytes),
        float(result.seconds),
        result.error,
        is_alone,
        np.setdiff1d(wanted, attempted).tolist(),
        np.asarray(attempted)[~result.ok].tolist(),
    )


def _merged(ends: Sequence[_End]) -> _End:
    """Return how a transfer ended on all ranks together."""
    bad = sorted({page for end in ends for page in end.bad})
    missing = sorted({page for end in ends for page in end.missing} - set(bad))
    moved = {
        tier: [figures[0], max(end.moved[tier][1] for end in ends if tier in end.moved)]
        for tier, figures in ends[0].moved.items()
    }
    return _End(
        ends[0].num_bytes,
        max(end.seconds for end in ends),
        next((end.error for end in ends if end.error), ""),
        all(end.is_alone for end in ends),
        missing,
        bad,
        moved,
        next((end.failed for end in ends if end.failed is not None), None),
    )


def _attempted(wanted: Any, end: _End) -> tuple[Int32s, Any]:
    """Return the positions that all ranks attempted, or one in vain; and the good."""
    positions = np.setdiff1d(wanted, end.missing).astype(np.int32)
    return positions, ~np.isin(positions, end.bad)


def _told_result(result: TransferResult, end: _End, ok: Any) -> TransferResult:
    """Return a result without checksums."""
    return TransferResult(
        ok=ok, num_bytes=end.num_bytes, seconds=end.seconds, error=end.error
    )


def _result(pages: Any, result: TransferResult, end: _End) -> TransferResult:
    """Return the common result of a store; its checksums are this rank's own."""
    ok = np.ones(len(pages), np.bool_)
    ok[end.bad] = False
    return replace(
        result, ok=ok, num_bytes=end.num_bytes, seconds=end.seconds, error=end.error
    )


def _shared_load(event: LoadFinished, end: _End) -> LoadFinished:
    moved = {TierId(int(t)): (int(m[0]), m[1]) for t, m in end.moved.items()}
    failed = None if end.failed is None else TierId(end.failed)
    return replace(
        event,
        landed=not end.bad,
        num_bytes=end.num_bytes,
        seconds=end.seconds,
        error=end.error,
        figures=LoadFigures(moved, event.figures.sources, failed),
    )


class _SharedRead(StagedRead):
    """A read of which nothing is seen before it has ended on all ranks."""

    def __init__(self, own: StagedRead) -> None:
        super().__init__(own.plan, own.positions, own.region, own.rows)
        self.own = own
        self.is_released = False
        self._is_common = False
        self._common: Int32s = np.zeros(0, np.int32)

    @property
    def done(self) -> bool:
        """True once it ended on all ranks."""
        return self._is_common

    @property
    def arrived(self) -> Int32s:
        """Positions of the pages that are good on all ranks; none before the end."""
        return self._common

    @property
    def num_left(self) -> int:
        """All pages, until none is."""
        return 0 if self._is_common else len(self.positions)

    @property
    def num_unbegun(self) -> int:
        """None that anybody could count on."""
        return 0

    @property
    def started_s(self) -> float | None:
        """Not known."""
        return None

    def turn_round(self) -> None:
        """Read what was not begun here from its end on."""
        self.own.turn_round()

    def cancel(self) -> None:
        """Leave out what was not begun here."""
        self.own.cancel()

    def end(self, arrived: Int32s, *, is_alone: bool) -> None:
        """Note the common end."""
        self._is_common, self._common, self._is_alone = True, arrived, is_alone


class _SharedStager:
    """Staging memory whose rows are free once all ranks' reads have ended."""

    def __init__(self, own: StagingReader) -> None:
        self._own = own
        self._reads: dict[int, _SharedRead] = {}
        self.num_free_rows = own.largest_read_pages

    @property
    def largest_read_pages(self) -> int:
        """Pages that one read can have at most."""
        return self._own.largest_read_pages

    def try_submit(self, plan: LoadPlan, positions: Int32s) -> StagedRead | None:
        """Start reading; None if rows are short on any rank."""
        if len(positions) > self.num_free_rows:
            return None
        own = self._own.try_submit(plan, positions)
        if own is None:
            # Closed: the server ends.
            return None
        read = self._reads[plan.plan_id] = _SharedRead(own)
        self.num_free_rows -= len(positions)
        return read

    def release(self, staged: StagedRead) -> None:
        """Give the rows back; they are kept until the common end."""
        assert isinstance(staged, _SharedRead)
        if staged.is_released:
            return
        staged.is_released = True
        self._own.release(staged.own)
        if staged.done:
            self.num_free_rows += len(staged.positions)

    def ended(self, event: StageFinished, end: _End) -> StageFinished:
        """Note the common end of a read, and return it."""
        read = self._reads.pop(event.plan.plan_id)
        positions, ok = _attempted(read.positions, end)
        read.end(positions[ok], is_alone=end.is_alone)
        if read.is_released:
            self.num_free_rows += len(read.positions)
        result = _told_result(event.result, end, ok)
        return StageFinished(event.plan, positions, read, result)


class _SharedPromotion:
    """A promotion of which nothing is seen before it has ended on all ranks."""

    def __init__(self, own: Read, num_pages: int) -> None:
        self._own = own
        self.num_left = num_pages

    def hurry(self) -> None:
        """Let it go before other transfers."""
        self._own.hurry()

    def cancel(self) -> None:
        """Leave out what was not begun here."""
        self._own.cancel()
        self.num_left = 0


class _SharedPromoter:
    """Takes as many promotions as every rank's queue can."""

    def __init__(self, own: PromoteWorker) -> None:
        self._own = own
        self._reads: dict[int, _SharedPromotion] = {}

    def submit(self, plan: PromotePlan) -> Read | None:
        """Queue a promotion; None while too many are under way on any rank."""
        if len(self._reads) >= MAX_PROMOTIONS:
            return None
        own = self._own.submit(plan)
        if own is None:
            return None
        read = self._reads[plan.plan_id] = _SharedPromotion(own, plan.num_pages)
        return read

    def ended(self, plan: PromotePlan) -> None:
        """Note the common end."""
        self._reads.pop(plan.plan_id).num_left = 0
