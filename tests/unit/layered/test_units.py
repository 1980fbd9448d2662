"""Groups, units and what a forward takes, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.layered.units import cut_groups, layer_pages_needed, plan_reads

HALVES = (np.array([90, 91, 92], np.int32), np.array([95, 96, 97], np.int32))


@pytest.mark.parametrize(
    ("needs", "groups"),
    [
        ([[0, 0], [0, 0]], ((0, 2),)),
        ([[2, 1], [1, 2]], ((0, 2),)),
        ([[2, 1], [1, 3]], ((0, 1), (1, 2))),
        ([[3, 3, 0, 0], [0, 0, 3, 1]], ((0, 1), (1, 3), (3, 4))),
        ([[], []], ((0, 0),)),
    ],
)
def test_groups_fit_a_half_in_every_layer(
    needs: list[list[int]], groups: tuple[tuple[int, int], ...]
) -> None:
    """The fewest runs of neighbours, none above three pages in any layer."""
    assert cut_groups(np.array(needs, np.int64), 3) == groups


def test_units_take_the_halves_in_turn() -> None:
    """Layers without host pages make no unit; a shared page is staged once."""
    pages = np.array([4, 5, 4, 6])  # two requests, page 4 shared
    indptr = np.array([0, 2, 4])
    bound = np.array([[-1, 1, -1, -1], [2, 3, 2, 4], [-1, 5, -1, 6]], np.int32)
    plan = plan_reads(bound.copy(), bound < 0, pages, indptr, HALVES)
    assert plan.groups == ((0, 2),)
    assert plan.unit_of.tolist() == [[0], [-1], [1]]
    assert [unit.rows.tolist() for unit in plan.units] == [[4, 6], [4]]
    assert plan.table.tolist() == [[90, 1, 90, 91], [2, 3, 2, 4], [95, 5, 95, 6]]


def test_units_follow_the_order_of_reading() -> None:
    """Layer by layer, in each the groups."""
    pages, indptr = np.arange(6), np.array([0, 3, 6])
    bound = np.full((2, 6), -1, np.int32)
    plan = plan_reads(bound, bound < 0, pages, indptr, HALVES)
    assert plan.groups == ((0, 1), (1, 2))
    assert [(u.layer, u.group) for u in plan.units] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert plan.table.tolist() == [[90, 91, 92, 95, 96, 97]] * 2


def test_nothing_on_the_host_makes_one_group_and_no_unit() -> None:
    """Then the table is where the pages are."""
    bound = np.array([[7, 8]], np.int32)
    pages = np.array([0, 1])
    plan = plan_reads(bound, bound < 0, pages, np.array([0, 1, 2]), HALVES)
    assert (plan.groups, plan.units) == (((0, 2),), ())
    assert plan.table.tolist() == [[7, 8]]


@pytest.mark.parametrize(
    ("num_context", "num_new", "kept", "count"),
    [
        (0, 8, 4, 16),  # four pages in four layers
        (0, 8, 0, 8),  # two layers at a time
        (0, 8, 3, 16),  # the one that is left
        (0, 9, 0, 12),  # and the tail in all
        (8, 1, 0, 4),  # a new page of a decoder
        (9, 1, 0, 0),  # none
        (3, 6, 1, 10),  # two pages in one layer and two passing; the tail
    ],
)
def test_what_a_forward_takes(
    num_context: int, num_new: int, kept: int, count: int
) -> None:
    """Pages of two tokens, four layers."""
    retained = np.arange(4) < kept
    assert layer_pages_needed(num_context, num_new, retained, 2) == count
