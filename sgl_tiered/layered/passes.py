"""One forward as arrays: which pages it reads, writes and fills, and what it takes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import PassPlan, PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.requests import RequestRecord
from sgl_tiered.layered.unit_stream import UnitStream
from sgl_tiered.layered.units import ActSource, ReadPlan

__all__ = ["Batch", "Forward", "LostRows", "Needs"]

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """Physical layer-pages that a batch takes.

    Attributes:
        missing: bool [num_layers, n], of its n new pages: to be bound at once.
        passing: bool [num_layers, n], to be bound when their layer is written, and on
            the host soon after.
        per_request: int64 [num_requests], all that one takes, taken by itself.
    """

    missing: Bools
    passing: Bools
    per_request: Int64s

    @property
    def num_at_once(self) -> int:
        """Layer-pages to be bound before the forward."""
        return int(np.count_nonzero(self.missing))

    @property
    def num_passing(self) -> int:
        """Layer-pages for two layers on their way: the two largest."""
        per_layer = np.sort(np.count_nonzero(self.passing, axis=1))
        return int(per_layer[-2:].sum())


class Batch:
    """The requests of a forward, their pages one after the other.

    Attributes:
        pages: int64 [n], logical.
        indptr: int64 [num_requests + 1], where each request's begin.
        request_of: int64 [n], position of the request.
        is_new: bool [n], without any KV before the forward.
        is_written: bool [n], gets KV in it.
        is_full: bool [n], whole after it.
        position: int64 [n], among the pages of its request.
    """

    def __init__(
        self, requests: Sequence[PassRequest], page_tokens: int, half_pages: int
    ) -> None:
        self.requests = tuple(requests)
        self._half_pages = half_pages
        lens = np.array([len(one.pages) for one in requests], np.int64)
        context = np.array([one.num_context for one in requests], np.int64)
        total = context + np.array([one.num_new for one in requests], np.int64)
        assert np.array_equal(lens, -(-total // page_tokens)), (
            f"{lens.tolist()} pages of {page_tokens} for {total.tolist()} tokens"
        )
        self.indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lens)])
        self.pages = (
            np.concatenate([one.pages for one in requests]).astype(np.int64, copy=False)
            if requests
            else np.zeros(0, np.int64)
        )
        self.request_of = np.repeat(np.arange(len(lens)), lens)
        position = np.arange(len(self.pages)) - self.indptr[self.request_of]
        self.position = position
        self.is_new = position >= -(-context // page_tokens)[self.request_of]
        self.is_written = position >= (context // page_tokens)[self.request_of]
        self.is_full = position < (total // page_tokens)[self.request_of]
        self.new = self.is_new.nonzero()[0]
        self.new_pages = self.pages[self.new]
        self.written_pages = self.pages[self.is_written]
        self.passing_pages = self.pages[self.is_new & self.is_full]
        # Not at once: what fails before its end has to find them as they were.
        self.completed_pages = self.pages[self.is_written & self.is_full & ~self.is_new]

    def needs(
        self,
        binding: LayerBinding,
        retained: Sequence[Bools],
        rowless: Bools | None = None,
    ) -> Needs:
        """Return what it takes now.

        Args:
            binding: what its pages have already.
            retained: bool [num_layers] for each request.
            rowless: bool [n], new pages that stay in all layers; None for none of them.
        """
        owner = self.request_of[self.new]
        unbound = binding.device[:, self.new_pages] < 0
        kept = ~self.is_full[self.new]
        if rowless is not None:
            kept = kept | rowless
        kept = np.stack(retained, axis=1)[:, owner] | kept if retained else unbound
        missing, passing = unbound & kept, unbound & ~kept
        num = len(self.requests)
        per_request = np.bincount(owner, missing.sum(axis=0), num)
        if passing.any():
            sums = np.zeros((len(passing), num), np.int64)
            layers, where = passing.nonzero()
            np.add.at(sums, (layers, owner[where]), 1)
            per_request = per_request + np.sort(sums, axis=0)[-2:].sum(axis=0)
        return Needs(missing, passing, per_request.astype(np.int64))

    def staged(self, binding: LayerBinding) -> tuple[npt.NDArray[np.int32], Bools]:
        """Return int32 [num_layers, n] places, and bool: what has to be staged."""
        bound = binding.device.take(self.pages, axis=1)
        staged = (bound < 0) & ~self.is_new
        if staged.any():
            layers, where = staged.nonzero()
            lost = ~binding.on_host[layers, self.pages[where]]
            assert not lost.any(), f"{np.count_nonzero(lost)} layer-pages have no KV"
            assert not staged[:, self.is_written].any(), (
                "a page to be completed is away"
            )
        return bound, staged

    def excess(self, staged: Bools, source: ActSource | None = None) -> Bools:
        """Return bool [n], pages of requests that need more than one half."""
        over = np.zeros(len(self.pages), np.bool_)
        if not staged.any():
            return over
        acts = None if source is None else source.crosses(staged, self.pages)
        half_acts = 0 if source is None else len(source.halves[0])
        for position in range(len(self.requests)):
            mine = slice(self.indptr[position], self.indptr[position + 1])
            fits = int(staged[:, mine].sum(axis=1).max()) <= self._half_pages
            if fits and acts is not None:
                fits = int(acts[:, mine].sum(axis=1).max()) <= half_acts
            over[mine] = not fits
        return over


@dataclass(slots=True, eq=False)
class Forward:
    """The forward under way.

    Attributes:
        batch: what it computes.
        records: of its requests.
        reads: where each layer of each page is read.
        stream: brings the units.
        passing: bool [num_layers, n], of the batch's new pages: still to be bound.
        is_passing: the layers for which there are such, as Python values.
        stall_s: seconds waited so far.
        passing_acts: int64 [n], its new full pages of activations; layer by layer they
            get places, up to ``num_captured`` by now.
    """

    batch: Batch
    records: tuple[RequestRecord, ...]
    reads: ReadPlan
    stream: UnitStream
    passing: Bools
    is_passing: list[bool]
    stall_s: float
    passing_acts: Int64s | None = None
    num_captured: int = 0

    def readers(self, unit: int) -> tuple[Hashable, ...]:
        """Return the requests of a unit's group that read what it failed to bring."""
        rows = self.stream.failed_rows(unit)
        first, stop = self.reads.groups[self.reads.units[unit].group]
        reads = np.isin(self.batch.pages, rows)
        readers = np.unique(self.batch.request_of[reads]).tolist()
        return tuple(self.records[n].key for n in readers if first <= n < stop)

    def owners(self, pages: Int64s) -> tuple[Hashable, ...]:
        """Return the requests with any of these pages."""
        found = np.isin(self.batch.pages, pages)
        owners = np.unique(self.batch.request_of[found]).tolist()
        return tuple(self.records[n].key for n in owners)

    def writers(self, layer: int) -> tuple[Hashable, ...]:
        """Return the requests with pages of a layer that are still to be bound."""
        new = self.batch.new[self.passing[layer]]
        writers = np.unique(self.batch.request_of[new]).tolist()
        return tuple(self.records[n].key for n in writers)


class LostRows:
    """A batch some of whose requests nobody waits for any more.

    They stay in it, so that the others' rows are computed in a batch of the same shape,
    but their pages lie where padding is written, whatever they hold.

    Args:
        requests: all of the batch.
        place: physical layer-page of padding.
    """

    def __init__(self, requests: Sequence[PassRequest], place: int) -> None:
        self.live = tuple(one for one in requests if not one.is_lost)
        self._place = place
        lens = np.array([len(one.pages) for one in requests], np.int64)
        is_live = np.array([not one.is_lost for one in requests], np.bool_)
        self._indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lens)])
        self._positions = is_live.nonzero()[0]
        self._is_live_page = np.repeat(is_live, lens)
        lost = [one.pages for one in requests if one.is_lost]
        self._pages = np.concatenate(lost) if lost else np.zeros(0, np.int64)
        # What is written for others wins where a page is shared.
        kept = [one.pages for one in self.live]
        if kept:
            self._pages = np.setdiff1d(self._pages, np.concatenate(kept))

    def plan(self, live: PassPlan) -> PassPlan:
        """Return the plan of all of them, from that of the others."""
        positions, num = self._positions, len(self._indptr) - 1
        refused = tuple(int(positions[n]) for n in live.refused)
        # A group begins where the one before it ends.
        stops = [int(positions[stop]) for _, stop in live.groups[:-1]]
        edges = [0, *stops, num]
        groups = tuple(itertools.pairwise(edges)) if live.groups else ()
        return PassPlan(refused, groups, self._indptr, live.num_units)

    def table(self, live: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return int32 [n], places of the pages of all of them in one layer."""
        table = np.full(len(self._is_live_page), self._place, np.int32)
        table[self._is_live_page] = live
        return table

    def acts(
        self, pages: npt.NDArray[np.integer], places: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return where activations are kept; those of the lost ones nowhere, -1."""
        return np.where(np.isin(pages, self._pages), np.int32(-1), places)

    def places(
        self, pages: npt.NDArray[np.integer], places: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return where pages are written; those of the lost ones where padding is."""
        return np.where(np.isin(pages, self._pages), np.int32(self._place), places)
