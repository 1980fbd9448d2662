"""Sends pages whose layers are placed one by one: each from where it is.

The decode instance sees an ordinary transfer: keys of all layers, then values, each of
a page in one piece.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Pusher", "Sources", "send_layers"]

Int64s = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


class Pusher(Protocol):
    """What is used of ``RawEngine``."""

    def batch_transfer_sync(
        self,
        session_id: str,
        buffers: list[int],
        peer_addresses: list[int],
        lengths: list[int],
    ) -> int:
        """Write ranges to a peer; 0 when all of it has arrived."""
        ...


class Sources(Protocol):
    """What is used of ``LayerSources``; its docstrings say how."""

    part_bytes: int

    def addresses(self, pages: npt.NDArray[np.integer]) -> Int64s | None:
        """Return where keys and values of pages begin, int64 [2, num_layers, n]."""
        ...

    def num_from_host(self, addresses: Int64s) -> int:
        """Return how many bytes of pushes from there come from host rows."""
        ...

    def sent(self, pages: npt.NDArray[np.integer], num_from_host: int) -> None:
        """Note the end of a push."""
        ...


def send_layers(
    engine: Pusher,
    sources: Sources,
    session_id: str,
    pages: npt.NDArray[np.integer],
    peer_pointers: Sequence[int],
    peer_pages: npt.NDArray[np.integer],
) -> int:
    """Write pages to a decode instance and wait for them.

    Args:
        engine: pushes.
        sources: says where layers lie.
        session_id: of the decode instance.
        pages: int [n], logical, here.
        peer_pointers: where keys of each of its layers begin, then values.
        peer_pages: int [n], there.

    Returns:
        0 when all has arrived, else -1.
    """
    num_from_host = -1
    try:
        addresses = sources.addresses(pages)
        if addresses is None or len(peer_pointers) != 2 * addresses.shape[1]:
            logger.error(
                "sgl-tiered: KV could not be sent: a layer of it is nowhere, or the "
                "decode instance has other layers"
            )
            return -1
        part = sources.part_bytes
        try:
            pointers = np.asarray(peer_pointers, np.int64).reshape(2, -1, 1)
        except OverflowError:
            pointers = None
        if pointers is None or len(peer_pages) != len(pages):
            logger.error(
                "sgl-tiered: KV could not be sent: the decode instance names an "
                "address of more than 63 bits, or other pages than there are"
            )
            return -1
        targets = pointers + np.asarray(peer_pages, np.int64) * part
        here, there, sizes = _joined(addresses, targets, part)
        ended = engine.batch_transfer_sync(session_id, here, there, sizes)
        if ended == 0:
            num_from_host = sources.num_from_host(addresses)
        return ended
    finally:
        sources.sent(pages, num_from_host)


def _joined(
    here: Int64s, there: Int64s, size: int
) -> tuple[list[int], list[int], list[int]]:
    """Return ranges as they are pushed: pages that go on on both sides as one.

    Args:
        here, there: int64 [2, num_layers, n], where each begins.
        size: bytes of each.
    """
    begins = np.ones(here.shape, np.bool_)
    begins[..., 1:] = (np.diff(here) != size) | (np.diff(there) != size)
    firsts = np.flatnonzero(begins)
    counts = np.diff(np.append(firsts, begins.size))
    sizes: list[int] = (counts * size).tolist()
    return here.ravel()[firsts].tolist(), there.ravel()[firsts].tolist(), sizes
