"""Arithmetic of a forward's reads: which layer-pages are staged, when and where.

A *unit* is one layer of one *group*: neighbouring requests whose pages that are only
on the host fit one half of the staging room, in every layer. Units that stage something
are copied in the order in which they are read, into the two halves in turn: while the
model computes one, the next is copied. What is kept as activations is copied to halves
of the act staging that take the same turns, or is on the device already, and its KV is
computed into the half. Pure functions on arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "ActPart",
    "ActSource",
    "ReadPlan",
    "Unit",
    "cut_groups",
    "layer_pages_needed",
    "plan_reads",
]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ActPart:
    """Pages of a unit whose KV is computed from activations.

    Attributes:
        pages: int64 [n], logical.
        rows: int64 [n], host rows of activations; empty where they are on the device.
        acts: int32 [n], places in the act area: where they are, or are copied to.
        targets: int32 [n], staging layer-pages.
        positions: int64 [n], of the pages' first tokens.
    """

    pages: Int64s
    rows: Int64s
    acts: Int32s
    targets: Int32s
    positions: Int64s

    def __getitem__(self, part: slice) -> ActPart:
        """Return some of them."""
        return ActPart(
            self.pages[part],
            self.rows[part],
            self.acts[part],
            self.targets[part],
            self.positions[part],
        )

    def __len__(self) -> int:
        return len(self.pages)


@dataclass(frozen=True, slots=True, eq=False)
class ActSource:
    """Where pages and their activations are.

    Attributes:
        is_act: bool [num_pages].
        row: int64 [num_pages], host row of the page's kind.
        act: int32 [num_layers, num_pages], place in the act area or -1.
        position: int64 [num_pages], of the first token.
        halves: of the act staging, int32 [half_acts] each.
    """

    is_act: Bools
    row: Int64s
    act: Int32s
    position: Int64s
    halves: tuple[Int32s, Int32s]

    def crosses(self, is_staged: Bools, pages: Int64s) -> Bools:
        """Return bool [num_layers, n]: staged as activations that only the host has."""
        found: Bools = is_staged & self.is_act[pages] & (self.act[:, pages] < 0)
        return found

    def places(self, layer: int, pages: Int64s) -> Int64s:
        """Return int64 [n], which layer-page of a half each page goes to.

        Those that are computed side by side lie so: a product is written in place.
        """
        kinds = np.where(self.act[layer, pages] < 0, 0, 1)
        order = np.argsort(np.where(self.is_act[pages], kinds, 2), kind="stable")
        places = np.empty(len(pages), np.int64)
        places[order] = np.arange(len(pages))
        return places

    def unit(
        self, layer: int, group: int, pages: Int64s, turn: int, to: Int32s
    ) -> Unit:
        """Return what is staged of pages, each once, for one layer of one group.

        Args:
            layer: which.
            group: which.
            pages: int64 [n].
            turn: which half of the act staging.
            to: int32 [n], staging layer-pages.
        """
        is_act, acts = self.is_act[pages], self.act[layer, pages]
        here, away = is_act & (acts >= 0), is_act & (acts < 0)
        acts[away] = self.halves[turn][: np.count_nonzero(away)]
        rows, position = self.row[pages], self.position[pages]

        def part(some: Bools, of_rows: Int64s) -> ActPart | None:
            if not some.any():
                return None
            return ActPart(pages[some], of_rows, acts[some], to[some], position[some])

        return Unit(
            layer,
            group,
            rows[~is_act],
            to[~is_act],
            pages[~is_act],
            part(away, rows[away]),
            part(here, np.empty(0, np.int64)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is staged for one layer of one group.

    Attributes:
        layer: which.
        group: which.
        rows: int64 [n], host rows of KV, each once.
        targets: int32 [n], staging layer-pages of one half.
        kv_pages: int64 [n], whose rows they are; None where that is the same.
        acts: pages whose activations only the host has; None for none.
        device_acts: pages whose activations are on the device; None for none.
    """

    layer: int
    group: int
    rows: Int64s
    targets: Int32s
    kv_pages: Int64s | None = None
    acts: ActPart | None = None
    device_acts: ActPart | None = None

    @property
    def pages(self) -> Int64s:
        """Logical pages, int64 [all]."""
        if self.kv_pages is None:
            return self.rows
        parts = [one.pages for one in (self.acts, self.device_acts) if one is not None]
        return np.concatenate([self.kv_pages, *parts])

    @property
    def num_acts(self) -> int:
        """Pages that come as activations over the link."""
        return 0 if self.acts is None else len(self.acts)

    @property
    def num_rebuilt(self) -> int:
        """Pages whose KV is computed."""
        return self.num_acts + (
            0 if self.device_acts is None else len(self.device_acts)
        )

    @property
    def rebuilds(self) -> bool:
        """Whether any of its KV is computed."""
        return self.num_rebuilt > 0


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


def cut_groups(needs: Int64s, half_pages: int | Int64s) -> tuple[tuple[int, int], ...]:
    """Cut requests into the fewest runs whose pages fit one half in every layer.

    Args:
        needs: int64 [num_layers, num_requests], pages to be staged; none exceeds
            ``half_pages``.
        half_pages: layer-pages of one half; or int64 [num_layers], where rows of
            ``needs`` go to halves of different sizes.

    Returns:
        First and last + 1 request of each run; one empty run for no requests.
    """
    num_requests = needs.shape[1]
    if num_requests == 0 or bool((needs.sum(axis=1) <= half_pages).all()):
        return ((0, num_requests),)
    groups, start = [], 0
    used = np.zeros(len(needs), np.int64)
    for request in range(num_requests):
        used = used + needs[:, request]
        if (used > half_pages).any():
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
    source: ActSource | None = None,
) -> ReadPlan:
    """Lay out all reads of a forward.

    Args:
        bound: int32 [num_layers, n], device places of ``pages``, -1 for none; becomes
            the plan's table.
        is_staged: bool [num_layers, n], which are to be staged.
        pages: int64 [n], logical pages of all requests, one after the other.
        indptr: int64 [num_requests + 1], where each request's begin.
        halves: of the staging room, int32 [half_pages] each.
        source: where pages of activations are; None where all are of KV.
    """
    num_layers = len(bound)
    if not is_staged.any():
        whole = (0, len(indptr) - 1)
        return ReadPlan((whole,), (), np.full((num_layers, 1), -1, np.int32), bound)
    needs = _per_request(is_staged, indptr)
    if source is None:
        groups = cut_groups(needs, len(halves[0]))
    else:
        acts = _per_request(source.crosses(is_staged, pages), indptr)
        sizes = [len(halves[0]), len(source.halves[0])]
        limits = np.repeat(np.array(sizes, np.int64), num_layers)
        groups = cut_groups(np.concatenate([needs, acts]), limits)
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
            if source is not None:
                targets = targets[source.places(layer, rows)]
            bound[layer, where] = targets[inverse]
            unit_of[layer, group] = len(units)
            if source is None:
                units.append(Unit(layer, group, rows, targets))
            else:
                turn = len(units) % 2
                units.append(source.unit(layer, group, rows, turn, targets))
    return ReadPlan(groups, tuple(units), unit_of, bound)


def _per_request(is_staged: Bools, indptr: Int64s) -> Int64s:
    """Return int64 [num_layers, num_requests], how many are staged of each."""
    sums = np.zeros((len(is_staged), is_staged.shape[1] + 1), np.int64)
    np.cumsum(is_staged, axis=1, out=sums[:, 1:])
    counts: Int64s = np.diff(sums[:, indptr], axis=1)
    return counts


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
