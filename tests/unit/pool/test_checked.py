"""Transfers whose receiver sums up what has arrived before anybody may find it."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from sgl_tiered.core.addresses import mediums_of, slots_of
from sgl_tiered.core.ids import TierId
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.transport.base import TransferStatus
from tests.property.pool_world import CONFIG, Node, World, pages_of

BLOCKS = {TierId.DEVICE: 4, TierId.HOST: 4}
NOTHING = PoolUsage(0, 0, 0, 0, 0)
PROMPT = np.arange(6, dtype=np.int32)


@pytest.fixture(params=[False, True], ids=["own table", "cache in use"])
def world(request: pytest.FixtureRequest) -> World:
    """Two instances that know each other; the first one has a prompt."""
    world = World(in_cache=request.param)
    for n in range(2):
        world.start(n, BLOCKS)
    for node in world.nodes.values():
        node.see(world.view())
    here = world.nodes[0]
    addresses = here.pool.alloc_mem(3)
    assert addresses is not None
    here.write(addresses, pages_of(PROMPT))
    here.pool.insert(PROMPT, addresses)
    return world


def send(world: World, **how: object):
    here = world.nodes[0].pool
    return here.transfer_with_insert(
        1, PROMPT, here.match(PROMPT), type=BlockType.HOST, checked=True, **how
    )


def nothing_is_left(world: World) -> None:
    world.settle(4 * CONFIG.grace_s)
    assert [node.pool.usage() for node in world.nodes.values()] == [NOTHING] * 2


def spoil(node: Node, addresses: np.ndarray) -> None:
    """Turn one bit of the last block over."""
    medium = TierId(int(mediums_of(addresses)[-1]))
    node.regions[medium][int(slots_of(addresses)[-1])].reshape(-1)[0] ^= 1


def test_what_arrived_as_it_was_sent_is_entered(world: World) -> None:
    """As without the sums."""
    here, there = world.nodes[0], world.nodes[1]
    transfer = send(world)
    assert transfer.wait() is TransferStatus.DONE
    assert transfer.num_inserted == 3
    found = there.pool.match(PROMPT)
    assert there.read(found) == here.read(here.pool.match(PROMPT))
    nothing_is_left(world)


def test_what_arrived_otherwise_is_never_found(world: World) -> None:
    """One bit is enough; the blocks are free again, and the next try succeeds."""
    there = world.nodes[1]
    free = there.store.num_free(TierId.HOST)
    transfer = send(world)
    while not world.pieces:
        world.deliver(len(world.messages))
        for node in world.nodes.values():
            node.poll()
    for piece in list(world.pieces):
        world.end_piece(piece, arrives=True)
    spoil(there, transfer.targets)
    assert transfer.wait() is TransferStatus.FAILED
    assert "not those that were sent" in transfer.error
    assert not len(there.pool.match(PROMPT))
    nothing_is_left(world)
    assert there.store.num_free(TierId.HOST) == free
    assert send(world).wait() is TransferStatus.DONE


def test_only_what_was_sent_is_summed_up(world: World) -> None:
    """Pages that the receiver has are neither sent nor checked."""
    there = world.nodes[1]
    first = there.pool.alloc_mem(1, BlockType.HOST)
    assert first is not None
    there.write(first, pages_of(PROMPT)[:1])
    there.pool.insert(PROMPT[:2], first)
    transfer = send(world, only_missing=True)
    assert transfer.wait() is TransferStatus.DONE
    assert (transfer.num_known, transfer.num_inserted) == (1, 2)
    assert len(there.pool.match(PROMPT)) == 3
    nothing_is_left(world)


def test_who_gave_up_meanwhile_gets_nothing_entered(world: World) -> None:
    """The sums may take longer than the sender waits; then they come for nobody."""
    there = world.nodes[1]
    real = there.pool._receiver._sums
    late: list[tuple[Future[np.ndarray], np.ndarray]] = []

    class Slow:
        reaches = real.reaches

        def of(self, addresses: np.ndarray) -> Future[np.ndarray]:
            late.append((Future(), real.of(addresses).result()))
            return late[-1][0]

    there.pool._receiver._sums = Slow()  # type: ignore[assignment]
    free = there.store.num_free(TierId.HOST)
    transfer = send(world)
    assert transfer.wait() is TransferStatus.TIMED_OUT
    assert len(late) == 1
    assert there.store.num_free(TierId.HOST) == free - 3, "a block is in use again"
    late[0][0].set_result(late[0][1])
    nothing_is_left(world)
    assert not len(there.pool.match(PROMPT))
    assert there.store.num_free(TierId.HOST) == free
