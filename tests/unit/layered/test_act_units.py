"""Units of two kinds: what crosses the link as what, and where KV is computed."""

from __future__ import annotations

import numpy as np

from sgl_tiered.layered.rebuilding import exposed_s
from sgl_tiered.layered.units import ActSource, cut_groups, plan_reads

LAYERS, PAGES = 2, 8
HALVES = (np.arange(10, 14, dtype=np.int32), np.arange(20, 24, dtype=np.int32))
ACT_HALVES = (np.arange(1, 3, dtype=np.int32), np.arange(3, 5, dtype=np.int32))


def source(*acts: int) -> ActSource:
    """Return what says that these pages are activations; 3 is on the device."""
    is_act = np.isin(np.arange(PAGES), acts)
    act = np.full((LAYERS, PAGES), -1, np.int32)
    act[:, 3] = 9 if 3 in acts else -1
    return ActSource(
        is_act, np.arange(PAGES) + 100, act, np.arange(PAGES) * 16, ACT_HALVES
    )


def plan(found: ActSource, pages: list[int], indptr: list[int]):  # type: ignore[no-untyped-def]
    numbers = np.array(pages, np.int64)
    bound = np.full((LAYERS, len(numbers)), -1, np.int32)
    staged = np.ones_like(bound, np.bool_)
    return plan_reads(bound, staged, numbers, np.array(indptr, np.int64), HALVES, found)


def test_each_kind_goes_its_way_to_one_half() -> None:
    """KV and activations from their rows, those on the device without the link.

    What is computed lies side by side.
    """
    reads = plan(source(1, 3), [0, 1, 2, 3], [0, 4])
    assert len(reads.units) == LAYERS
    for layer, unit in enumerate(reads.units):
        half, act_half = HALVES[layer], ACT_HALVES[layer]
        assert unit.rows.tolist() == [100, 102]
        assert unit.targets.tolist() == half[[2, 3]].tolist()
        assert unit.acts is not None
        assert unit.device_acts is not None
        assert unit.acts.rows.tolist() == [101]
        assert unit.acts.acts.tolist() == act_half[:1].tolist()
        assert unit.acts.targets.tolist() == half[[0]].tolist()
        assert unit.acts.positions.tolist() == [16]
        assert len(unit.device_acts.rows) == 0
        assert unit.device_acts.acts.tolist() == [9]
        assert unit.device_acts.targets.tolist() == half[[1]].tolist()
        assert unit.device_acts.positions.tolist() == [48]
        assert sorted(unit.pages.tolist()) == [0, 1, 2, 3]
        assert reads.table[layer].tolist() == half[[2, 0, 3, 1]].tolist()
        assert (unit.num_acts, unit.num_rebuilt, unit.rebuilds) == (1, 2, True)


def test_groups_fit_both_halves() -> None:
    """Three pages of activations do not fit two places; one on the device does."""
    assert plan(source(0, 1, 2), [0, 1, 2], [0, 1, 2, 3]).groups == ((0, 2), (2, 3))
    assert plan(source(0, 1, 3), [0, 1, 3], [0, 1, 2, 3]).groups == ((0, 3),)
    needs = np.array([[1, 1, 1], [2, 0, 2]], np.int64)
    assert cut_groups(needs, np.array([3, 4])) == ((0, 3),)
    assert cut_groups(needs, np.array([3, 3])) == ((0, 2), (2, 3))


def test_a_shared_page_is_rebuilt_once() -> None:
    """And read by both requests."""
    reads = plan(source(1), [1, 0, 1, 2], [0, 2, 4])
    assert all(unit.num_acts == 1 for unit in reads.units)
    assert reads.table[0, 0] == reads.table[0, 2]


def test_without_pages_of_activations_nothing_is_rebuilt() -> None:
    """A unit of KV is as it was, by its rows."""
    unit = plan(source(), [4, 5], [0, 2]).units[0]
    assert not unit.rebuilds
    assert unit.rows.tolist() == [104, 105]
    assert unit.pages.tolist() == [4, 5]


def test_only_what_is_left_after_the_last_load_is_exposed() -> None:
    """Of spans before, across and after it."""
    assert exposed_s([(0.0, 1.0), (1.5, 3.0), (4.0, 4.5)], 2.0) == 1.5
