"""The sizes that SGLang compares: free, evictable and in use make up the whole."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.sparse.capacity import (
    SLOT_FACTOR,
    RowPlan,
    SparseSizes,
    allocator_class,
    plan_rows,
    pool_class,
)

LAYERS, TOKENS, PAGES = 2, 4, 10
LAYOUT = PageLayout(LAYERS, TOKENS, 64)


@dataclass(frozen=True, slots=True)
class Checker:
    """Like SGLang's: frozen, with a size given once."""

    max_total_num_tokens: int


@pytest.fixture
def made():
    """Rows, their sizes, and a scheduler whose parts compare."""
    rows = RowPlan(LAYOUT, SLOT_FACTOR * PAGES, PAGES).binding()
    sizes = SparseSizes(rows, SLOT_FACTOR * PAGES)
    scheduler = SimpleNamespace(one=Checker(0), other=None)
    sizes.comparing.append((scheduler, ("one", "other", "made later")))
    return rows, sizes, scheduler


def test_a_pool_without_sparse_pages_has_its_own_size(made):
    """Whatever is taken of it."""
    rows, sizes, scheduler = made
    assert sizes.total == PAGES * TOKENS
    rows.bind(np.array([3, 7]))
    sizes.update(SLOT_FACTOR * PAGES - 2)
    assert sizes.free_pages(SLOT_FACTOR * PAGES - 2) == PAGES - 2
    assert scheduler.one.max_total_num_tokens == sizes.total == PAGES * TOKENS


def test_what_sparse_pages_in_use_leave_free_is_room_for_others(made):
    """And counts for nothing once they are cached only: then an eviction frees less."""
    rows, sizes, scheduler = made
    # Four pages with half of their rows take the room of two.
    half = [np.arange(0, 4 * TOKENS, 2)] * LAYERS
    pages, free = np.array([1, 2, 3, 4]), SLOT_FACTOR * PAGES - 4
    rows.bind_kept(pages, half)
    sizes.update(free)
    assert sizes.free_pages(free) == PAGES - 2
    assert sizes.unevictable == 0
    assert scheduler.one.max_total_num_tokens == (PAGES + 2) * TOKENS
    rows.publish(pages)
    sizes.update(free)
    assert sizes.unevictable == 2 * TOKENS
    assert scheduler.one.max_total_num_tokens == PAGES * TOKENS
    rows.hold(pages[:1])
    sizes.update(free)
    # Three pages free the room of one and a half: one, in whole pages.
    assert sizes.unevictable == 2 * TOKENS
    rows.release(pages[1:])
    sizes.update(free + 3)
    assert sizes.free_pages(free + 3) == PAGES - 1
    assert scheduler.one.max_total_num_tokens == PAGES * TOKENS


def test_numbers_of_pages_can_run_out_first(made):
    """Where pages keep next to nothing."""
    rows, sizes, _ = made
    pages = np.arange(1, SLOT_FACTOR * PAGES)
    rows.bind_kept(pages, [np.zeros(0, np.int64)] * LAYERS)
    assert sizes.free_pages(1) == 1
    sizes.update(1)
    assert sizes.total == SLOT_FACTOR * PAGES * TOKENS


def test_nothing_is_planned_where_it_is_off():
    """SGLang's own pool and allocator are made."""
    plan_rows(None)
    assert pool_class() is None
    assert allocator_class() is None
