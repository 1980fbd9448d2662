"""Where the KV of each token of each layer lies: a row of one tensor, or nowhere.

The engine numbers *logical* pages, and slots in them, the same in all layers. Under
them lie *rows* of one device tensor, each with the keys and the values of one token in
one layer. A page that was computed has a row for every token in every layer; one that
was loaded sparse lacks those that were dropped. ``RowBinding`` owns the rows.

So a sparse page leaves room for others, and gives back less when it is freed. Who may
be asked to give room back is therefore counted as well: a page is *held* while a
request uses it, be it as its own (``private``) or as part of a locked prefix.

Invariants (``check``): no row is bound twice and free + bound = all; what a page lacks
is what its slots lack; a page that is not bound has nothing and is not held.

One thread writes. Copies of a bound page may read its part of the table meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["PADDING_ROW", "RowBinding"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

PADDING_ROW = 0
"""What padding writes to: the row of all slots of logical page 0."""


class RowBinding:
    """The table of all slots, and the allocator of rows.

    Args:
        num_layers: of the model.
        num_pages: logical pages, numbered from 1; page 0 is that of padding.
        page_tokens: tokens of a page.
        num_rows: rows, numbered from 1; row 0 is that of padding.

    Attributes:
        table: int32 [num_layers, (num_pages + 1) * page_tokens], the row of a slot, or
            -1 where it has none.
        dropped: int32 [num_pages + 1], rows that a bound page lacks in all layers.
        num_dropped: sum of ``dropped``.

    All of them are to be read only.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_tokens: int, num_rows: int
    ) -> None:
        if min(num_layers, num_pages, page_tokens, num_rows) < 1:
            raise ValueError(
                f"no binding of {num_layers} layers, {num_pages} pages of "
                f"{page_tokens} tokens and {num_rows} rows"
            )
        self.page_tokens = page_tokens
        self.table = np.full((num_layers, (num_pages + 1) * page_tokens), -1, np.int32)
        self.dropped = np.zeros(num_pages + 1, np.int32)
        self.num_dropped = 0
        self._bound = np.zeros(num_pages + 1, np.bool_)
        self._holds = np.zeros(num_pages + 1, np.int32)
        self._private = np.zeros(num_pages + 1, np.bool_)
        self._num_held = 0
        self._offsets = np.arange(page_tokens)
        self._free: Int32s = np.zeros(num_rows, np.int32)
        self._num_free = 0
        self.clear()

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.table.shape[0]

    @property
    def page_rows(self) -> int:
        """Rows of a page that lacks nothing."""
        return self.num_layers * self.page_tokens

    @property
    def num_rows(self) -> int:
        """Rows, that of padding not counted."""
        return len(self._free)

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return self._num_free

    @property
    def free_pages(self) -> int:
        """Pages that could be bound whole."""
        return self._num_free // self.page_rows

    @property
    def num_dropped_unheld(self) -> int:
        """Rows that pages lack which nobody holds, in all."""
        return self.num_dropped - self._num_held

    def slots(self, pages: Int64s) -> Int64s:
        """Return int64 [n * page_tokens], the slots of pages in their order."""
        slots: Int64s = (pages[:, None] * self.page_tokens + self._offsets).reshape(-1)
        return slots

    def lacks_any(self, pages: Int64s) -> bool:
        """Say whether any of these pages lacks a row."""
        return self.num_dropped > 0 and bool(self.dropped[pages].any())

    def bind(self, pages: Int64s) -> None:
        """Give pages a row for every token in every layer; there has to be room."""
        self._begin(pages)
        slots = self.slots(pages)
        taken = self._take(self.num_layers * len(slots))
        self.table[:, slots] = taken.reshape(self.num_layers, -1)

    def bind_kept(self, pages: Int64s, kept: Sequence[Int64s]) -> None:
        """Give pages rows for some of their tokens only; there has to be room.

        They are private from now on, until ``publish`` or ``release``.

        Args:
            pages: int64 [n].
            kept: per layer, which tokens of the n * page_tokens, ascending.
        """
        assert len(kept) == self.num_layers, (len(kept), self.num_layers)
        self._begin(pages)
        slots = self.slots(pages)
        lacking = np.full(len(pages), self.page_rows, np.int64)
        for layer, tokens in enumerate(kept):
            self.table[layer, slots[tokens]] = self._take(len(tokens))
            lacking -= np.bincount(tokens // self.page_tokens, minlength=len(pages))
        self.dropped[pages] = lacking
        self._private[pages] = True
        num_dropped = int(lacking.sum())
        self.num_dropped += num_dropped
        self._num_held += num_dropped

    def num_rows_lacking(self, pages: Int64s) -> int:
        """Return the rows that ``make_whole`` would take."""
        return int(self.dropped[pages].sum())

    def make_whole(self, pages: Int64s) -> None:
        """Give pages the rows that they lack; there has to be room."""
        some = pages[self.dropped[pages] > 0]
        slots = self.slots(some)
        layers, places = np.nonzero(self.table[:, slots] < 0)
        self.table[layers, slots[places]] = self._take(len(layers))
        self._lack_no_more(some)

    def release(self, pages: Int64s) -> None:
        """Take back what these pages have; each at most once."""
        assert self._bound[pages].all(), "freed, but not bound"
        slots = self.slots(pages)
        rows = self.table[:, slots]
        self.table[:, slots] = -1
        self._give(rows[rows >= 0])
        self._lack_no_more(pages[self.dropped[pages] > 0])
        self._bound[pages] = False
        self._private[pages] = False
        self._holds[pages] = 0

    def hold(self, pages: Int64s) -> None:
        """Note one more user of a prefix; pages that lack nothing do not matter."""
        some = self._lacking(pages)
        self._holds[some] += 1
        first = some[(self._holds[some] == 1) & ~self._private[some]]
        self._num_held += int(self.dropped[first].sum())

    def unhold(self, pages: Int64s) -> None:
        """Undo one ``hold`` of the same pages."""
        some = self._lacking(pages)
        assert (self._holds[some] > 0).all(), "let go more often than held"
        self._holds[some] -= 1
        self._let_go(some[(self._holds[some] == 0) & ~self._private[some]])

    def publish(self, pages: Int64s) -> None:
        """Note that pages are nobody's own any more, where they still are bound."""
        some = pages[self._private[pages]]
        self._private[some] = False
        self._let_go(some[self._holds[some] == 0])

    def clear(self) -> None:
        """Take everything back."""
        self.table[:] = -1
        self.table[:, : self.page_tokens] = PADDING_ROW
        self.dropped[:] = 0
        self.num_dropped = self._num_held = 0
        self._bound[:] = False
        self._holds[:] = 0
        self._private[:] = False
        # A stack, lowest number on top: neighbours are copied and read faster.
        self._num_free = len(self._free)
        self._free[:] = np.arange(self._num_free, 0, -1)

    def check(self) -> None:
        """Assert every invariant; O(everything), for tests."""
        body = self.table[:, self.page_tokens :]
        counts = np.bincount(body[body >= 0], minlength=self.num_rows + 1)
        np.add.at(counts, self._free[: self._num_free], 1)
        assert counts[PADDING_ROW] == 0, "a token lies in the row of padding"
        assert (counts[1:] == 1).all(), f"owned {np.flatnonzero(counts != 1)} not once"
        assert (self.table[:, : self.page_tokens] == PADDING_ROW).all()
        lacking = (self.table < 0).reshape(self.num_layers, -1, self.page_tokens)
        lacking = lacking.sum(axis=(0, 2))
        expected = np.where(self._bound, self.dropped, self.page_rows)
        expected[0] = 0
        assert (lacking == expected).all(), "the table lacks other rows than noted"
        idle = ~self._bound
        assert not self.dropped[idle].any(), "a free page lacks rows"
        assert not self._private[idle].any(), "a free page is private"
        assert not self._holds[idle].any(), "a free page is held"
        held = self._private | (self._holds > 0)
        assert self.num_dropped == self.dropped.sum(), "rows lacking are miscounted"
        assert self._num_held == self.dropped[held].sum(), "held rows are miscounted"

    def _begin(self, pages: Int64s) -> None:
        assert not self._bound[pages].any(), "bound already"
        assert (pages > 0).all(), "the page of padding is nobody's"
        self._bound[pages] = True

    def _lacking(self, pages: Int64s) -> Int64s:
        return pages[self.dropped[pages] > 0]

    def _lack_no_more(self, pages: Int64s) -> None:
        self._let_go(pages[self._private[pages] | (self._holds[pages] > 0)])
        self.num_dropped -= int(self.dropped[pages].sum())
        self.dropped[pages] = 0
        self._holds[pages] = 0
        self._private[pages] = False

    def _let_go(self, pages: Int64s) -> None:
        self._num_held -= int(self.dropped[pages].sum())

    def _take(self, count: int) -> Int32s:
        assert count <= self._num_free, f"{count} wanted, {self._num_free} free"
        self._num_free -= count
        taken: Int32s = self._free[self._num_free : self._num_free + count][::-1].copy()
        return taken

    def _give(self, rows: Int32s) -> None:
        self._free[self._num_free : self._num_free + len(rows)] = rows[::-1]
        self._num_free += len(rows)
