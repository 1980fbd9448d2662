"""A launched batch whose loads are not known to have ended.

SGLang's overlap schedule launches the next batch before it takes the results of one, so
there may be several. What a load has brought is good only once its end is known; until
then nothing of it is published, and its sources stay pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_tiered.pipelines.layerwise_load import LoadTicket
from sgl_tiered.serving.coordinator import RequestState

__all__ = ["Load", "LoadingPass", "MissingSpan"]


@dataclass(frozen=True, slots=True)
class MissingSpan:
    """Tokens of a batch's request whose keys and values are not in their slots.

    Attributes:
        index: of the request in the batch.
        begin, end: positions in its prompt; everything before ``begin`` is there.
    """

    index: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """The load of one request of a batch.

    Attributes:
        req: SGLang's request.
        state: what was known of it when the load began; the request may be forgotten
            and come anew while the load runs.
        begin, end: where in its prompt the load goes, in tokens.
        num_retracted: how often SGLang had retracted the request by then.
    """

    req: Any
    state: RequestState
    begin: int
    end: int
    num_retracted: int

    @property
    def is_current(self) -> bool:
        """Whether its request still rests on it.

        Not if that has ended, or has been retracted or queued again since and begins
        anew, even where it runs already.
        """
        is_same = self.req.retraction_count == self.num_retracted
        return is_same and not self.req.finished()


@dataclass(slots=True, eq=False)
class LoadingPass:
    """The loads of one batch.

    Attributes:
        ticket: of all of them.
        loads: one per request that has one.
        is_launched: the batch's forward is queued; before, it is being put together.
        launched_s: when SGLang launched it; None where it did not tell.
        has_come: the load is there, or queued where it ``may_run``; None before the
            loader was asked.
        may_run: it is queued, and may run or fail on the device.
        is_repaired: it failed, and what it did not bring was computed.
    """

    ticket: LoadTicket
    loads: list[Load] = field(default_factory=list)
    is_launched: bool = False
    launched_s: float | None = None
    has_come: bool | None = None
    may_run: bool = False
    is_repaired: bool = False

    def has_any(self, reqs: Sequence[Any]) -> bool:
        """Say whether one of these requests has a load here."""
        return any(load.req is req for load in self.loads for req in reqs)

    def precedes(self, batch: Any) -> bool:
        """Say whether these are loads of a batch, or of one launched before it.

        Its requests do not tell: a prompt's next chunk may have loads of its own.
        """
        if self.launched_s is None or batch.launch_ts is None:
            return self.has_any(batch.reqs)
        return self.launched_s <= float(batch.launch_ts)

    def missing(self, batch: Any) -> list[MissingSpan]:
        """Return what the batch's slots lack where the load has failed."""
        spans = []
        for index, req in enumerate(batch.reqs):
            for load in self.loads:
                end = min(load.end, batch.prefix_lens[index])
                if load.req is req and load.begin < end:
                    spans.append(MissingSpan(index, load.begin, end))
        return spans
