"""Rows under everything at once, against a dictionary of what each page has.

Pages come whole and sparse, are published, locked by several, mended and freed, in any
order; sizes are compared with what the model counts one by one.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_tiered.sparse.rows import PADDING_ROW, RowBinding

LAYERS, TOKENS, PAGES = 3, 4, 24
PICK = st.integers(0, 1_000)


class RowsMachine(RuleBasedStateMachine):
    """Random operations on a binding, and on a model of it."""

    @initialize(device_pages=st.integers(1, 8))
    def build(self, device_pages: int) -> None:
        self.rows = RowBinding(LAYERS, PAGES, TOKENS, device_pages * LAYERS * TOKENS)
        self.has: dict[int, np.ndarray] = {}
        """Bound page -> bool [layers, tokens], what it has."""
        self.private: set[int] = set()
        self.locks: list[list[int]] = []
        self.idle = list(range(1, PAGES + 1))

    def pages(self, number: int, count: int) -> np.ndarray:
        """Take numbers of free pages."""
        count = min(count, len(self.idle))
        start = number % max(len(self.idle), 1)
        order = self.idle[start:] + self.idle[:start]
        return np.array(order[:count], np.int64)

    def some(self, number: int, among: list[int]) -> np.ndarray:
        """Pick up to three of some pages."""
        if not among:
            return np.zeros(0, np.int64)
        start = number % len(among)
        return np.array(sorted(set((among + among)[start : start + 3])), np.int64)

    @rule(number=PICK, count=st.integers(1, 4))
    def compute(self, number: int, count: int) -> None:
        pages = self.pages(number, count)
        if len(pages) > self.rows.free_pages:
            return
        self.rows.bind(pages)
        for page in pages.tolist():
            self.idle.remove(page)
            self.has[page] = np.ones((LAYERS, TOKENS), np.bool_)

    @rule(
        number=PICK,
        count=st.integers(1, 4),
        seed=PICK,
        share=st.floats(0, 1),
        public=st.booleans(),
    )
    def load_sparse(
        self, number: int, count: int, seed: int, share: float, public: bool
    ) -> None:
        pages = self.pages(number, count)
        rng = np.random.default_rng(seed)
        kept = rng.random((LAYERS, len(pages) * TOKENS)) < share
        if kept.sum() > self.rows.num_free:
            return
        self.rows.bind_kept(pages, [np.flatnonzero(row) for row in kept])
        for place, page in enumerate(pages.tolist()):
            self.idle.remove(page)
            self.has[page] = kept[:, place * TOKENS : (place + 1) * TOKENS].copy()
            self.private.add(page)
        if public:
            self.rows.publish(pages)
            self.private -= set(pages.tolist())

    @rule(number=PICK)
    def publish(self, number: int) -> None:
        # Some of a load's pages may be free by then: the tree had others.
        pages = self.some(number, list(range(1, PAGES + 1)))
        self.rows.publish(pages)
        self.private -= set(pages.tolist())

    @rule(number=PICK)
    def lock(self, number: int) -> None:
        shared = [page for page in self.has if page not in self.private]
        # Those that lack something count; several may hold the same.
        lacking = [page for page in shared if not self.has[page].all()]
        pages = self.some(number, lacking or shared)
        self.rows.hold(pages)
        self.locks.append(pages.tolist())

    @rule(number=PICK)
    def unlock(self, number: int) -> None:
        if self.locks:
            pages = self.locks.pop(number % len(self.locks))
            self.rows.unhold(np.array(pages, np.int64))

    @rule(number=PICK)
    def mend(self, number: int) -> None:
        pages = self.some(number, sorted(self.private))
        lacking = self.rows.num_rows_lacking(pages)
        assert lacking == sum(int((~self.has[page]).sum()) for page in pages.tolist())
        if lacking > self.rows.num_free:
            return
        before = self.rows.table.copy()
        self.rows.make_whole(pages)
        kept = before >= 0
        assert (self.rows.table[kept] == before[kept]).all(), "a row has moved"
        for page in pages.tolist():
            self.has[page][:] = True

    @rule(number=PICK)
    def free(self, number: int) -> None:
        locked = {page for pages in self.locks for page in pages}
        pages = self.some(number, [page for page in self.has if page not in locked])
        self.rows.release(pages)
        for page in pages.tolist():
            del self.has[page]
            self.private.discard(page)
            self.idle.append(page)

    @rule()
    def flush(self) -> None:
        if not self.locks:
            self.rows.clear()
            self.idle += list(self.has)
            self.has.clear()
            self.private.clear()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        rows = getattr(self, "rows", None)
        if rows is None:
            return
        rows.check()
        for page, has in self.has.items():
            found = rows.table[:, page * TOKENS : (page + 1) * TOKENS] >= 0
            assert (found == has).all()
            assert rows.lacks_any(np.array([page])) == (not has.all())
        assert (rows.table[:, :TOKENS] == PADDING_ROW).all()
        used = sum(int(has.sum()) for has in self.has.values())
        assert rows.num_rows - rows.num_free == used
        assert rows.free_pages == (rows.num_rows - used) // (LAYERS * TOKENS)
        locked = {page for pages in self.locks for page in pages}
        lacking = {page: int((~has).sum()) for page, has in self.has.items()}
        assert rows.num_dropped == sum(lacking.values())
        assert rows.num_dropped_unheld == sum(
            num
            for page, num in lacking.items()
            if page not in locked and page not in self.private
        )


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
