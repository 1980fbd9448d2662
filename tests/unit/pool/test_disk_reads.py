"""Pages that only a holder's disk has: what is read for a peer, when, and when not."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.fetch import Fetch
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.transport.base import TransferStatus
from tests.property.pool_disk import Disk
from tests.property.pool_world import CONFIG, Node, World, content, long_name, pages_of

NOTHING = PoolUsage(0, 0, 0, 0, 0)
DIGEST = long_name(b"")
PROMPT = np.arange(8, dtype=np.int32)
NUM_PAGES = 4


@pytest.fixture
def world() -> World:
    """Two instances that know each other; the disk of the first has a prompt."""
    world = World(in_cache=True, disk_pages=16)
    for n in range(2):
        world.start(n, {TierId.HOST: 8})
    world.see()
    holder = world.nodes[0]
    addresses = holder.pool.alloc_mem(NUM_PAGES, BlockType.HOST)
    assert addresses is not None
    holder.write(addresses, pages_of(PROMPT))
    assert holder.pool.insert(PROMPT, addresses, namespace=DIGEST).num_inserted
    disk_of(holder).forget_host()
    assert not len(holder.pool.match(PROMPT, namespace=DIGEST))
    return world


def disk_of(node: Node) -> Disk:
    assert node.disk is not None
    return node.disk


def begin(world: World, num: int = NUM_PAGES, first_page: int = 0) -> Fetch:
    blocks = world.nodes[1].pool.alloc_mem(num, BlockType.HOST)
    assert blocks is not None
    return world.nodes[1].pool.fetch(
        0, PROMPT, blocks, namespace=DIGEST, first_page=first_page
    )


def talk(world: World) -> None:
    """Carry messages, while no byte moves."""
    for _ in range(4):
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()


def nothing_is_left(world: World) -> None:
    """Neither a block nor a request; the laws of both caches hold."""
    world.settle(4 * CONFIG.grace_s)
    for node in world.nodes.values():
        assert node.pool.usage() == NOTHING
        assert node.cache is not None
        node.cache.check()
        usage = node.store.usage(TierId.HOST)
        assert usage.held == 0
    assert disk_of(world.nodes[0]).reads.num_under_way == 0


def test_pages_of_the_disk_arrive(world: World) -> None:
    """Read first, then sent; the holder keeps the copies, as it would its own."""
    fetch = begin(world)
    talk(world)
    holder = world.nodes[0]
    (reading,) = disk_of(holder).running
    assert not world.pieces
    world.clock.advance(0.25)
    disk_of(holder).end(reading)
    assert fetch.wait() is TransferStatus.DONE
    assert (fetch.num_blocks, fetch.num_read) == (NUM_PAGES, NUM_PAGES)
    assert 0.25 <= fetch.read_s < CONFIG.timeout_s
    wanted = [content(page).tobytes() for page in pages_of(PROMPT)]
    assert world.nodes[1].read(fetch.addresses) == wanted
    assert len(holder.pool.match(PROMPT, namespace=DIGEST)) == NUM_PAGES
    nothing_is_left(world)


def test_a_search_tells_the_tier_and_the_time(world: World) -> None:
    """From the page that is wanted on; a disk that rests has nothing."""
    pool = world.nodes[1].pool
    (held,) = pool.locate(PROMPT, namespace=DIGEST).wait().values()
    assert (held.num_pages, held.media) == (NUM_PAGES, {TierId.DISK: NUM_PAGES})
    assert held.read_s > 0.0
    (part,) = pool.locate(PROMPT, namespace=DIGEST, first_page=3).wait().values()
    assert (part.num_pages, part.media) == (NUM_PAGES, {TierId.DISK: 1})
    assert 0.0 < part.read_s < held.read_s
    cache = world.nodes[0].cache
    assert cache is not None
    cache.rest([TierId.DISK])
    (none,) = pool.locate(PROMPT, namespace=DIGEST).wait().values()
    assert (none.num_pages, none.read_s) == (0, 0.0)
    (other,) = pool.locate(PROMPT, namespace=long_name(b"x")).wait().values()
    assert other.num_pages == 0


def test_a_busy_disk_is_not_read_for_others(world: World) -> None:
    """Memory has none of it, so the peer computes."""
    disk_of(world.nodes[0]).is_busy = True
    fetch = begin(world)
    assert fetch.wait() is TransferStatus.FAILED
    assert "none of these pages" in fetch.error
    assert not disk_of(world.nodes[0]).running
    world.nodes[1].pool.free_mem(fetch.addresses)
    nothing_is_left(world)


def test_own_requests_cut_a_read_short(world: World) -> None:
    """What had come by then is sent."""
    fetch = begin(world)
    talk(world)
    disk = disk_of(world.nodes[0])
    (reading,) = disk.running
    disk.reads.poll()
    assert not reading.is_cancelled
    disk.is_busy = True
    disk.reads.poll()
    assert reading.is_cancelled
    disk.end(reading, 2)
    assert fetch.wait() is TransferStatus.DONE
    assert (fetch.num_blocks, fetch.num_read) == (2, 2)


def test_pages_under_way_for_others_are_bounded(world: World) -> None:
    """By what they may have of the host tier: the first pages alone are read."""
    node = world.nodes[0]
    # Of eight slots.
    node.store._max_active_share = 3 / 8
    first = begin(world, 2)
    talk(world)
    second = begin(world, 2, first_page=2)
    talk(world)
    disk = disk_of(node)
    assert [reading.plan.num_pages for reading in disk.running] == [2, 1]
    for reading in list(disk.running):
        disk.end(reading)
    assert first.wait() is TransferStatus.DONE
    assert second.wait() is TransferStatus.DONE
    assert (first.num_blocks, second.num_blocks) == (2, 1)


def test_a_read_that_does_not_end_is_not_waited_for(world: World) -> None:
    """Half of the peer's patience; then what memory has is sent, or nothing is."""
    fetch = begin(world)
    talk(world)
    assert fetch.wait() is TransferStatus.FAILED
    assert "none of these pages" in fetch.error
    assert world.clock.now() < CONFIG.timeout_s
    world.nodes[1].pool.free_mem(fetch.addresses)
    (reading,) = disk_of(world.nodes[0]).running
    disk_of(world.nodes[0]).end(reading)
    nothing_is_left(world)


def test_an_unreadable_page_is_left_out_and_lost(world: World) -> None:
    """The disk's copy goes, as after any failed check; the peer computes."""
    fetch = begin(world)
    talk(world)
    disk = disk_of(world.nodes[0])
    disk.end(disk.running[0], bad=1)
    assert fetch.wait() is TransferStatus.FAILED
    world.nodes[1].pool.free_mem(fetch.addresses)
    (held,) = world.nodes[1].pool.locate(PROMPT, namespace=DIGEST).wait().values()
    assert held.num_pages == 0
    nothing_is_left(world)


def test_who_gives_up_while_the_disk_is_read_gets_nothing(world: World) -> None:
    """Its blocks are free at once, as nothing was written to them."""
    fetch = begin(world)
    talk(world)
    fetch.fail("nobody wants it any more")
    talk(world)
    receiver = world.nodes[1]
    assert receiver.pool.usage() == NOTHING
    assert world.nodes[0].pool.usage() == NOTHING
    disk = disk_of(world.nodes[0])
    disk.end(disk.running[0])
    talk(world)
    assert not world.pieces
    receiver.pool.free_mem(fetch.addresses)
    nothing_is_left(world)


@pytest.mark.parametrize("who", [0, 1])
def test_what_was_asked_in_another_life_is_not_sent(world: World, who: int) -> None:
    """One of the two has lost its lease meanwhile: the blocks may be others' by now."""
    fetch = begin(world)
    talk(world)
    world.rejoin(who)
    disk = disk_of(world.nodes[0])
    disk.end(disk.running[0])
    talk(world)
    assert not world.pieces
    assert fetch.status is TransferStatus.FAILED
    world.nodes[1].pool.free_mem(fetch.addresses)
    nothing_is_left(world)


def test_a_bounded_number_of_reads(world: World) -> None:
    """Others take what memory has: here nothing."""
    disk = disk_of(world.nodes[0])
    fetches = [begin(world, 1, first_page=page) for page in range(NUM_PAGES)]
    talk(world)
    assert len(disk.running) == NUM_PAGES
    assert disk.reads.begin(DIGEST, PROMPT, 0, 1) is None
    for reading in list(disk.running):
        disk.end(reading)
    assert [fetch.wait() for fetch in fetches] == [TransferStatus.DONE] * NUM_PAGES
