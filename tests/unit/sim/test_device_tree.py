"""The device's tree: sharing, locks, eviction, and the law that pages add up."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.sim.device_tree import DeviceTree


def raw(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def keep(tree: DeviceTree, *ids: int) -> None:
    """Let a request compute these pages and leave them to the tree."""
    node, num_matched = tree.match(raw(*ids))
    tree.lock(node)
    assert tree.take_private(len(ids) - num_matched)
    end, _ = tree.insert(raw(*ids), num_matched)
    tree.unlock(node)
    tree.check()
    assert end is tree.match(raw(*ids))[0]


def test_pages_are_shared_up_to_where_prompts_part() -> None:
    """A run is split there, and only the rest of the second takes room."""
    tree = DeviceTree(10)
    keep(tree, 1, 2, 3, 4)
    keep(tree, 1, 2, 5)
    assert tree.tree_pages == 5
    assert tree.match(raw(1, 2, 9))[1] == 2
    assert tree.match(raw(7))[1] == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    """A match counts as a use; leaves go whole."""
    tree = DeviceTree(6)
    keep(tree, 1, 2)
    keep(tree, 3, 4)
    keep(tree, 5, 6)
    tree.match(raw(1, 2))
    assert tree.take_private(1)
    assert [tree.match(raw(*ids))[1] for ids in ((1, 2), (3, 4), (5, 6))] == [2, 0, 2]
    assert (tree.free_pages, tree.num_evicted_pages) == (1, 2)


def test_locked_pages_stay_and_so_do_those_before_them() -> None:
    """What is locked is not available, and a request that needs it is refused."""
    tree = DeviceTree(4)
    keep(tree, 1, 2, 3)
    node, _ = tree.match(raw(1, 2))
    tree.lock(node)
    assert tree.available_pages == 2
    assert not tree.take_private(3)
    assert tree.take_private(2)
    assert tree.match(raw(1, 2, 3))[1] == 2
    tree.give_private(2)
    tree.unlock(node)
    tree.check()
    assert tree.available_pages == 4


def test_a_page_computed_twice_is_kept_once() -> None:
    """The second request's own copy is freed when it is published."""
    tree = DeviceTree(8)
    assert tree.take_private(4)
    _, first = tree.insert(raw(1, 2), 0)
    _, second = tree.insert(raw(1, 2), 0)
    assert (first, second) == (0, 2)
    assert (tree.tree_pages, tree.private_pages, tree.free_pages) == (2, 0, 6)


def test_unlocking_too_often_is_a_broken_law() -> None:
    """It would let a page go that somebody needs."""
    tree = DeviceTree(4)
    keep(tree, 1)
    node, _ = tree.match(raw(1))
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(node)


def test_finding_is_no_use_and_splits_nothing() -> None:
    """Pages are counted into the middle of a run, and the coldest stays the coldest."""
    tree = DeviceTree(4)
    keep(tree, 1, 2)
    keep(tree, 3, 4)
    node, count = tree.find(raw(1, 9))
    assert (count, node.num_pages) == (1, 2)
    assert tree.find(raw(1, 2, 5))[1] == 2
    assert tree.find(raw(7))[1] == 0
    assert tree.take_private(1)
    assert [tree.find(raw(*ids))[1] for ids in ((1, 2), (3, 4))] == [0, 2]
