"""What the rules about activations are told: lines of time, and a batch's layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LayerFacts", "PageLine"]


@dataclass(frozen=True, slots=True)
class PageLine:
    """Seconds for pages of one layer: ``overhead_s + page_s * pages``, 0 for none.

    T_kv_gen and T_load_kv of the paper, which measured that both are linear.

    Attributes:
        overhead_s: 0 or more.
        page_s: > 0.
    """

    overhead_s: float
    page_s: float

    def __post_init__(self) -> None:
        assert self.overhead_s >= 0.0, self
        assert self.page_s > 0.0, self

    def seconds(self, num_pages: float) -> float:
        """Return the time for so many pages."""
        return self.overhead_s + self.page_s * num_pages if num_pages > 0 else 0.0

    def most(self, seconds: float) -> int:
        """Return how many whole pages are done within a time."""
        return max(math.floor((seconds - self.overhead_s) / self.page_s), 0)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer of one decode step of a batch, on one rank.

    Attributes:
        num_pages: of the contexts of all requests.
        device_bytes: of the device's memory for this layer's pages; what activations
            leave of it holds KV.
        kv_page_bytes, act_page_bytes: of one page in this layer.
        kv_gen, load_kv, load_act: time to rebuild pages, to load them as KV and to
            load activations.
        load_weights_s: of this layer's weights; 0 where they are on the device.
        compute_s: of the layer itself, without rebuilding.
    """

    num_pages: int
    device_bytes: int
    kv_page_bytes: int
    act_page_bytes: int
    kv_gen: PageLine
    load_kv: PageLine
    load_act: PageLine
    load_weights_s: float
    compute_s: float
