"""Numbers of device pages that the host may not know yet.

An engine on a device with streams takes pages by work that it queues, so their numbers
are on the device first. To read them on the host would be to wait for all work before
them. Kernels read them where they are; copy engines are given addresses by the host,
to which the numbers are copied behind that work as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_tiered.pipelines.streams import Event

__all__ = ["PageNumbers", "QueuedNumbers", "QueuedPages", "host_numbers", "join_pages"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class QueuedNumbers:
    """Numbers whose making is queued, and whose copy to the host is.

    Attributes:
        on_device: int64 [n] of the device's kind; held for as long as they are read.
        on_host: int64 [n], pinned; to be read once ``ready`` has passed.
        ready: an event behind the copy.
    """

    on_device: Any
    on_host: Int64s
    ready: Event


class QueuedPages:
    """Such numbers, or chosen ones of them.

    Args:
        parts: the numbers, and int64 positions in them (None for all), one part behind
            the other.
    """

    def __init__(self, parts: Sequence[tuple[QueuedNumbers, Int64s | None]]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        """Return how many pages there are."""
        return sum(
            len(numbers.on_host if positions is None else positions)
            for numbers, positions in self.parts
        )

    def __getitem__(self, chosen: Any) -> QueuedPages:
        """Choose by a slice or by positions; of numbers that were not joined."""
        ((numbers, positions),) = self.parts
        everything = np.arange(len(self), dtype=np.int64)
        wanted = everything[chosen]
        if len(wanted) == len(everything) and (wanted == everything).all():
            return self
        found = wanted if positions is None else positions[wanted]
        return QueuedPages([(numbers, found)])

    @property
    def is_known(self) -> bool:
        """Whether the host knows them; never waits."""
        return all(numbers.ready.query() for numbers, _ in self.parts)

    def on_host(self) -> Int64s:
        """Return them, int64 [n]; waits for the device, so not on the engine's thread.

        Raises:
            RuntimeError: work before them failed.
        """
        found = []
        for numbers, positions in self.parts:
            numbers.ready.synchronize()
            known = numbers.on_host
            found.append(known if positions is None else known[positions])
        return np.concatenate(found)


PageNumbers = Int64s | QueuedPages
"""Page numbers as a device pool hands them out; it gets them back as they are."""


def host_numbers(pages: PageNumbers) -> Int64s:
    """Return page numbers on the host; waits where the host does not know them."""
    return pages.on_host() if isinstance(pages, QueuedPages) else pages


def join_pages(many: Sequence[PageNumbers]) -> PageNumbers:
    """Put page numbers of one pool behind each other."""
    queued = [pages for pages in many if isinstance(pages, QueuedPages)]
    if not queued:
        return np.concatenate([host_numbers(pages) for pages in many])
    assert len(queued) == len(many), "page numbers of two kinds in one load"
    return QueuedPages([part for pages in queued for part in pages.parts])
