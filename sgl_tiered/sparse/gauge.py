"""What a selection asks to know of tokens: on the device, and beside the table.

A selection says what it looks at: attention of all queries (``needs_mass``), of the
last ones (``window_tokens``), both, or none, from how far away (``local_tokens``) and
to which power. ``MassGauge`` has a *book* for each of the two that it looks at, and
memory for no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.sparsity.base import Selection
from sgl_tiered.sparse.mass import PageMass, Run, SlotMass, sampled_queries

__all__ = ["MassBook", "MassGauge", "Reading"]

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one book knows of some tokens.

    Attributes:
        mean: float32 [num_layers, num_heads, n], attention per query; NaN where none
            was asked.
        reads: float32 [num_layers, n], how many queries were.
    """

    mean: Float32s
    reads: Float32s


@dataclass(frozen=True, slots=True)
class MassBook:
    """Attention of all queries, or of the last ones.

    Attributes:
        slots: of tokens on the device.
        pages: of those that the cache's table knows.
        window: how many are the last ones; 0 for all.
        most: queries of a pass that are asked.
    """

    slots: SlotMass
    pages: PageMass
    window: int
    most: int

    def runs(self, num_queries: int) -> list[Run]:
        """Return which queries of a pass of a prefill are asked, in order."""
        if self.window:
            begin = max(num_queries - self.window, 0)
            return [Run(begin, num_queries, 1.0)] if num_queries else []
        return sampled_queries(num_queries, self.most)


class MassGauge:
    """The books of one selection.

    Args:
        selection: says what it looks at.
        num_layers: of the model.
        num_heads: KV heads.
        num_slots: of the device.
        page_tokens: of a page.
        max_bytes: of host memory beside the table, all books together.
        most_queries: of a pass of a prefill that are asked, 128 at least.

    Attributes:
        local_tokens: nearer queries are left out.
        power: of the probabilities that are summed.
        every: the book of all queries; None where nobody looks.
        last: that of the last ones.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        num_layers: int,
        num_heads: int,
        num_slots: int,
        page_tokens: int,
        max_bytes: int,
        most_queries: int,
    ) -> None:
        self.local_tokens = selection.local_tokens
        self.power = selection.mass_power
        num_books = int(selection.needs_mass) + int(selection.window_tokens > 0)
        page_bytes = 2 * num_layers * (num_heads + 1) * page_tokens
        max_pages = max(1, max_bytes // (page_bytes * max(num_books, 1)))

        def book(window: int) -> MassBook:
            return MassBook(
                SlotMass(num_layers, num_heads, num_slots),
                PageMass(num_layers, num_heads, page_tokens, max_pages),
                window,
                most_queries,
            )

        self.every = book(0) if selection.needs_mass else None
        window = selection.window_tokens
        self.last = book(window) if window > 0 else None
        self.books = tuple(made for made in (self.every, self.last) if made is not None)

    @property
    def num_pages(self) -> int:
        """Pages of the table that something is known of."""
        return max((book.pages.num_pages for book in self.books), default=0)

    @property
    def num_bytes(self) -> int:
        """Host memory of all books."""
        return sum(book.slots.num_bytes + book.pages.num_bytes for book in self.books)

    def known(self, rows: Int32s) -> tuple[Reading, ...]:
        """Return what each book knows of the pages in these rows of the table."""
        return tuple(Reading(*book.pages.get(rows)) for book in self.books)

    def write(self, slots: Int64s, known: tuple[Reading, ...]) -> None:
        """Note what is known of tokens that are loaded to slots."""
        for book, reading in zip(self.books, known, strict=True):
            book.slots.write(slots, reading.mean, reading.reads)

    def keep(self, rows: Int32s, slots: Int64s) -> None:
        """Keep beside the table what is known of the tokens in slots."""
        for book in self.books:
            book.pages.put(rows, *book.slots.read(slots))

    def forget(self, slots: Int64s) -> None:
        """Forget what slots held."""
        for book in self.books:
            book.slots.forget(slots)

    def forget_rows(self, rows: Int32s) -> None:
        """Forget pages whose rows of the table are given up."""
        for book in self.books:
            book.pages.forget(rows)
