"""The measure of a transport, over kernel copies within this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock, SystemClock
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.transport.base import Transport
from sgl_tiered.transport.loopback import open_loopback

BLOCK_BYTES, NUM_BLOCKS = 4096, 32


@pytest.fixture
def speeds(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """What is tested, as a module."""
    return load_script("micro/_transport_speed.py")


@pytest.fixture
def ends() -> Iterator[list[Transport]]:
    """Two transports of this process, each with room for the blocks."""
    try:
        ends = [open_loopback() for _ in range(2)]
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    yield ends
    for end in ends:
        end.close()


def test_all_blocks_travel_and_the_speeds_are_positive(
    speeds: ModuleType, ends: list[Transport]
) -> None:
    """After a push and a pull of the same blocks both memories agree."""
    rng = np.random.default_rng(1)
    size = BLOCK_BYTES * NUM_BLOCKS
    memories = [rng.integers(0, 256, size, np.uint8) for _ in ends]
    wanted = memories[0].copy()
    for end, memory in zip(ends, memories, strict=True):
        end.register(memory)
    speed = speeds.measure_transport(
        ends[0],
        ends[0].connect(ends[1].address),
        SystemClock(),
        block_bytes=BLOCK_BYTES,
        num_blocks=NUM_BLOCKS,
        repeats=2,
    )
    assert (speed.block_bytes, speed.num_blocks) == (BLOCK_BYTES, NUM_BLOCKS)
    assert min(speed.push_bytes_per_s, speed.pull_bytes_per_s) > 0
    assert np.array_equal(memories[0], wanted)
    pieces = speeds.spread_blocks(BLOCK_BYTES, NUM_BLOCKS, np.random.default_rng(0))
    for here, there in zip(pieces.local, pieces.remote, strict=True):
        block = memories[1][there : there + BLOCK_BYTES]
        assert np.array_equal(block, wanted[here : here + BLOCK_BYTES])


def test_a_transfer_that_fails_is_no_speed(
    speeds: ModuleType, ends: list[Transport]
) -> None:
    """The reason is raised, and nothing is reported."""
    for end in ends:
        end.register(np.zeros(BLOCK_BYTES * NUM_BLOCKS, np.uint8))
    peer = ends[0].connect(ends[1].address)
    ends[0].disconnect(peer)
    with pytest.raises(RuntimeError, match="FAILED: disconnected"):
        speeds.measure_transport(
            ends[0], peer, ManualClock(), block_bytes=BLOCK_BYTES, num_blocks=NUM_BLOCKS
        )
