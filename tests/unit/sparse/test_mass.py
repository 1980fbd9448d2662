"""Attention's sums: on slots, beside the table, and of whom they are taken."""

import numpy as np
import pytest

from sgl_tiered.sparse.mass import (
    LOCAL,
    PageMass,
    SlotMass,
    reads_of,
    sampled_queries,
)

LAYERS, TOKENS = 2, 4


@pytest.mark.parametrize("num", [1, 5, 16, 17, 64, 200, 256, 1000, 2048, 9001])
def test_a_sample_is_small_and_has_the_end(num):
    """Ranges ascend, do not overlap, and end with the last query."""
    ranges = sampled_queries(num)
    bounds = [bound for pair in ranges for bound in pair]
    assert bounds == sorted(bounds)
    assert all(begin < end for begin, end in ranges)
    assert ranges[0][0] >= 0
    assert ranges[-1][1] == num
    total = sum(end - begin for begin, end in ranges)
    assert total <= max(16, num // 8)
    assert total <= 128


def test_no_queries_are_no_sample():
    """A forward without new rows asks nobody."""
    assert sampled_queries(0) == []


@pytest.mark.parametrize(("first", "last"), [(100, 108), (10, 200), (0, 64), (64, 65)])
def test_reads_are_counted_from_afar(first, last):
    """One for each query at least so far behind the token."""
    positions = np.arange(150)
    expected = [
        sum(query - position >= LOCAL for query in range(first, last))
        for position in positions
    ]
    assert reads_of(positions, first, last).tolist() == expected


def test_slots_forget_and_remember():
    """Means over all that was added; not known where nobody was asked."""
    mass = SlotMass(LAYERS, 12)
    slots = np.array([3, 5])
    mass.add(0, slots, np.array([1.0, 2.0]), np.array([4.0, 4.0]))
    mass.add(0, slots[:1], np.array([2.0]), np.array([2.0]))
    mean, reads = mass.read(np.array([3, 5, 7]))
    assert mean[0, :2].tolist() == [0.5, 0.5]
    assert np.isnan(mean[0, 2])
    assert np.isnan(mean[1]).all()
    assert reads[0].tolist() == [6.0, 4.0, 0.0]
    mass.write(np.array([8, 9, 10]), mean, reads)
    again, reads_again = mass.read(np.array([8, 9, 10]))
    np.testing.assert_array_equal(again, mean)
    np.testing.assert_array_equal(reads_again, reads)
    mass.forget(np.array([8]))
    assert np.isnan(mass.read(np.array([8]))[0]).all()
    assert not np.isnan(mass.read(np.array([9]))[0][0]).any()


def page_values(rng, num_pages):
    mean = rng.random((LAYERS, num_pages * TOKENS)).astype(np.float16)
    reads = rng.integers(1, 100, mean.shape).astype(np.float32)
    return mean.astype(np.float32), reads


def test_pages_keep_what_was_put_last():
    """Rows in any order, put again, and forgotten with their row."""
    rng = np.random.default_rng(0)
    pages = PageMass(LAYERS, TOKENS, 100)
    rows = np.array([7, 2000, 0], np.int32)
    pages.put(rows, *page_values(rng, 3))
    mean, reads = page_values(rng, 3)
    mean[0, :2], reads[0, :2] = np.nan, 0.0
    pages.put(rows, mean, reads)
    found, seen = pages.get(rows)
    np.testing.assert_array_equal(found, mean)
    np.testing.assert_array_equal(seen, reads)
    assert pages.num_pages == 3
    pages.forget(np.array([7, 5, 90_000], np.int32))
    found, seen = pages.get(rows)
    assert np.isnan(found[:, :TOKENS]).all()
    assert not seen[:, :TOKENS].any()
    np.testing.assert_array_equal(found[:, TOKENS:], mean[:, TOKENS:])
    pages.check()


def test_pages_never_grow_beyond_their_bound():
    """Random puts and forgets: what is known is what was put last, within the bound."""
    rng = np.random.default_rng(1)
    pages, known = PageMass(LAYERS, TOKENS, 40), {}
    for _ in range(300):
        rows = rng.choice(200, rng.integers(0, 60), replace=False).astype(np.int32)
        if rng.random() < 0.3:
            pages.forget(rows)
            for row in rows.tolist():
                known.pop(row, None)
        else:
            mean, reads = page_values(rng, len(rows))
            pages.put(rows, mean, reads)
            for place, row in enumerate(rows.tolist()):
                known[row] = mean[:, place * TOKENS : (place + 1) * TOKENS]
        pages.check()
        every = np.arange(200, dtype=np.int32)
        found = pages.get(every)[0].reshape(LAYERS, 200, TOKENS)
        there = [row for row in range(200) if not np.isnan(found[:, row]).any()]
        assert len(there) == pages.num_pages <= 40
        for row in there:
            np.testing.assert_array_equal(found[:, row], known[row])
