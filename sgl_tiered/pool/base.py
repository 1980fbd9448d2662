"""What a pool of blocks stands on: a store of blocks with an index over tokens.

A *block* is one page of KV over all layers of a rank. It is *active* from its
allocation until it is freed or inserted, and *historical* while the index maps tokens
to it; then it may be evicted or moved. Blocks are named by addresses
(``core/addresses.py``): a list of them is a uint64 array.

Expected negatives are values: no room, a stale address, a hole before the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import UInt8s, UInt64s

__all__ = ["BlockStore", "BlockType", "Inserted", "MediumUsage", "allocator"]


class BlockType(IntEnum):
    """Where an allocation may be."""

    DEVICE = 0
    HOST = 1
    MIXED = 2
    """On the device as far as it has room, the rest in the host."""
    DISK = 3


_MEDIUM_OF = (TierId.DEVICE, TierId.HOST, TierId.DEVICE, TierId.DISK)
"""By type: its medium, the first one of MIXED."""


@dataclass(frozen=True, slots=True, eq=False)
class Inserted:
    """What came of an insertion.

    Attributes:
        num_inserted: blocks that the index holds now.
        duplicates: uint64, blocks of pages that it held already in that medium; they
            stay active and their owner's.
        refusal: one clause: why nothing was inserted; else empty.
    """

    num_inserted: int
    duplicates: UInt64s
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class MediumUsage:
    """Blocks of one medium.

    Attributes:
        capacity: blocks in all.
        free: those that can be allocated without evicting.
        historical: those in the index, evictable unless held.
        active: those that are neither.
        held: blocks, of either kind, that a transfer or a quarantine holds.
    """

    capacity: int
    free: int
    historical: int
    active: int
    held: int


class BlockStore(Protocol):
    """Blocks of one instance, in its media, with the index. One thread calls it.

    The cache table and its tiers implement it; the pool adds other instances.
    """

    @property
    def instance(self) -> int:
        """Id of the instance; part of every address."""
        ...

    @property
    def layout(self) -> PageLayout:
        """Shape of one block."""
        ...

    @property
    def media(self) -> tuple[TierId, ...]:
        """The media, fastest first."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of all media by now: memory that a device pins is added in parts."""
        ...

    def usage(self, medium: TierId) -> MediumUsage:
        """Return who has the blocks of a medium: O(capacity)."""
        ...

    def num_free(self, medium: TierId) -> int:
        """Return how many blocks can be allocated without evicting."""
        ...

    def alloc(self, medium: TierId, num_blocks: int) -> UInt64s | None:
        """Return new active blocks, or None and change nothing.

        Evicts historical blocks where no others are left. The array is read-only.
        """
        ...

    def free(self, addresses: UInt64s) -> str:
        """Free active blocks, each given once; those held when the last hold ends.

        Returns:
            Why nothing was freed, in one clause; else empty.
        """
        ...

    def refusal(self, addresses: UInt64s) -> str:
        """Return why these are not all blocks in use, in one clause; else empty."""
        ...

    def insert(
        self,
        namespace: bytes,
        tokens: npt.ArrayLike,
        addresses: UInt64s,
        first_page: int = 0,
    ) -> Inserted:
        """Make active blocks historical: the index maps tokens to them.

        Args:
            namespace: digest of a ``Namespace``.
            tokens: token ids from the start of the prompt on.
            addresses: active blocks of pages ``first_page`` and on, each once.
            first_page: pages before this one must be in the index.
        """
        ...

    def match(self, namespace: bytes, tokens: npt.ArrayLike) -> UInt64s:
        """Return the blocks of a prompt's first pages, from the fastest medium each."""
        ...

    def delete(self, namespace: bytes, tokens: npt.ArrayLike) -> int:
        """Drop a prompt's pages from its end on; return how many.

        Pages after which other prompts go on stay. Held blocks go when the last hold
        ends; nobody finds them from now on.
        """
        ...

    def coldest(self, medium: TierId, num_blocks: int) -> UInt64s:
        """Return up to so many historical blocks that the medium would evict first."""
        ...

    def move(self, addresses: UInt64s, medium: TierId) -> UInt64s | None:
        """Copy blocks to another medium and free them here; None: nothing changed.

        It is refused without room, where a block is named twice, and where a page would
        get a second copy there.

        Returns:
            The new addresses, in the same order.
        """
        ...

    def duplicate(self, addresses: UInt64s, medium: TierId) -> UInt64s | None:
        """Return new active blocks with the same bytes in a medium, or None."""
        ...

    def hold(self, addresses: UInt64s) -> None:
        """Keep blocks in use, and their bytes in place, until as many ``release``."""
        ...

    def release(self, addresses: UInt64s) -> None:
        """Undo one ``hold``; blocks that were freed meanwhile are free now."""
        ...

    def memory(self, medium: TierId) -> UInt8s | None:
        """Return the memory of a medium, uint8 [num_blocks, row_bytes].

        None if it cannot be read and written in place.
        """
        ...


def allocator(store: BlockStore, type: BlockType) -> Callable[[int], UInt64s | None]:
    """Return what allocates blocks of a type, all or none, given how many.

    A type whose medium the store does not have gets none; MIXED does with the host.
    """
    medium = _MEDIUM_OF[type]
    if type is BlockType.MIXED:
        host = allocator(store, BlockType.HOST)
        return partial(_allocate_mixed, store, host) if medium in store.media else host
    if medium not in store.media:
        return _allocate_nothing
    return partial(store.alloc, medium)


def _allocate_nothing(num_blocks: int) -> UInt64s | None:
    return None


def _allocate_mixed(
    store: BlockStore, host: Callable[[int], UInt64s | None], num_blocks: int
) -> UInt64s | None:
    num_device = min(num_blocks, store.num_free(TierId.DEVICE))
    fast = store.alloc(TierId.DEVICE, num_device)
    if fast is None or num_device == num_blocks:
        return fast
    slow = host(num_blocks - num_device)
    if slow is None:
        store.free(fast)
        return None
    return np.concatenate([fast, slow])
