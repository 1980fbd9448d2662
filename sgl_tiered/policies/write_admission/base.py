"""Interface of a write admission: which pages are worth a write to a slow medium.

Most blocks of real traffic are never read again, and flash wears with every write. A
policy says for each page whether it may be written now; the cache asks again when the
page is seen again. What may be written at all (a source, a parent, room) is the
cache's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import Bools, UInt8s

__all__ = ["WriteAdmission", "WriteFacts"]


@dataclass(frozen=True, slots=True, eq=False)
class WriteFacts:
    """What a policy may know of a run of pages, one element per page.

    Attributes:
        tier: where they would be written.
        num_sightings: uint8 [n], requests that had the page: 0 (forgotten), 1, or 2
            for two or more.
        reuse_rates: float64 [n], of the pages as far into their prompts as this one,
            the share that a second request had; 0 where none was seen yet.
        comes_again: whether prompts come again at all, see ``cache/sightings.py``.
    """

    tier: TierId
    num_sightings: UInt8s
    reuse_rates: npt.NDArray[np.float64]
    comes_again: bool = True


@runtime_checkable
class WriteAdmission(Protocol):
    """Says which pages may be written; keeps nothing itself."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def needs_sightings(self) -> bool:
        """Whether it looks at the facts; without, the cache need not gather them."""
        ...

    def admit(self, facts: WriteFacts) -> Bools:
        """Return for each page whether it may be written.

        Equal facts give equal answers, and a further sighting, a higher rate or prompts
        that come again never take an admission back.
        """
        ...
