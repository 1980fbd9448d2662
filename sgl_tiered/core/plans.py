"""Frozen values that pass between the cache, the pipelines and the engine.

All arrays have one element (or row) per page of the plan, in token order. Where
``representations`` is None, all pages are KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import Lookup, Representation, TierId
from sgl_tiered.core.keys import KEY_BYTES

__all__ = [
    "QUEUE_FULL",
    "WRITES_REST",
    "Decision",
    "DemotePlan",
    "FoundPages",
    "LoadPlan",
    "OffloadPlan",
    "PageRecords",
    "PromotePlan",
    "Span",
    "TierOccupancy",
    "TransferResult",
    "count_act",
    "namespace_rows",
]

QUEUE_FULL = "the queue is full"
"""The error of a transfer that was dropped because too many waited."""
WRITES_REST = "writes rest after failures"
"""And of one that was dropped because those before it failed."""
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]
UInt64s = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


def namespace_rows(digest: bytes, num_pages: int) -> UInt8s:
    """Return the namespaces of pages that share one: uint8 [n, 16], read-only."""
    row: UInt8s = np.frombuffer(digest, np.uint8)
    return np.broadcast_to(row, (num_pages, len(row)))


def count_act(representations: UInt8s | None) -> int:
    """Return how many of the pages are activations; None stands for KV."""
    if representations is None:
        return 0
    return int(np.count_nonzero(representations == Representation.ACT))


@dataclass(frozen=True, slots=True, eq=False)
class PageRecords:
    """What must be known of pages besides their bytes, to find and to trust them again.

    Attributes:
        namespaces: uint8 [n, 16], digest of each page's namespace.
        keys: uint8 [n, 16], page keys.
        parents: uint8 [n, 16], key of the page before; the namespace's digest for the
            first page of a sequence.
        tokens: int32 [n, page_tokens].
        checksums: uint64 [n], xxh3-64 of the page's ``page_bytes`` (zeros until known).
        addresses: int64 [n], the slot in its tier (where the records come from a tier).
        representations: uint8 [n], what each copy holds; None for KV.
    """

    namespaces: UInt8s
    keys: UInt8s
    parents: UInt8s
    tokens: Int32s
    checksums: UInt64s
    addresses: Int64s
    representations: UInt8s | None = None

    def part(
        self, which: Int64s | slice, addresses: Int64s, checksums: UInt64s | None = None
    ) -> PageRecords:
        """Return some of the records, at other addresses; keys may have no rows.

        Args:
            which: positions.
            addresses: int64 [m].
            checksums: uint64 [m]; None for those that are here.
        """
        some = which if len(self.keys) else slice(None)
        kept = self.representations
        return PageRecords(
            namespaces=self.namespaces[some],
            keys=self.keys[some],
            parents=self.parents[some],
            tokens=self.tokens[some],
            checksums=self.checksums[which] if checksums is None else checksums,
            addresses=addresses,
            representations=None if kept is None else kept[which],
        )


@dataclass(frozen=True, slots=True, eq=False)
class FoundPages:
    """Pages that a former process left in a tier, of all namespaces, in any order.

    Iterating gives one ``PageRecords`` per namespace, each oldest first.

    Attributes:
        namespaces: uint8 [n, 16], digests.
        keys, parents, tokens, checksums, addresses: as in ``PageRecords``.
        representations: uint8 [n], what each copy holds.
        ages: int64 [n], larger for what was written later.
    """

    namespaces: UInt8s
    keys: UInt8s
    parents: UInt8s
    tokens: Int32s
    checksums: UInt64s
    addresses: Int64s
    representations: UInt8s
    ages: Int64s

    @classmethod
    def of(cls, groups: Sequence[PageRecords], page_tokens: int = 0) -> FoundPages:
        """Join records, which are taken to be oldest first."""

        def joined(columns: list[Any], width: int, dtype: Any) -> Any:
            empty = np.zeros((0, width) if width else 0, dtype)
            return np.concatenate([empty, *columns]).astype(dtype, copy=False)

        sizes = [len(group.addresses) for group in groups]
        kinds = [
            np.zeros(size, np.uint8)
            if group.representations is None
            else group.representations
            for group, size in zip(groups, sizes, strict=True)
        ]
        page_tokens = groups[0].tokens.shape[1] if groups else page_tokens
        return cls(
            namespaces=joined([g.namespaces for g in groups], KEY_BYTES, np.uint8),
            keys=joined([g.keys for g in groups], KEY_BYTES, np.uint8),
            parents=joined([g.parents for g in groups], KEY_BYTES, np.uint8),
            tokens=joined([g.tokens for g in groups], page_tokens, np.int32),
            checksums=joined([g.checksums for g in groups], 0, np.uint64),
            addresses=joined([g.addresses for g in groups], 0, np.int64),
            representations=joined(kinds, 0, np.uint8),
            ages=np.arange(sum(sizes)),
        )

    def __len__(self) -> int:
        return len(self.addresses)

    def __iter__(self) -> Iterator[PageRecords]:
        spaces = np.ascontiguousarray(self.namespaces).view(np.uint64)
        order = np.lexsort((self.ages, *spaces.T[::-1]))
        spaces = spaces[order]
        changes = np.flatnonzero((spaces[1:] != spaces[:-1]).any(axis=1)) + 1
        for members in np.split(order, changes):
            if len(members):
                yield PageRecords(
                    namespaces=self.namespaces[members],
                    keys=self.keys[members],
                    parents=self.parents[members],
                    tokens=self.tokens[members],
                    checksums=self.checksums[members],
                    addresses=self.addresses[members],
                    representations=self.representations[members],
                )

    def part(self, which: Int64s | slice, addresses: Int64s) -> FoundPages:
        """Return some of the pages, at other addresses."""
        return FoundPages(
            namespaces=self.namespaces[which],
            keys=self.keys[which],
            parents=self.parents[which],
            tokens=self.tokens[which],
            checksums=self.checksums[which],
            addresses=addresses,
            representations=self.representations[which],
            ages=self.ages[which],
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Pages of a prompt with one fate: loaded from ``source``, or computed (None).

    What is loaded as activations is rebuilt on the device.
    """

    first_page: int
    num_pages: int
    source: TierId | None
    representation: Representation = Representation.KV

    @property
    def action(self) -> str:
        """The word used in reports."""
        if self.source is None:
            return "compute"
        return "load" if self.representation is Representation.KV else "rebuild"


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What the planner says about the part of a prompt that is not on the device.

    Attributes:
        lookup: HIT where ``num_pages`` > 0, PENDING where another request's load of the
            same pages is under way, else MISS.
        first_page: number of pages that the device already has.
        num_pages: pages to load, from ``first_page`` on; 0 means recompute.
        num_found: pages found in some tier (``num_pages`` <= ``num_found``).
        pages: int32 [num_pages], rows in the page table.
        tiers: uint8 [num_pages], the ``TierId`` to load each page from.
        load_s: predicted time of the load in seconds.
        recompute_s: predicted time to compute the same tokens, in seconds.
        reason: one clause that says why, for reports.
        version: state of the table that it was made from.
        wait_s: predicted time until the links are free for this load.
        split_at: pages of the run after which the back begins that is read while those
            before it are loaded from memory or computed; 0 for no split.
        total_s: predicted time until the prompt's pass has ended.
        alternative_s: the same without any load.
        representations: uint8 [num_pages], what is loaded of each page; None for KV.
    """

    lookup: Lookup
    first_page: int
    num_pages: int
    num_found: int
    pages: Int32s
    tiers: UInt8s
    load_s: float
    recompute_s: float
    reason: str
    version: int
    wait_s: float = 0.0
    split_at: int = 0
    total_s: float = 0.0
    alternative_s: float = 0.0
    representations: UInt8s | None = None

    @property
    def num_act(self) -> int:
        """Pages to load as activations, and to rebuild."""
        return count_act(self.representations)

    @property
    def spans(self) -> list[Span]:
        """Return what is to become of the found pages, in order."""
        spans: list[Span] = []
        for page in range(self.num_found):
            tier = TierId(int(self.tiers[page])) if page < self.num_pages else None
            if tier is TierId.DISK and page < self.split_at:
                tier = None
            kind = Representation.KV
            if tier is not None and self.representations is not None:
                kind = Representation(int(self.representations[page]))
            last = spans[-1] if spans else None
            if last and (last.source, last.representation) == (tier, kind):
                spans[-1] = replace(last, num_pages=last.num_pages + 1)
            else:
                spans.append(Span(self.first_page + page, 1, tier, kind))
        return spans

    def num_from(self, tier: TierId) -> int:
        """Return how many pages are to come from ``tier``."""
        # Asked for each waiting request in a pass: 1 us, where numpy takes 17.
        return self.tiers.tobytes().count(int(tier))


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """A committed load: its sources are pinned until ``TieredCache.finish_load``.

    Attributes:
        plan_id: handle for ``finish_load``.
        first_page: pages of the prompt before the first one of the plan.
        pages: int32 [n], rows in the page table.
        tiers: uint8 [n], the ``TierId`` of each source.
        addresses: int64 [n], slot of each source in its tier.
        checksums: uint64 [n], expected checksum (0 where the tier keeps none: host).
        predicted_s: predicted time of the load in seconds.
        representations: uint8 [n], what each source holds; None for KV.
        num_bytes: int64 [n], bytes to bring of each to the device; None for whole
            pages of KV.
    """

    plan_id: int
    first_page: int
    pages: Int32s
    tiers: UInt8s
    addresses: Int64s
    checksums: UInt64s
    predicted_s: float
    representations: UInt8s | None = None
    num_bytes: Int64s | None = None

    def part(self, begin: int, end: int) -> tuple[UInt8s, UInt8s | None]:
        """Return tiers and representations of some of the pages."""
        kinds = self.representations
        return self.tiers[begin:end], None if kinds is None else kinds[begin:end]

    @property
    def num_pages(self) -> int:
        """Pages of the plan."""
        return len(self.pages)


@dataclass(frozen=True, slots=True, eq=False)
class OffloadPlan:
    """Pages to copy from the device to a memory tier.

    Attributes:
        plan_id: handle for ``finish_offload``.
        tier: destination.
        positions: int32 [n], index of each page in its prompt (0 = first page).
        pages: int32 [n], rows in the page table.
        addresses: int64 [n], slots set aside in ``tier``.
        representations: uint8 [n], what to copy of each page; None for KV.
        num_bytes: int64 [n], bytes of that; None for whole pages of KV.
    """

    plan_id: int
    tier: TierId
    positions: Int32s
    pages: Int32s
    addresses: Int64s
    representations: UInt8s | None = None
    num_bytes: Int64s | None = None

    def bytes_of(self, which: slice | Bools, page_bytes: int) -> int:
        """Return the bytes to copy of some pages; ``page_bytes`` are a whole page's."""
        if self.num_bytes is not None:
            return int(self.num_bytes[which].sum())
        return len(self.addresses[which]) * page_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DemotePlan:
    """Pages to copy from one tier to a slower one; sources are pinned meanwhile.

    Attributes:
        plan_id: handle for ``finish_demote``.
        source, target: the tiers.
        pages: int32 [n], rows in the page table.
        source_addresses, target_addresses: int64 [n], slots.
        records: what the target keeps beside the bytes, with what the sources hold;
            checksums are filled by it.
    """

    plan_id: int
    source: TierId
    target: TierId
    pages: Int32s
    source_addresses: Int64s
    target_addresses: Int64s
    records: PageRecords


@dataclass(frozen=True, slots=True, eq=False)
class PromotePlan:
    """Pages to copy from a tier that must be read to a memory tier above it.

    Sources are pinned and targets set aside until the plan is finished.

    Attributes:
        plan_id: handle for ``Promoter.finish``.
        source, target: the tiers.
        pages: int32 [n], rows in the page table.
        source_addresses, target_addresses: int64 [n], slots.
        checksums: uint64 [n], expected of the bytes that are read.
        representations: uint8 [n], what the sources hold; None for KV.
    """

    plan_id: int
    source: TierId
    target: TierId
    pages: Int32s
    source_addresses: Int64s
    target_addresses: Int64s
    checksums: UInt64s
    representations: UInt8s | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the plan."""
        return len(self.pages)


@dataclass(frozen=True, slots=True, eq=False)
class TransferResult:
    """How a transfer ended; it may have succeeded for some pages only.

    Attributes:
        ok: bool [n].
        num_bytes: bytes moved.
        seconds: time from start to end of the transfer.
        checksums: uint64 [n], as computed while moving (zeros where none was).
        error: one sentence, empty when all pages are ok.
    """

    ok: Bools
    num_bytes: int
    seconds: float
    checksums: UInt64s = field(default_factory=lambda: np.zeros(0, np.uint64))
    error: str = ""

    @classmethod
    def failed(cls, num_pages: int, seconds: float, error: str) -> TransferResult:
        """Return the result of a transfer of which nothing arrived."""
        return cls(
            ok=np.zeros(num_pages, np.bool_),
            num_bytes=0,
            seconds=seconds,
            checksums=np.zeros(num_pages, np.uint64),
            error=error,
        )


@dataclass(frozen=True, slots=True)
class TierOccupancy:
    """Slots of a tier: ``used_slots + free_slots == capacity_slots`` always holds."""

    capacity_slots: int
    used_slots: int
    free_slots: int
    pinned_slots: int
    slot_bytes: int
