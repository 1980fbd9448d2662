"""A gauge has the books that its selection looks at, and no others."""

import numpy as np
import pytest

from sgl_tiered.policies.sparsity.registry import SELECTIONS, make_selection
from sgl_tiered.sparse.gauge import MassGauge

LAYERS, HEADS, PAGE = 2, 3, 4


def gauge(name, **changes):
    facts = {
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "num_slots": 40,
        "page_tokens": PAGE,
        "max_bytes": 1 << 16,
        "most_queries": 200,
    }
    selection = make_selection(name, np.random.default_rng(0))
    return MassGauge(selection, **{**facts, **changes})


@pytest.mark.parametrize("name", SELECTIONS)
def test_books_are_those_that_a_selection_looks_at(name):
    """Memory is taken for these; who looks at nothing takes none."""
    selection = make_selection(name, np.random.default_rng(0))
    made = gauge(name)
    assert (made.every is not None) == selection.needs_mass
    assert (made.last is not None) == (selection.window_tokens > 0)
    assert (made.local_tokens, made.power) == (
        selection.local_tokens,
        selection.mass_power,
    )
    assert (made.num_bytes > 0) == bool(made.books)


@pytest.mark.parametrize("num_queries", [0, 1, 63, 64, 65, 500])
def test_a_window_is_the_last_queries(num_queries):
    """All of a shorter pass."""
    runs = gauge("snapkv").last.runs(num_queries)
    assert sum(run.end - run.begin for run in runs) == min(num_queries, 64)
    assert all(run.end == num_queries and run.weight == 1.0 for run in runs)


def test_all_queries_are_asked_or_a_sample():
    """As many as were allowed at most; together they stand for all."""
    book = gauge("h2o").every
    assert book.runs(200) == [(0, 200, 1.0)]
    runs = book.runs(5000)
    assert sum(run.end - run.begin for run in runs) <= 200
    stand_for = sum((run.end - run.begin) * run.weight for run in runs)
    assert stand_for == pytest.approx(5000)


@pytest.mark.parametrize("name", ["car", "snapkv"])
def test_what_is_kept_comes_back_to_other_slots(name):
    """From the device to the table and to the device again, or forgotten on the way."""
    made, rng = gauge(name), np.random.default_rng(1)
    slots, others = np.arange(8, 16), np.arange(24, 32)
    rows = np.array([5, 2], np.int32)
    for book in made.books:
        for layer in range(LAYERS):
            mass = rng.random((HEADS, 8)).astype(np.float32)
            book.slots.add(layer, slots, mass, np.full(8, 4, np.float32), book.window)
    made.keep(rows, slots)
    assert made.num_pages == 2
    known = made.known(rows)
    made.write(others, known)
    for book in made.books:
        mean, reads = book.slots.read(slots)
        again, reads_again = book.slots.read(others)
        np.testing.assert_allclose(again, mean, rtol=2e-3)
        np.testing.assert_array_equal(reads_again, reads)
    made.forget(others)
    made.forget_rows(rows[:1])
    for book in made.books:
        assert np.isnan(book.slots.read(others)[0]).all()
    for reading in made.known(rows):
        assert np.isnan(reading.mean[:, :, :PAGE]).all()
        assert not np.isnan(reading.mean[:, :, PAGE:]).any()


def test_the_tables_bytes_are_bounded_over_all_books():
    """What was written first is forgotten first."""
    page_bytes = 2 * LAYERS * (HEADS + 1) * PAGE
    made = gauge("car", max_bytes=3 * page_bytes)
    made.every.slots.add(
        0, np.arange(40), np.ones((HEADS, 40), np.float32), np.ones(40, np.float32)
    )
    made.keep(np.arange(10, dtype=np.int32), np.arange(40))
    assert made.num_pages == 3
