"""What blocks sum to: xxh3-64 of a page's bytes, however they lie in memory.

Layer by layer, keys before values, token by token, head by head: the order of tiers'
pages (``PageLayout``). So both sides of a fetch get one number for one page.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from sgl_tiered.core.addresses import mediums_of, slots_of
from sgl_tiered.core.plans import Int64s, UInt8s, UInt64s
from sgl_tiered.pool.layouts import KVShape, MemoryForm

__all__ = ["Sums", "SumsOf", "block_sums"]


class Sums(Protocol):
    """Checksums under way, or there."""

    def done(self) -> bool:
        """Return whether they are there."""
        ...

    def result(self) -> UInt64s:
        """Return them, uint64 [n]."""
        ...


class SumsOf:
    """Sums blocks of one instance up, on a thread if there is one.

    The caller holds the blocks until it is done.

    Args:
        shape: of the model.
        memories: by medium: its memory, and how it lies there; one rank has all of it.
        executor: does the work; None: it is done at once.
        wake: called when it is done; by another thread if there is an executor.
    """

    def __init__(
        self,
        shape: KVShape,
        memories: dict[int, tuple[UInt8s, MemoryForm]],
        executor: Executor | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._shape = shape
        self._memories = memories
        self._executor = executor
        self._wake = wake

    def reaches(self, addresses: UInt64s) -> npt.NDArray[np.bool_]:
        """Return for each block whether its bytes can be read in place, bool [n]."""
        return np.isin(mediums_of(addresses), sorted(self._memories))

    def of(self, addresses: UInt64s) -> Sums:
        """Begin to sum blocks up; all of them are reached."""
        if self._executor is None:
            done: Future[UInt64s] = Future()
            done.set_result(self._sum(addresses))
            return done
        sums = self._executor.submit(self._sum, addresses)
        sums.add_done_callback(lambda _: self._wake())
        return sums

    def _sum(self, addresses: UInt64s) -> UInt64s:
        found = np.zeros(len(addresses), np.uint64)
        media, slots = mediums_of(addresses), slots_of(addresses)
        for medium in np.unique(media).tolist():
            memory, form = self._memories[medium]
            here = media == medium
            found[here] = block_sums(self._shape, form, memory, slots[here])
        return found


def block_sums(
    shape: KVShape, form: MemoryForm, memory: UInt8s, slots: Int64s
) -> UInt64s:
    """Return the checksum of each slot's page, uint64 [n].

    Args:
        shape: of the model.
        form: how the pages lie in the memory.
        memory: uint8, C-contiguous; a region.
        slots: int64 [n].
    """
    layout = form.shard.layout(shape)
    counts = (layout.num_layers, 2, shape.page_tokens, layout.token_bytes)
    strides = (form.layer_stride, form.value_offset, form.token_stride, 1)
    tight = strides[:3] == (
        layout.layer_page_bytes,
        layout.part_bytes,
        layout.token_bytes,
    )
    extent = sum(s * (n - 1) for n, s in zip(counts, strides, strict=True)) + 1
    flat = memory.reshape(-1)
    found = np.zeros(len(slots), np.uint64)
    for i, start in enumerate((slots * form.slot_stride).tolist()):
        page = flat[start : start + extent]
        if not tight:
            page = np.ascontiguousarray(
                np.lib.stride_tricks.as_strided(page, counts, strides, writeable=False)
            )
        found[i] = xxhash.xxh3_64_intdigest(page.data)
    return found
