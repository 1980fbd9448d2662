"""Which pages of a request are kept as activations: a fixed ratio (Eq. 11).

Source: HybridServe (papers: hybridserve), section 4.3.2. Each request has activations
and KV in the ratio of host memory, and new pages keep it: at 3 to 1, after five of
activations and two of KV, activations come next. Whole numbers only, so that all ranks
choose alike. Activations go to the device while it has room, KV to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from sgl_tiered.core.ids import Representation, TierId

__all__ = ["PagePlace", "PageRatio", "next_page"]

_MOST_PARTS = 1_000
"""Of a share that is given as a number: no request has so many pages that more tell."""


@dataclass(frozen=True, slots=True)
class PageRatio:
    """So many pages of activations to so many of KV; not both are 0."""

    act: int
    kv: int

    def __post_init__(self) -> None:
        assert min(self.act, self.kv) >= 0, self
        assert self.act + self.kv > 0, self

    @classmethod
    def of_share(cls, share: float) -> PageRatio:
        """Return the ratio in which activations are this share of all pages, 0 to 1."""
        part = Fraction(share).limit_denominator(_MOST_PARTS)
        return cls(part.numerator, part.denominator - part.numerator)

    @property
    def act_share(self) -> float:
        """Activations' share of all pages."""
        return self.act / (self.act + self.kv)

    def act_of(self, num_pages: int) -> int:
        """Return how many of the first pages are activations, a half rounded up."""
        both = self.act + self.kv
        return (2 * self.act * num_pages + both) // (2 * both)


@dataclass(frozen=True, slots=True)
class PagePlace:
    """What a page is kept as, and where."""

    representation: Representation
    tier: TierId


def next_page(
    ratio: PageRatio, num_act: int, num_kv: int, num_device_free: int
) -> PagePlace:
    """Return what a request's next page is to be.

    A request that begins with none has ``ratio.act_of(n)`` pages of activations among
    its first n; one that has left the ratio (pages were lost) returns to it.

    Args:
        ratio: of the pages to come.
        num_act, num_kv: pages that the request has, on any tier.
        num_device_free: pages of activations that the device has room for.
    """
    if num_act >= ratio.act_of(num_act + num_kv + 1):
        return PagePlace(Representation.KV, TierId.HOST)
    tier = TierId.DEVICE if num_device_free > 0 else TierId.HOST
    return PagePlace(Representation.ACT, tier)
