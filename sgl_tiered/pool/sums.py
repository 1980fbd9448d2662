"""What blocks sum to: xxh3-64 of a page's bytes, however they lie in memory.

Layer by layer, keys before values, token by token, head by head: the order of tiers'
pages (``PageLayout``). So both sides of a fetch get one number for one page. Of an
instance of several ranks it is xxh3-64 of what their parts sum to, in their order: both
sides have as many ranks, which have the same parts.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from sgl_tiered.core.addresses import mediums_of, slots_of
from sgl_tiered.core.plans import Int64s, UInt8s, UInt64s
from sgl_tiered.pool.facts import Fact, Facts
from sgl_tiered.pool.layouts import KVShape, MemoryForm

__all__ = ["Sums", "SumsOf", "block_sums"]


_MARK_BYTES = 16


class Sums(Protocol):
    """Checksums under way, or there."""

    def done(self) -> bool:
        """Return whether they are there."""
        ...

    def result(self) -> UInt64s | None:
        """Return them, uint64 [n]; None where they could not be made."""
        ...


class SumsOf:
    """Sums blocks of one instance up, on a thread if there is one.

    The caller holds the blocks until it is done.

    Args:
        shape: of the model.
        memories: by medium: this rank's memory, and how it lies there.
        executor: does the work; None: it is done at once.
        wake: called when it is done; by another thread if there is an executor.
        facts: what ranks tell each other of the sums.
    """

    def __init__(
        self,
        shape: KVShape,
        memories: dict[int, tuple[UInt8s, MemoryForm]],
        executor: Executor | None = None,
        wake: Callable[[], None] = lambda: None,
        facts: Facts | None = None,
    ) -> None:
        self._facts = facts or Facts()
        self._shape = shape
        self._memories = memories
        self._executor = executor
        self._wake = wake

    @property
    def is_able(self) -> bool:
        """Whether this process sums anything up."""
        return bool(self._memories)

    def reaches(self, addresses: UInt64s) -> npt.NDArray[np.bool_]:
        """Return for each block whether its bytes can be read in place, bool [n]."""
        return np.isin(mediums_of(addresses), sorted(self._memories))

    def mark(self, addresses: UInt64s) -> None:
        """Put random bytes where each block begins; all of them are reached.

        Then nobody can know what a block sums to in which nothing has arrived.
        """
        media, slots = mediums_of(addresses), slots_of(addresses)
        for medium in np.unique(media).tolist():
            memory, form = self._memories[medium]
            length = min(_MARK_BYTES, form.shard.num_heads * self._shape.head_bytes)
            starts = slots[media == medium] * form.slot_stride
            marks = np.frombuffer(os.urandom(len(starts) * length), np.uint8)
            places = starts[:, None] + np.arange(length)
            memory.reshape(-1)[places] = marks.reshape(len(starts), length)

    def of(self, addresses: UInt64s) -> Sums:
        """Begin to sum blocks up; all of them are reached."""
        own = _Own(self._of(addresses))
        if self._facts.num_ranks == 1:
            return own
        return _Common(len(addresses), self._facts.watch(lambda: _told(own)))

    def _of(self, addresses: UInt64s) -> Future[UInt64s]:
        """Begin to sum this rank's parts up."""
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


class _Own:
    """Sums of one rank's parts."""

    def __init__(self, sums: Future[UInt64s]) -> None:
        self._sums = sums

    def done(self) -> bool:
        """Return whether they are there."""
        return self._sums.done()

    def result(self) -> UInt64s | None:
        """Return them, uint64 [n]; None where they could not be made."""
        return None if self._sums.exception() else self._sums.result()


class _Common:
    """Sums of whole pages, once all ranks have told those of their parts."""

    def __init__(self, num_pages: int, fact: Fact) -> None:
        self._num_pages = num_pages
        self._fact = fact

    def done(self) -> bool:
        """Return whether they are there."""
        return self._fact.is_common

    def result(self) -> UInt64s | None:
        """Return them, uint64 [n]; None where a rank could not say."""
        parts = [np.frombuffer(b64decode(one), "<u8") for one in self._fact.told]
        if any(len(part) != self._num_pages for part in parts):
            return None
        pages = np.ascontiguousarray(np.stack(parts, axis=1))
        return np.array(
            [xxhash.xxh3_64_intdigest(page.data) for page in pages], np.uint64
        )


def _told(own: _Own) -> str | None:
    """Return what a rank tells of its sums; empty where they could not be made."""
    if not own.done():
        return None
    sums = own.result()
    return "" if sums is None else b64encode(sums.astype("<u8").tobytes()).decode()


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
