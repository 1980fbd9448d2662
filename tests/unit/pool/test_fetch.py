"""Fetches: what the receiver may rely on, and each way in which one can break."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.pool import serving
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.fetch import Fetch, Held
from sgl_tiered.pool.layouts import MemoryForm, Shard
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.pool.sums import block_sums
from sgl_tiered.transport.base import TransferStatus
from tests.property.pool_world import CONFIG, SHAPE, Node, World, content, pages_of

BLOCKS = {TierId.DEVICE: 4, TierId.HOST: 4}
NOTHING = PoolUsage(0, 0, 0, 0, 0)
PROMPT = np.arange(6, dtype=np.int32)


@pytest.fixture
def world() -> World:
    """Two instances that know each other; the first has a prompt of three pages."""
    world = World()
    for n in range(2):
        world.start(n, BLOCKS)
    world.see()
    holder = world.nodes[0]
    addresses = holder.pool.alloc_mem(3)
    assert addresses is not None
    holder.write(addresses, pages_of(PROMPT))
    holder.pool.insert(PROMPT, addresses)
    return world


def begin(world: World, num: int = 3, first_page: int = 0) -> Fetch:
    blocks = world.nodes[1].pool.alloc_mem(num, BlockType.HOST)
    assert blocks is not None
    return world.nodes[1].pool.fetch(0, PROMPT, blocks, first_page=first_page)


def under_way(world: World) -> None:
    """Carry messages until bytes are with the library."""
    for _ in range(6):
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()
    assert world.pieces


def num_free(node: Node) -> int:
    return sum(each.free for each in node.usage())


def test_pages_arrive_in_the_blocks_given(world: World) -> None:
    """From the first page asked for on; nothing is under way afterwards."""
    fetch = begin(world, 2, first_page=1)
    assert fetch.wait() is TransferStatus.DONE
    assert fetch.num_blocks == 2
    wanted = [content(page).tobytes() for page in pages_of(PROMPT)[1:]]
    assert world.nodes[1].read(fetch.addresses) == wanted
    for node in world.nodes.values():
        assert node.pool.usage() == NOTHING


def test_what_the_holder_does_not_have_is_left_out(world: World) -> None:
    """The first blocks are filled; the caller is told how many."""
    fetch = begin(world, 4)
    assert fetch.wait() is TransferStatus.DONE
    assert fetch.num_blocks == 3


def test_a_holder_without_the_prompt_refuses(world: World) -> None:
    """The blocks are the caller's again as soon as nothing writes to them."""
    world.nodes[0].pool.delete(PROMPT)
    fetch = begin(world)
    assert fetch.wait() is TransferStatus.FAILED
    assert "none of these pages" in fetch.error
    assert not world.nodes[1].pool.free_mem(fetch.addresses)
    world.settle(1.0)
    assert num_free(world.nodes[1]) == 8


def test_a_wrong_byte_is_found_before_anybody_uses_it(world: World) -> None:
    """The fetch fails, and its blocks are used again after the grace time only."""
    fetch = begin(world)
    under_way(world)
    for piece in list(world.pieces):
        world.end_piece(piece, arrives=True)
    receiver = world.nodes[1]
    receiver.regions[TierId.HOST][:, 5] ^= 1
    assert fetch.wait() is TransferStatus.FAILED
    assert "not those that were sent" in fetch.error
    assert fetch.num_blocks == 0
    assert not receiver.pool.free_mem(fetch.addresses)
    assert num_free(receiver) == 5
    world.settle(CONFIG.grace_s + 1.0)
    assert num_free(receiver) == 8
    assert receiver.pool.usage() == NOTHING


def test_blocks_of_a_late_fetch_are_free_when_the_holder_says_so(world: World) -> None:
    """It answers the cancellation when its push has ended; no grace time passes."""
    fetch = begin(world)
    under_way(world)
    world.clock.advance(CONFIG.timeout_s)
    receiver = world.nodes[1]
    receiver.poll()
    assert fetch.status is TransferStatus.TIMED_OUT
    assert not receiver.pool.free_mem(fetch.addresses)
    for _ in range(4):
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()
    assert num_free(receiver) == 5
    world.advance(20.0)
    world.settle(CONFIG.grace_s)
    assert num_free(receiver) == 8


def test_blocks_lent_to_a_dead_holder_are_free_after_the_grace_time(
    world: World,
) -> None:
    """What it handed to the network may arrive until then."""
    fetch = begin(world)
    under_way(world)
    world.start(0, BLOCKS)
    world.see()
    receiver = world.nodes[1]
    receiver.poll()
    assert "is gone" in fetch.error
    assert not receiver.pool.free_mem(fetch.addresses)
    world.clock.advance(CONFIG.grace_s - 0.1)
    receiver.poll()
    assert num_free(receiver) == 5
    world.clock.advance(0.2)
    receiver.poll()
    assert num_free(receiver) == 8


def test_a_holder_serves_a_bounded_number(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are refused, and nothing is set aside for them."""
    monkeypatch.setattr(serving, "MAX_SERVED", 1)
    first, second = begin(world, 1), begin(world, 1)
    under_way(world)
    assert first.wait() is TransferStatus.DONE
    assert second.wait() is TransferStatus.FAILED
    assert "served already" in second.error
    world.settle(1.0)
    assert world.nodes[1].pool.usage() == NOTHING


def test_what_cannot_be_fetched_is_said_at_once(world: World) -> None:
    """No such holder, blocks that are not ours, or lent already."""
    pool = world.nodes[1].pool
    blocks = pool.alloc_mem(2, BlockType.HOST)
    assert blocks is not None
    assert "not in the pool" in pool.fetch(7, PROMPT, blocks).error
    assert "this instance" in pool.fetch(1, PROMPT, blocks).error
    assert "no blocks" in pool.fetch(0, PROMPT, blocks[:0]).error
    assert "twice" in pool.fetch(0, PROMPT, blocks[[0, 0]]).error
    assert not pool.fetch(0, PROMPT, blocks).error
    assert "another fetch" in pool.fetch(0, PROMPT, blocks[:1]).error


def test_instances_say_what_they_hold(world: World) -> None:
    """By medium; one that does not answer is left out in time."""
    holder, asker = world.nodes[0], world.nodes[1]
    moved = holder.pool.swap_out(1)
    assert len(moved) == 1
    held = asker.pool.locate(PROMPT).wait()
    assert held == {0: Held(3, {TierId.DEVICE: 2, TierId.HOST: 1})}
    silent = asker.pool.locate(PROMPT, ids=[0, 9])
    world.messages.clear()
    world.clock.advance(CONFIG.locate_s)
    asker.poll()
    assert silent.is_over
    assert not silent.held
    assert asker.pool.usage() == NOTHING


def test_only_what_the_receiver_lacks_is_sent(world: World) -> None:
    """It is asked first; a prompt that it has whole costs no byte."""
    holder, receiver = world.nodes[0], world.nodes[1]
    blocks = holder.pool.match(PROMPT)

    def send(num: int):
        found = holder.pool.transfer_with_insert(
            1, PROMPT, blocks[:num], only_missing=True
        )
        assert found.wait() is TransferStatus.DONE, found.error
        return found

    assert send(2).num_known == 0
    second = send(3)
    assert second.num_known == 2
    assert len(second.targets) == 1
    assert send(3).num_known == 3
    assert receiver.read(receiver.pool.match(PROMPT)) == [
        content(page).tobytes() for page in pages_of(PROMPT)
    ]
    world.settle(1.0)
    for node in world.nodes.values():
        assert node.pool.usage() == NOTHING


def test_a_draining_instance_takes_no_blocks_and_is_read_still(world: World) -> None:
    """So that what it holds can go elsewhere."""
    view = world.view()
    members = (replace(view.members[0], draining=True), view.members[1])
    for node in world.nodes.values():
        node.see(replace(view, members=members, version=99))
    sender = world.nodes[1]
    assert sender.pool.alloc_mem(1, id=0) is None
    assert begin(world).wait() is TransferStatus.DONE


def test_sums_do_not_depend_on_how_pages_lie() -> None:
    """Aggregated with padding, or keys and values apart, layer by layer."""
    (shard,) = Shard.split(SHAPE, 1, 1)
    layout = shard.layout(SHAPE)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (3, layout.page_bytes + 7), np.uint8)
    pages = rows[:, : layout.page_bytes].reshape(
        3, layout.num_layers, 2, layout.part_bytes
    )
    apart = np.ascontiguousarray(pages.transpose(1, 2, 0, 3))
    slots = np.array([2, 0])
    one = MemoryForm.aggregated(SHAPE, shard, layout.page_bytes + 7)
    other = MemoryForm.discrete(SHAPE, shard, 3)
    sums = block_sums(SHAPE, one, rows, slots)
    assert sums.tolist() == block_sums(SHAPE, other, apart, slots).tolist()
    assert len(set(sums.tolist())) == 2
    rows[2, layout.page_bytes - 1] ^= 1
    assert (block_sums(SHAPE, one, rows, slots) != sums).tolist() == [True, False]


def test_who_does_not_answer_is_lent_half_of_the_blocks(world: World) -> None:
    """It keeps them until it speaks: for other holders there is room."""
    fetch = begin(world, 3)
    world.clock.advance(CONFIG.timeout_s)
    receiver = world.nodes[1]
    receiver.poll()
    assert fetch.status is TransferStatus.TIMED_OUT
    assert not receiver.pool.free_mem(fetch.addresses)
    assert begin(world, 1).status is TransferStatus.RUNNING
    blocks = receiver.pool.alloc_mem(1)
    assert blocks is not None
    refused = receiver.pool.fetch(0, PROMPT, blocks)
    assert refused.status is TransferStatus.FAILED
    assert "was lent before" in refused.error
    assert receiver.pool.usage().num_lent_blocks == 4
    assert not receiver.pool.free_mem(blocks)


def test_half_of_the_blocks_is_half_of_what_there_are_by_now() -> None:
    """Memory that a device pins is added part by part."""
    world = World(in_cache=True, num_open=4)
    for n in range(2):
        world.start(n, {TierId.HOST: 8})
    world.see()
    receiver = world.nodes[1]
    fetch = begin(world, 2)
    world.clock.advance(CONFIG.timeout_s)
    receiver.poll()
    assert fetch.status is TransferStatus.TIMED_OUT
    assert not receiver.pool.free_mem(fetch.addresses)
    assert "was lent before" in begin(world, 2).error
    assert receiver.cache is not None
    receiver.cache.open_slots(TierId.HOST, 8)
    assert begin(world, 2).status is TransferStatus.RUNNING
    assert "was lent before" in begin(world, 1).error
