"""How many rows lie on the device, how many slots SGLang numbers, and what it is told.

The device's room stays what ``--max-total-tokens`` says: a row for each of these tokens
in every layer. Slots are several times as many, as a sparse page has its slots and
fewer rows. What it leaves free are rows for others. SGLang sees that as a pool whose
size is what lies in it and what fits besides, so `SparseSizes` tells it so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.sparse.rows import RowBinding

__all__ = ["RowPlan", "SparseSizes", "allocator_class", "plan_rows", "pool_class"]

SLOT_FACTOR = 4
"""Slots for each token of the device. With fewer rows than a quarter per page, slots
would run out before rows do; each costs 4 bytes a layer."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Sizes of one pool.

    Attributes:
        layout: shape of a page.
        num_pages: logical pages, the one that padding writes to not counted.
        device_pages: pages that fit with all their tokens.
    """

    layout: PageLayout
    num_pages: int
    device_pages: int

    @property
    def num_rows(self) -> int:
        """Rows of the tensor, that of padding not counted."""
        return self.device_pages * self.layout.page_tokens * self.layout.num_layers

    def binding(self) -> RowBinding:
        """Return the empty table of such a pool."""
        layout = self.layout
        return RowBinding(
            layout.num_layers, self.num_pages, layout.page_tokens, self.num_rows
        )


# What was planned, for the platform that SGLang asks next for classes of the pool and
# of the allocator.
_planned: list[RowPlan] = []


def plan_rows(layout: PageLayout | None, device_tokens: int = 0) -> None:
    """Plan a pool; None for none: SGLang's own is made."""
    _planned.clear()
    if layout is not None:
        device_pages = device_tokens // layout.page_tokens
        _planned.append(RowPlan(layout, SLOT_FACTOR * device_pages, device_pages))


def pool_class() -> type | None:
    """Return the class of the pool that was planned; None for another's."""
    if not _planned:
        return None
    from sgl_tiered.engines.sglang.sparse.pool import SparsePool

    return type("PlannedSparsePool", (SparsePool,), {"row_plan": _planned[0]})


def allocator_class() -> type | None:
    """Return the class of the allocator; None for another's."""
    if not _planned:
        return None
    from sgl_tiered.engines.sglang.sparse.allocator import SparseAllocator

    return SparseAllocator


class SparseSizes:
    """The sizes that SGLang compares with each other, in tokens.

    What the tree can evict gives less back than its tokens where these are sparse:
    ``evictable`` counts what an eviction would free. And the whole is what is taken
    plus what is free (``total``), which grows by what sparse pages in use leave free.

    Args:
        binding: the table of rows.
        num_pages: logical pages.
    """

    def __init__(self, binding: RowBinding, num_pages: int) -> None:
        self._binding = binding
        self._num_pages = num_pages
        # Who compares: an object, and the names of its parts, which are made late.
        self.comparing: list[tuple[Any, tuple[str, ...]]] = []
        self.total = self.free_pages(num_pages) * binding.page_tokens

    def free_pages(self, free_logical: int) -> int:
        """Return the pages that could be bound whole, of so many free numbers."""
        return min(free_logical, self._binding.free_pages)

    @property
    def unevictable(self) -> int:
        """Tokens, in whole pages, that the tree could evict and that free nothing."""
        page = self._binding.page_rows
        missing_pages = -(-self._binding.num_dropped_unheld // page)
        return missing_pages * self._binding.page_tokens

    def update(self, free_logical: int) -> None:
        """Tell those who compare what the whole is now.

        Args:
            free_logical: page numbers that are free.
        """
        taken = self._num_pages - free_logical
        pages = taken + self.free_pages(free_logical)
        self.total = pages * self._binding.page_tokens - self.unevictable
        for owner, names in self.comparing:
            for part in [getattr(owner, name, None) for name in names]:
                if part is not None:
                    # Frozen, as nothing of SGLang's own changes the size of a pool.
                    object.__setattr__(part, "max_total_num_tokens", self.total)
