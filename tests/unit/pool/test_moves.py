"""Blocks of a cache in use move only where no second copy of a page would result."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import TransferResult
from tests.property.pool_world import LAYOUT, Node, World, content, long_name, pages_of

TOKENS = np.array([7, 97, 7, 98], np.int32)
PAGES = pages_of(TOKENS)
OTHER = {TierId.HOST: TierId.DEVICE, TierId.DEVICE: TierId.HOST}


@pytest.fixture
def node() -> Node:
    """A pool on a cache in use."""
    world = World(in_cache=True)
    node = world.start(0, {TierId.DEVICE: 4, TierId.HOST: 4})
    world.see()
    return node


def put(node: Node, medium: TierId) -> np.ndarray:
    """Insert the prompt's pages in a medium."""
    addresses = node.store.alloc(medium, len(PAGES))
    assert addresses is not None
    node.write(addresses, PAGES)
    assert not node.pool.insert(TOKENS, addresses).refusal
    return addresses


def test_a_page_that_is_on_its_way_is_not_moved_there(node: Node) -> None:
    """The cache offloads pages into a medium; nobody moves them there meanwhile."""
    assert node.cache is not None
    plan = node.cache.plan_offload(long_name(b""), TOKENS)
    assert plan is not None
    assert len(plan.pages) == len(PAGES)
    source = put(node, OTHER[plan.tier])
    assert node.store.move(source, plan.tier) is None
    node.cache.check()
    # Nothing changed: they are there under the same addresses.
    assert not node.store.refusal(source)
    node.regions[plan.tier][plan.addresses] = [content(page) for page in PAGES]
    node.cache.finish_offload(
        plan,
        TransferResult(
            ok=np.ones(len(PAGES), np.bool_),
            num_bytes=len(PAGES) * LAYOUT.page_bytes,
            seconds=0.1,
            checksums=np.zeros(len(PAGES), np.uint64),
            error="",
        ),
    )
    moved = node.store.move(source, plan.tier)
    assert moved is not None
    assert node.read(moved) == [content(page).tobytes() for page in PAGES]
    node.cache.check()


def test_a_page_that_was_dropped_in_use_is_not_moved_there(node: Node) -> None:
    """Its old copy still lies there for whoever reads it."""
    assert node.cache is not None
    held = put(node, TierId.DEVICE)
    node.store.hold(held)
    node.cache.drop_tier(TierId.DEVICE)
    source = put(node, TierId.HOST)
    assert node.store.move(source, TierId.DEVICE) is None
    node.store.release(held)
    assert node.store.move(source, TierId.DEVICE) is not None
    node.cache.check()


@pytest.mark.parametrize("kind", ["active", "historical", "known"])
def test_a_block_that_is_named_twice_is_not_moved(node: Node, kind: str) -> None:
    """Whether a prompt has it or nobody, or its page is in the other medium already."""
    if kind == "active":
        blocks = node.store.alloc(TierId.HOST, 1)
        assert blocks is not None
    else:
        blocks = put(node, TierId.HOST)
    if kind == "known":
        put(node, TierId.DEVICE)
    twice = np.concatenate([blocks[:1], blocks[:1]])
    assert node.store.move(twice, TierId.DEVICE) is None
    assert node.store.move(blocks[:1], TierId.DEVICE) is not None


def test_a_page_that_cannot_be_swapped_out_does_not_keep_others(node: Node) -> None:
    """The coldest has a host copy that was dropped while somebody reads it."""
    assert node.cache is not None
    held = put(node, TierId.HOST)
    node.store.hold(held)
    node.cache.drop_tier(TierId.HOST)
    put(node, TierId.DEVICE)
    other = np.array([8, 97], np.int32)
    blocks = node.store.alloc(TierId.DEVICE, 1)
    assert blocks is not None
    node.write(blocks, pages_of(other))
    assert not node.pool.insert(other, blocks).refusal
    moved = node.pool.swap_out(4)
    assert node.read(moved) == [content(page).tobytes() for page in pages_of(other)]
    node.store.release(held)


def test_a_page_that_is_named_in_two_media_is_not_moved_to_a_third() -> None:
    """It would arrive twice; named once it moves."""
    world = World()
    node = world.start(0, {TierId.DEVICE: 4, TierId.HOST: 4, TierId.CXL: 4})
    copies = [put(node, medium) for medium in (TierId.HOST, TierId.CXL)]
    assert node.store.move(np.concatenate(copies), TierId.DEVICE) is None
    moved = node.store.move(copies[1], TierId.DEVICE)
    assert moved is not None
    assert node.read(moved) == [content(page).tobytes() for page in PAGES]
    # The other goes to where the page is already.
    assert np.array_equal(node.store.move(copies[0], TierId.DEVICE), moved)
