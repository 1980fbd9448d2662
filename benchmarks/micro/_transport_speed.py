"""How fast a transport is by itself: what anything built on it is compared with.

It counts nothing but the transfers: memory is registered, peers are connected and
pages are touched before the clock starts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from sgl_tiered.core.clock import Clock
from sgl_tiered.transport.base import Peer, Pieces, TransferStatus, Transport

__all__ = ["TransportSpeed", "measure_transport", "spread_blocks"]


@dataclass(frozen=True, slots=True)
class TransportSpeed:
    """Medians over the repeats.

    Attributes:
        block_bytes, num_blocks: of one transfer.
        push_bytes_per_s, pull_bytes_per_s: from begin to known end.
    """

    block_bytes: int
    num_blocks: int
    push_bytes_per_s: float
    pull_bytes_per_s: float


def spread_blocks(
    block_bytes: int, num_blocks: int, rng: np.random.Generator
) -> Pieces:
    """Return blocks in random order on both sides, as pages of a cache lie.

    Args:
        block_bytes: length of each.
        num_blocks: how many; either region has room for exactly these at least.
        rng: source of chance.
    """
    here, there = (rng.permutation(num_blocks) * block_bytes for _ in range(2))
    return Pieces(here, there, np.full(num_blocks, block_bytes))


def measure_transport(
    transport: Transport,
    peer: Peer,
    clock: Clock,
    *,
    block_bytes: int = 256 << 10,
    num_blocks: int = 256,
    repeats: int = 7,
    seed: int = 0,
) -> TransportSpeed:
    """Push and pull the same blocks in turn; region 0 of both sides is overwritten.

    Raises:
        RuntimeError: a transfer did not end well; the message has its error.
    """
    pieces = spread_blocks(block_bytes, num_blocks, np.random.default_rng(seed))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for move, found in zip((transport.push, transport.pull), seconds, strict=True):
            start_s = clock.now()
            transfer = move(peer, pieces)
            if transfer.wait() is not TransferStatus.DONE:
                raise RuntimeError(f"{transfer.poll().name}: {transfer.error}")
            if turn:  # The first one connects, and touches the pages.
                found.append(clock.now() - start_s)
    push_s, pull_s = (statistics.median(found) for found in seconds)
    num_bytes = pieces.num_bytes
    return TransportSpeed(
        block_bytes, num_blocks, num_bytes / push_s, num_bytes / pull_s
    )
