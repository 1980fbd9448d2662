"""Arithmetic of a forward's reads: which layer-pages are staged, when and where.

A *unit* is one layer of one *group*: neighbouring requests whose pages that are only
on the host fit one half of the staging room, in every layer. Units that stage something
are copied in the order in which they are read, into the two halves in turn: while the
model computes one, the next is copied. Pure functions on arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["ReadPlan", "Unit", "cut_groups", "layer_pages_needed", "plan_reads"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is staged for one layer of one group.

    Attributes:
        layer: which.
        group: which.
        rows: int64 [n], host rows, each once.
        targets: int32 [n], staging layer-pages of one half.
    """

    layer: int
    group: int
    rows: Int64s
    targets: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Where each layer of each page is read in one forward.

    Attributes:
        groups: first and last + 1 request of each.
        units: in the order in which they are read.
        unit_of: int32 [num_layers, num_groups], index in ``units`` or -1.
        table: int32 [num_layers, num_pages], physical layer-pages; -1 where a page has
            no place in a layer yet, to be written first.
    """

    groups: tuple[tuple[int, int], ...]
    units: tuple[Unit, ...]
    unit_of: Int32s
    table: Int32s


def cut_groups(needs: Int64s, half_pages: int) -> tuple[tuple[int, int], ...]:
    """Cut requests into the fewest runs whose pages fit one half in every layer.

    Args:
        needs: int64 [num_layers, num_requests], pages to be staged; none exceeds
            ``half_pages``.
        half_pages: layer-pages of one half.

    Returns:
        First and last + 1 request of each run; one empty run for no requests.
    """
    num_requests = needs.shape[1]
    if num_requests == 0 or int(needs.sum(axis=1).max()) <= half_pages:
        return ((0, num_requests),)
    groups, start = [], 0
    used = np.zeros(len(needs), np.int64)
    for request in range(num_requests):
        used = used + needs[:, request]
        if int(used.max()) > half_pages:
            groups.append((start, request))
            start, used = request, needs[:, request]
    groups.append((start, num_requests))
    return tuple(groups)


def plan_reads(
    bound: Int32s,
    is_staged: Bools,
    pages: Int64s,
    indptr: Int64s,
    halves: tuple[Int32s, Int32s],
) -> ReadPlan:
    """Lay out all reads of a forward.

    Args:
        bound: int32 [num_layers, n], device places of ``pages``, -1 for none; becomes
            the plan's table.
        is_staged: bool [num_layers, n], which are to be staged.
        pages: int64 [n], logical pages of all requests, one after the other.
        indptr: int64 [num_requests + 1], where each request's begin.
        halves: of the staging room, int32 [half_pages] each.
    """
    num_layers = len(bound)
    if not is_staged.any():
        whole = (0, len(indptr) - 1)
        return ReadPlan((whole,), (), np.full((num_layers, 1), -1, np.int32), bound)
    sums = np.zeros((num_layers, len(pages) + 1), np.int64)
    np.cumsum(is_staged, axis=1, out=sums[:, 1:])
    needs = np.diff(sums[:, indptr], axis=1)
    groups = cut_groups(needs, len(halves[0]))
    units: list[Unit] = []
    unit_of = np.full((num_layers, len(groups)), -1, np.int32)
    for layer in np.flatnonzero(is_staged.any(axis=1)).tolist():
        for group, (first, stop) in enumerate(groups):
            begin, end = indptr[first], indptr[stop]
            where = begin + is_staged[layer, begin:end].nonzero()[0]
            if not len(where):
                continue
            # A prefix that two requests share is staged once.
            rows, inverse = np.unique(pages[where], return_inverse=True)
            targets = halves[len(units) % 2][: len(rows)]
            bound[layer, where] = targets[inverse]
            unit_of[layer, group] = len(units)
            units.append(Unit(layer, group, rows, targets))
    return ReadPlan(groups, tuple(units), unit_of, bound)


def layer_pages_needed(
    num_context: int, num_new: int, retained: Bools, page_tokens: int
) -> int:
    """Return the physical layer-pages that a forward takes for one request.

    Its new pages in the retained layers, the one that is not full at the end in all,
    and two of the other layers at a time: one computed, one on its way to the host.

    Args:
        num_context: tokens that have KV already.
        num_new: tokens to be computed.
        retained: bool [num_layers].
        page_tokens: tokens in one page.
    """
    first_new = -(-num_context // page_tokens)
    num_full = max((num_context + num_new) // page_tokens - first_new, 0)
    num_tails = -(-(num_context + num_new) // page_tokens) - first_new - num_full
    num_kept = int(np.count_nonzero(retained))
    num_passing = min(2, len(retained) - num_kept)
    return num_full * (num_kept + num_passing) + num_tails * len(retained)
