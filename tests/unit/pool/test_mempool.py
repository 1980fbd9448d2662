"""MemPool: what its calls promise, and each way in which a conversation can break."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.core.addresses import mediums_of
from sgl_tiered.core.ids import TierId
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.pool.transfer import Transfer
from sgl_tiered.transport.base import TransferStatus
from tests.property.pool_world import CONFIG, Node, World, content, pages_of

BLOCKS = {TierId.DEVICE: 4, TierId.HOST: 4}
NOTHING = PoolUsage(0, 0, 0, 0, 0)
PROMPT = np.arange(6, dtype=np.int32)


@pytest.fixture(params=[False, True], ids=["own table", "cache in use"])
def world(request: pytest.FixtureRequest) -> World:
    """Two instances that know each other."""
    world = World(in_cache=request.param)
    for n in range(2):
        world.start(n, BLOCKS)
    see(world)
    return world


def see(world: World) -> None:
    for node in world.nodes.values():
        node.see(world.view())


def filled(node: Node, tokens: np.ndarray = PROMPT) -> np.ndarray:
    """Blocks with the pages of a prompt."""
    pages = pages_of(tokens)
    addresses = node.pool.alloc_mem(len(pages))
    assert addresses is not None
    node.write(addresses, pages)
    return addresses


def under_way(world: World, transfer: Transfer) -> None:
    """Carry messages until the bytes of a transfer are with the library."""
    for _ in range(6):
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()
    assert world.pieces
    assert transfer.status is TransferStatus.RUNNING


def holds_prompt(node: Node, addresses: np.ndarray) -> bool:
    expected = [content(page).tobytes() for page in pages_of(PROMPT)[: len(addresses)]]
    return node.read(addresses) == expected


# One instance.


def test_a_prompt_is_found_where_it_was_inserted(world: World) -> None:
    """Whole pages, in order; a prompt that parts from it finds what is common."""
    node = world.nodes[0]
    addresses = filled(node)
    assert node.pool.insert(PROMPT, addresses).num_inserted == 3
    assert node.pool.match(PROMPT).tolist() == addresses.tolist()
    parting = np.append(PROMPT[:4], [9, 9])
    assert node.pool.match(parting).tolist() == addresses[:2].tolist()
    assert node.pool.delete(PROMPT) == 3
    assert not len(node.pool.match(PROMPT))
    assert node.pool.free_mem(addresses), "they were freed with the prompt"


def test_pages_that_others_go_on_from_are_not_deleted(world: World) -> None:
    """Only what the deleted prompt has alone goes."""
    node = world.nodes[0]
    node.pool.insert(PROMPT, filled(node))
    other = np.append(PROMPT[:4], [9, 9])
    block = filled(node, other[4:])
    assert node.pool.insert(other, block, first_page=2).num_inserted == 1
    assert node.pool.delete(other) == 1
    assert len(node.pool.match(PROMPT)) == 3


def test_known_pages_come_back_as_duplicates(world: World) -> None:
    """Their blocks stay the caller's, unless it gives them up."""
    node = world.nodes[0]
    node.pool.insert(PROMPT[:4], filled(node, PROMPT[:4]))
    done = node.pool.insert(PROMPT[:2], again := filled(node, PROMPT[:2]))
    assert done.num_inserted == 0
    assert done.duplicates.tolist() == again.tolist()
    node.pool.insert(PROMPT[:2], again, free_duplicates=True)
    assert node.pool.free_mem(again)


@pytest.mark.parametrize(
    ("first", "num", "words"), [(1, 1, "missing"), (0, 4, "more blocks")]
)
def test_what_cannot_be_inserted_is_refused(
    world: World, first: int, num: int, words: str
) -> None:
    """A hole before the pages, or blocks without tokens: nothing changes."""
    pool = world.nodes[0].pool
    addresses = pool.alloc_mem(num)
    assert addresses is not None
    assert words in pool.insert(PROMPT, addresses, first_page=first).refusal
    assert not pool.free_mem(addresses)


def test_full_pool_evicts_what_is_cold_and_nothing_active(world: World) -> None:
    """Historical blocks make room from their end; active ones do not."""
    node = world.nodes[0]
    node.pool.insert(PROMPT, filled(node))
    more = node.pool.alloc_mem(3)
    assert more is not None
    assert len(node.pool.match(PROMPT)) == 1
    assert node.pool.alloc_mem(2) is None
    assert len(node.pool.match(PROMPT)) == 1, "nothing changes without success"


def test_known_and_new_pages_in_two_media_are_all_evictable(world: World) -> None:
    """As many blocks of one medium as there are new pages, but not the same pages."""
    node = world.nodes[0]
    tokens = np.arange(10, dtype=np.int32)
    node.pool.insert(tokens[:2], filled(node, tokens[:2]))
    assert len(node.pool.swap_out(1)) == 1
    addresses = node.pool.alloc_mem(5, BlockType.MIXED)
    assert addresses is not None
    assert node.pool.insert(tokens, addresses).num_inserted == 5
    assert node.pool.alloc_mem(4) is not None
    assert node.pool.alloc_mem(4, BlockType.HOST) is not None


def test_mixed_blocks_fill_the_device_first(world: World) -> None:
    """What the device has no room for lies in the host."""
    addresses = world.nodes[0].pool.alloc_mem(6, BlockType.MIXED)
    assert addresses is not None
    assert mediums_of(addresses).tolist() == [TierId.DEVICE] * 4 + [TierId.HOST] * 2


def test_swapped_pages_keep_their_bytes_and_lose_their_addresses(world: World) -> None:
    """Out to the host and in again."""
    node = world.nodes[0]
    old = filled(node)
    node.pool.insert(PROMPT, old)
    assert len(node.pool.swap_out(2)) == 2
    found = node.pool.match(PROMPT)
    assert sorted(mediums_of(found).tolist()) == [0, 1, 1]
    assert node.pool.swap_in(old) is None, "stale"
    moved = node.pool.swap_in(found)
    assert moved is not None
    assert set(mediums_of(moved).tolist()) == {TierId.DEVICE}
    assert holds_prompt(node, moved)


# Two instances.


def test_a_prompt_sent_with_insert_is_found_there(world: World) -> None:
    """Three steps; nothing is left over on either side."""
    here, there = world.nodes[0], world.nodes[1]
    here.pool.insert(PROMPT, filled(here))
    transfer = here.pool.transfer_with_insert(1, PROMPT, here.pool.match(PROMPT))
    assert transfer.wait() is TransferStatus.DONE
    assert transfer.num_inserted == 3
    assert holds_prompt(there, there.pool.match(PROMPT))
    world.settle(1.0)
    assert [n.pool.usage() for n in (here, there)] == [NOTHING, NOTHING]


def test_layers_sent_one_by_one_arrive_as_one(world: World) -> None:
    """With a list of destinations; the last call hands the blocks over."""
    here, there = world.nodes[0], world.nodes[1]
    sources = filled(here)
    targets = here.pool.alloc_mem(3, BlockType.HOST, id=1)
    assert targets is not None
    first = here.pool.transfer(
        1, sources, targets, layers=(0, 1), more=True, way=Way.BY_LAYER
    )
    assert first.wait() is TransferStatus.DONE
    assert there.pool.usage().num_guest_blocks == 3
    last = here.pool.transfer(1, sources, targets, layers=(1, 2), private=b"request 7")
    assert last.wait() is TransferStatus.DONE
    (arrival,) = there.pool.take_arrivals()
    assert arrival.private == b"request 7"
    assert holds_prompt(there, arrival.addresses)
    assert here.pool.free_mem(targets), "they are no longer ours"
    assert not there.pool.free_mem(arrival.addresses)


def test_a_transfer_of_no_blocks_is_a_message(world: World) -> None:
    """Programs tell of layers by it; the sender need not have a block there now."""
    here, there = world.nodes[0], world.nodes[1]
    nothing = np.zeros(0, np.uint64)
    blocks = here.pool.alloc_mem(1, BlockType.HOST, id=1)
    assert blocks is not None
    assert not here.pool.free_mem(blocks)
    world.settle(1.0)
    transfer = here.pool.transfer(1, nothing, nothing, private=b"layer 3")
    assert transfer.wait() is TransferStatus.DONE
    (arrival,) = there.pool.take_arrivals()
    assert arrival.private == b"layer 3"
    assert not len(arrival.addresses)
    world.settle(1.0)
    assert [n.pool.usage() for n in (here, there)] == [NOTHING, NOTHING]


def test_sources_freed_under_way_are_kept_until_they_have_been_read(
    world: World,
) -> None:
    """The address dies at once, the block when the transfer is over."""
    here = world.nodes[0]
    sources = filled(here)
    transfer = here.pool.transfer(1, sources)
    under_way(world, transfer)
    assert not here.pool.free_mem(sources)
    assert "no longer in use" in here.pool.free_mem(sources)
    assert here.pool.alloc_mem(2) is None
    assert transfer.wait() is TransferStatus.DONE
    world.settle(1.0)
    assert here.pool.alloc_mem(4) is not None
    (arrival,) = world.nodes[1].pool.take_arrivals()
    assert holds_prompt(world.nodes[1], arrival.addresses)


def test_historical_sources_are_not_evicted_under_way(world: World) -> None:
    """A transfer holds what it reads."""
    here = world.nodes[0]
    here.pool.insert(PROMPT, filled(here))
    transfer = here.pool.transfer(1, here.pool.match(PROMPT))
    under_way(world, transfer)
    assert here.pool.alloc_mem(2) is None
    assert here.pool.delete(PROMPT) == 3
    assert here.pool.alloc_mem(2) is None
    assert transfer.wait() is TransferStatus.DONE
    world.settle(1.0)
    assert here.pool.alloc_mem(4) is not None


def test_blocks_inserted_under_way_are_not_evicted(world: World) -> None:
    """PD-Caching: the pages are retired while they are still being sent."""
    here = world.nodes[0]
    transfer = here.pool.transfer(1, sources := filled(here))
    under_way(world, transfer)
    assert here.pool.insert(PROMPT, sources).num_inserted == 3
    assert here.pool.alloc_mem(2) is None
    assert transfer.wait() is TransferStatus.DONE
    world.settle(1.0)
    assert here.pool.alloc_mem(4) is not None


# What can go wrong.


def test_an_address_of_an_old_generation_is_refused(world: World) -> None:
    """The slot is in use again, by somebody else."""
    pool = world.nodes[0].pool
    old = pool.alloc_mem(4)
    assert old is not None
    assert not pool.free_mem(old)
    assert pool.alloc_mem(4) is not None
    assert "no longer in use" in pool.free_mem(old)
    assert "no longer in use" in pool.insert(PROMPT, old[:3]).refusal


def test_late_bytes_hit_nobody(world: World) -> None:
    """A timed-out push writes later: its blocks there are nobody's until then."""
    here, there = world.nodes[0], world.nodes[1]
    transfer = here.pool.transfer(1, filled(here), timeout_s=2.0)
    under_way(world, transfer)
    world.clock.advance(2.1)
    for _ in range(3):
        here.poll()
        world.deliver(len(world.messages))
        there.poll()
    assert transfer.status is TransferStatus.TIMED_OUT
    assert there.pool.alloc_mem(2) is None, "three of four may be written to"
    for piece in list(world.pieces):
        world.end_piece(piece, arrives=True)
    world.settle(5.0)
    assert there.pool.alloc_mem(4) is not None
    assert [n.pool.usage() for n in (here, there)] == [NOTHING, NOTHING]


def test_late_bytes_of_a_dead_sender_hit_nobody(world: World) -> None:
    """Its blocks are refused at once, and used again after the grace time."""
    here, there = world.nodes[0], world.nodes[1]
    transfer = here.pool.transfer(1, filled(here))
    under_way(world, transfer)
    world.start(0, BLOCKS)
    there.see(world.view())
    assert there.pool.usage().num_quarantined_blocks == 3
    assert there.pool.alloc_mem(2) is None
    world.settle(CONFIG.grace_s + 1.0)
    assert there.pool.alloc_mem(4) is not None
    assert there.pool.usage() == NOTHING


def test_a_dead_receiver_ends_transfers_at_once(world: World) -> None:
    """And the new incarnation refuses blocks of the old one."""
    here = world.nodes[0]
    blocks = here.pool.alloc_mem(1, id=1)
    assert blocks is not None
    sources = filled(here)
    transfer = here.pool.transfer(1, sources)
    under_way(world, transfer)
    world.start(1, BLOCKS)
    here.see(world.view())
    assert transfer.status is TransferStatus.FAILED
    assert transfer.error == "instance 1 is gone"
    assert "no longer, ours" in here.pool.free_mem(blocks)
    assert "no longer, ours" in here.pool.transfer(1, sources[:1], blocks).error
    # Bytes for the dead one run out before the sources are free.
    assert not here.pool.free_mem(sources)
    assert here.pool.alloc_mem(2) is None
    world.settle(15.0)
    assert here.pool.alloc_mem(4) is not None
    assert here.pool.usage() == NOTHING


def test_nothing_is_written_without_a_lease(world: World) -> None:
    """Others may use the blocks again that they had set aside for us."""
    here = world.nodes[0]
    transfer = here.pool.transfer(1, filled(here))
    here.pool.lease_ends_s = world.clock.now()
    assert transfer.wait() is TransferStatus.FAILED
    assert "lease" in transfer.error
    world.settle(2.0)
    assert world.nodes[1].pool.usage() == NOTHING


def test_an_allocation_whose_answer_is_lost_is_undone(world: World) -> None:
    """The sender gives up; the receiver gets its blocks back all the same."""
    here, there = world.nodes[0], world.nodes[1]
    transfer = here.pool.transfer(1, filled(here), timeout_s=1.0)
    world.deliver(1)
    there.poll()
    assert there.pool.usage().num_guest_blocks == 3
    world.messages.clear()
    world.advance(1.1)
    here.poll()
    assert transfer.status is TransferStatus.TIMED_OUT
    world.messages.clear()
    world.settle(3.0)
    assert there.pool.usage() == NOTHING
    assert there.pool.alloc_mem(4) is not None


def test_a_request_that_comes_again_does_nothing(world: World) -> None:
    """Neither before its answer is forgotten nor long after."""
    here, there = world.nodes[0], world.nodes[1]
    transfer = here.pool.transfer(1, filled(here, PROMPT[:2]))
    (ask,) = world.messages
    world.messages.append(ask)
    assert transfer.wait() is TransferStatus.DONE
    assert there.pool.usage() == NOTHING
    again = here.pool.transfer(1, filled(here, PROMPT[:2]))
    assert again.wait() is TransferStatus.DONE
    world.messages.append(ask)
    world.settle(1.0)
    assert there.pool.usage() == NOTHING
    assert len(there.pool.take_arrivals()) == 2


def test_a_request_for_a_former_incarnation_is_refused(world: World) -> None:
    """Whatever was on its way to it."""
    here = world.nodes[0]
    transfer = here.pool.transfer(1, filled(here))
    world.start(1, BLOCKS)
    world.nodes[1].see(world.view())
    assert transfer.wait() is TransferStatus.FAILED
    assert transfer.error == "instance 1 has started anew meanwhile"


def test_what_is_not_ours_is_refused(world: World) -> None:
    """Stale, foreign and unknown things, in one clause each."""
    here, there = world.nodes[0], world.nodes[1]
    stale = filled(here)
    assert not here.pool.free_mem(stale)
    assert "no longer in use" in here.pool.transfer(1, stale).error
    assert "of instance 1" in here.pool.transfer(1, filled(there)).error
    fresh = filled(here)
    assert here.pool.transfer(7, fresh).error == "instance 7 is not in the pool"
    assert "this instance" in here.pool.transfer(0, fresh).error
    assert not here.pool.free_mem(fresh)
    assert "twice" in here.pool.free_mem(np.repeat(filled(here), 2))
