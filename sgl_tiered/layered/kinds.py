"""Pages of two kinds: KV, or activations of which KV is computed again.

Each kind has host rows of its own, and a page in use has a row of its kind. Activations
on the device lie in the *act area*: tails, which are not complete; captures on their
way to the host; and, until the room is needed, copies that the host has as well.

A page of KV may be *rowless*: no rows of KV were left, and no room for activations. It
stays on the device, in all layers, until it is forgotten.

Invariants (``check``): no row and no place has two owners; only pages of activations
have places; a full one has in each layer a valid row, or a place to copy from; what is
rowless is of KV, and never on the host.

One thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import ActPlan
from sgl_tiered.layered.places import Places

__all__ = ["PageKinds"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class PageKinds:
    """Kinds, host rows, and the act area.

    Args:
        num_layers: of the model.
        num_pages: logical pages.
        plan: sizes.

    Attributes:
        is_act: bool [num_pages], whether it is kept as activations.
        row: int64 [num_pages], host row of its kind; -1 while not in use, or rowless.
        rowless: bool [num_pages], in use as KV without a row.
        act: int32 [num_layers, num_pages], place in the act area, or -1.
        position: int64 [num_pages], of its first token; for pages of activations that
            some forward had.
        places: of the act area.

    Raises:
        ValueError: no row of KV is left.
    """

    def __init__(self, num_layers: int, num_pages: int, plan: ActPlan) -> None:
        num_kv_rows = num_pages - plan.num_act_rows
        if num_kv_rows < 0:
            raise ValueError(f"{plan.num_act_rows} act rows for {num_pages} pages")
        self.is_act = np.zeros(num_pages, np.bool_)
        self.row = np.full(num_pages, -1, np.int64)
        self.rowless = np.zeros(num_pages, np.bool_)
        self.act = np.full((num_layers, num_pages), -1, np.int32)
        self.position = np.zeros(num_pages, np.int64)
        self.places = Places(plan.num_acts, 1)
        self._rows = (Places(num_kv_rows), Places(plan.num_act_rows))

    @property
    def num_free_rows(self) -> tuple[int, int]:
        """Rows of KV and of activations that can be had."""
        return self._rows[0].num_free, self._rows[1].num_free

    def assign(
        self, pages: Int64s, is_act: Bools, rowless: Bools | None = None
    ) -> None:
        """Give pages that come into use their kind and a row, of which there are some.

        Args:
            pages: int64 [n], each once.
            is_act: bool [n].
            rowless: bool [n], pages of KV that get no row; None for none of them.
        """
        in_use = (self.row[pages] >= 0) | self.rowless[pages]
        assert not np.any(in_use), "in use already"
        if rowless is None:
            rowless = np.zeros(len(pages), np.bool_)
        assert not np.any(is_act & rowless), "activations without a row"
        for kind, some in enumerate((pages[~is_act & ~rowless], pages[is_act])):
            self.row[some] = self._rows[kind].take(len(some))
        self.is_act[pages] = is_act
        self.rowless[pages] = rowless

    def forget(self, pages: Int64s, copying: Bools) -> None:
        """Take back rows and places; those that a copy uses come back when it ends.

        Args:
            pages: int64 [n], each once.
            copying: bool [num_layers, n].
        """
        busy = copying.any(axis=0)
        for kind, rows in enumerate(self._rows):
            mine = (self.row[pages] >= 0) & (self.is_act[pages] == bool(kind))
            rows.cut_loose(self.row[pages[mine & busy]])
            rows.give(self.row[pages[mine & ~busy]])
        act = self.act[:, pages]
        bound = act >= 0
        self.places.cut_loose(act[bound & copying])
        self.places.give(act[bound & ~copying])
        self.act[:, pages] = -1
        self.row[pages] = -1
        self.is_act[pages] = False
        self.rowless[pages] = False

    def bind(self, layers: int | Int64s, pages: Int64s) -> None:
        """Give layers of pages of activations places, of which there are enough."""
        assert np.all(self.is_act[pages]), "a page of KV has no activations"
        assert np.all(self.act[layers, pages] < 0), "bound already"
        self.act[layers, pages] = self.places.take(len(pages))

    def drop(self, layers: Int64s, pages: Int64s) -> None:
        """Release places; who asks knows that the host rows are valid and unused."""
        places = self.act[layers, pages]
        assert np.all(places >= 0), "dropped, but not bound"
        self.act[layers, pages] = -1
        self.places.give(places)

    def ended(
        self, rows: Int64s, acts: Int32s | None, stray: Bools, idle: Bools
    ) -> None:
        """Take back what a copy held of pages that were forgotten meanwhile.

        Args:
            rows: int64 [n], that it used.
            acts: int32 [n], places that it read, -1 for none; None for a copy of KV.
            stray: bool [n], forgotten.
            idle: bool [n], no other copy uses the row.
        """
        back = rows[stray & idle]
        mine = self._rows[acts is not None]
        mine.pick_up(back)
        mine.give(back)
        if acts is not None:
            places = acts[stray]
            places = places[places >= 0]
            self.places.pick_up(places)
            self.places.give(places)

    def check(self, on_host: Bools, full: Bools) -> None:
        """Assert every invariant; O(everything), for tests."""
        for kind, rows in enumerate(self._rows):
            rows.check(self.row[(self.row >= 0) & (self.is_act == bool(kind))])
        self.places.check(self.act[self.act >= 0])
        assert np.all(self.act[:, ~self.is_act] < 0), "a page of KV has a place"
        assert np.all(self.row[self.is_act] >= 0), "no row for activations"
        kept = on_host | (self.act >= 0)
        assert np.all(kept[:, full & self.is_act]), "activations are lost"
        assert np.all(self.row[on_host.any(axis=0)] >= 0), "a valid row of no page"
        assert np.all(self.row[self.rowless] < 0), "rowless, and has a row"
        assert not np.any(self.rowless & self.is_act), "activations without a row"
