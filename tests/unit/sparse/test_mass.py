"""Attention's sums: on slots, beside the table, and of whom they are taken."""

import numpy as np
import pytest

from sgl_tiered.sparse.mass import (
    PageMass,
    Run,
    SlotMass,
    reads_of,
    sampled_queries,
)

LAYERS, HEADS, TOKENS = 2, 3, 4


@pytest.mark.parametrize("most", [128, 200, 1024])
@pytest.mark.parametrize("num", [1, 64, 129, 200, 201, 1000, 1025, 9001])
def test_a_sample_stands_for_all(num, most):
    """Runs ascend and do not overlap; the last queries are in, at their own weight."""
    runs = sampled_queries(num, most)
    bounds = [bound for run in runs for bound in run[:2]]
    assert bounds == sorted(bounds)
    assert bounds[0] >= 0
    assert all(run.begin < run.end and run.weight >= 1.0 for run in runs)
    assert runs[-1].end == num
    assert runs[-1].weight == 1.0
    asked = sum(run.end - run.begin for run in runs)
    assert asked <= min(num, most)
    assert asked == num or asked > most - 32
    assert sum((run.end - run.begin) * run.weight for run in runs) == pytest.approx(num)


def test_no_queries_are_no_sample():
    """A forward without new rows asks nobody; a few are asked all."""
    assert sampled_queries(0, 128) == []
    assert sampled_queries(5, 128) == [Run(0, 5, 1.0)]


def test_a_samples_sums_come_near_those_of_all():
    """A token that every query reads alike has the mass and the readers of all."""
    num = 3000
    positions = np.arange(num)
    wanted = reads_of(positions, 0, num, 64)
    found = np.zeros(num)
    for begin, end, weight in sampled_queries(num, 512):
        found += weight * reads_of(positions, begin, end, 64)
    # Off by half of what a run stands for, at most.
    assert np.abs(found - wanted).max() <= num / ((512 - 64) / 32) / 2 + 32
    assert abs(found.sum() / wanted.sum() - 1.0) < 0.02


@pytest.mark.parametrize("local", [0, 64])
@pytest.mark.parametrize(("first", "last"), [(100, 108), (10, 200), (0, 64), (64, 65)])
def test_reads_are_counted_from_afar(first, last, local):
    """One for each query at least so far behind the token."""
    positions = np.arange(150)
    expected = [
        sum(query - position >= local for query in range(first, last))
        for position in positions
    ]
    assert reads_of(positions, first, last, local).tolist() == expected


def of_heads(*values):
    """Return [HEADS, n]: each head has as much as its number, from 1, says."""
    return np.array(values, np.float32) * np.arange(1, HEADS + 1)[:, None]


def test_slots_forget_and_remember():
    """Means over all that was added; not known where nobody was asked."""
    mass = SlotMass(LAYERS, HEADS, 12)
    slots = np.array([3, 5])
    mass.add(0, slots, of_heads(1.0, 2.0), np.array([4.0, 4.0]))
    mass.add(0, slots[:1], of_heads(2.0), np.array([2.0]))
    mean, reads = mass.read(np.array([3, 5, 7]))
    assert mean[0, :, :2].tolist() == [[0.5, 0.5], [1.0, 1.0], [1.5, 1.5]]
    assert np.isnan(mean[0, :, 2]).all()
    assert np.isnan(mean[1]).all()
    assert reads[0].tolist() == [6.0, 4.0, 0.0]
    mass.write(np.array([8, 9, 10]), mean, reads)
    again, reads_again = mass.read(np.array([8, 9, 10]))
    np.testing.assert_array_equal(again, mean)
    np.testing.assert_array_equal(reads_again, reads)
    mass.forget(np.array([8]))
    assert np.isnan(mass.read(np.array([8]))[0]).all()
    assert not np.isnan(mass.read(np.array([9]))[0][0]).any()


def test_a_window_has_its_last_queries_only():
    """A whole window takes the place of all before; a shorter one of its own part."""
    mass, slot = SlotMass(LAYERS, HEADS, 4), np.array([2])

    def add(mean, reads):
        mass.add(1, slot, of_heads(mean * reads), np.array([reads]), 64)
        found, count = mass.read(slot)
        return float(found[1, 0, 0]), float(count[1, 0])

    assert add(0.5, 20.0) == (0.5, 20.0)
    # Room is left in the window, so nothing fades.
    assert add(1.0, 20.0) == (0.75, 40.0)
    assert add(2.0, 64.0) == (2.0, 64.0)
    # A quarter is new, and the rest stands for the turn before.
    assert add(0.0, 16.0) == pytest.approx((1.5, 64.0))


def page_values(rng, num_pages):
    mean = rng.random((LAYERS, HEADS, num_pages * TOKENS)).astype(np.float16)
    reads = rng.integers(1, 100, (LAYERS, num_pages * TOKENS)).astype(np.float32)
    return mean.astype(np.float32), reads


def test_pages_keep_what_was_put_last():
    """Rows in any order, put again, and forgotten with their row."""
    rng = np.random.default_rng(0)
    pages = PageMass(LAYERS, HEADS, TOKENS, 100)
    rows = np.array([7, 2000, 0], np.int32)
    pages.put(rows, *page_values(rng, 3))
    mean, reads = page_values(rng, 3)
    mean[0, :, :2], reads[0, :2] = np.nan, 0.0
    pages.put(rows, mean, reads)
    found, seen = pages.get(rows)
    np.testing.assert_array_equal(found, mean)
    np.testing.assert_array_equal(seen, reads)
    assert pages.num_pages == 3
    pages.forget(np.array([7, 5, 90_000], np.int32))
    found, seen = pages.get(rows)
    assert np.isnan(found[:, :, :TOKENS]).all()
    assert not seen[:, :TOKENS].any()
    np.testing.assert_array_equal(found[:, :, TOKENS:], mean[:, :, TOKENS:])
    pages.check()


@pytest.mark.parametrize("least", [1e-7, 1e-6, 1e-5, 1e-3, 30.0])
def test_pages_rank_tokens_as_they_were_put(least):
    """Of a long prompt most tokens get next to nothing: which got less is known."""
    pages, rows = PageMass(LAYERS, HEADS, TOKENS, 100), np.array([3], np.int32)
    mean = np.zeros((LAYERS, HEADS, TOKENS), np.float32)
    mean[:] = least * (1 + np.arange(TOKENS) / 100)
    reads = np.full((LAYERS, TOKENS), 9e4, np.float32)
    pages.put(rows, mean, reads)
    found, seen = pages.get(rows)
    assert (np.diff(found, axis=2) > 0).all(), found[0, 0]
    np.testing.assert_allclose(found, mean, rtol=5e-3)
    # More say nothing new, and no number is infinite.
    assert (seen == 6e4).all()


def test_pages_never_grow_beyond_their_bound():
    """Random puts and forgets: what is known is what was put last, within the bound."""
    rng = np.random.default_rng(1)
    pages, known = PageMass(LAYERS, HEADS, TOKENS, 40), {}
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
                known[row] = mean[:, :, place * TOKENS : (place + 1) * TOKENS]
        pages.check()
        every = np.arange(200, dtype=np.int32)
        found = pages.get(every)[0].reshape(LAYERS, HEADS, 200, TOKENS)
        there = [row for row in range(200) if not np.isnan(found[:, :, row]).any()]
        assert len(there) == pages.num_pages <= 40
        for row in there:
            np.testing.assert_array_equal(found[:, :, row], known[row])
