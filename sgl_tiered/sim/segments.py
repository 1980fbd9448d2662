"""Which request used each page last: a prompt cut where the answer changes.

Page ids form a tree (``PageTrace``), so a page was used whenever a page after it was:
along a prompt the last use never becomes more recent, and pages never seen come last.
A prompt is therefore a handful of segments, and replays that work on segments take
seconds for traces of millions of pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sgl_tiered.core.plans import Int64s
from sgl_tiered.sim.page_trace import PageTrace

__all__ = ["NEVER", "Segment", "last_uses", "next_uses"]

NEVER = -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring pages of one request with the same other use.

    Attributes:
        start: position of the first page in the prompt.
        stop: one past the last.
        request: number of the other request, or ``NEVER``.
    """

    start: int
    stop: int
    request: int


def last_uses(trace: PageTrace) -> Iterator[list[Segment]]:
    """Yield, per request in order, its pages by the request that used them before."""
    return _uses(trace, range(len(trace)))


def next_uses(trace: PageTrace) -> list[list[Segment]]:
    """Return, per request in order, its pages by the request that uses them next."""
    return list(_uses(trace, range(len(trace) - 1, -1, -1)))[::-1]


def _uses(trace: PageTrace, order: range) -> Iterator[list[Segment]]:
    used_by: Int64s = np.full(trace.max_ids, NEVER, np.int64)
    for request in order:
        pages = trace.pages(request)
        if not len(pages):
            yield []
            continue
        users = used_by[pages]
        used_by[pages] = request
        cuts = np.flatnonzero(users[1:] != users[:-1]) + 1
        starts = [0, *cuts.tolist()]
        stops = [*cuts.tolist(), len(pages)]
        others = users[starts].tolist()
        yield [Segment(*part) for part in zip(starts, stops, others, strict=True)]
