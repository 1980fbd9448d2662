"""What tiers of given sizes would make of a trace: hits, bytes moved and cost.

The hierarchy is exclusive under one LRU, so one pass over the trace answers for all
sizes (``stack.py``), exactly. What is shipped is inclusive: a tier also holds what the
faster ones do, so it reaches the hits of its own size, not of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.opt import OptBound
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.stack import LRUCurve

__all__ = ["CapacityRow", "capacity_plan"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """One choice of sizes; mappings have the row's tiers, fastest first.

    Attributes:
        capacity_bytes: size of each tier.
        hit_rate: per tier, share of the trace's prompt tokens that it serves.
        opt_hit_rate: share of prompt tokens that any eviction could serve at most
            from tiers of this total size.
        loaded_bytes: per tier, what is brought up from it to the device; 0 for the
            device.
        stored_bytes: per tier, what comes down into it from the tier above; for the
            device, what is computed, since that is what comes to be there.
        cost: of all tiers, in the unit of the prices.
    """

    capacity_bytes: Mapping[TierId, int]
    hit_rate: Mapping[TierId, float]
    opt_hit_rate: float
    loaded_bytes: Mapping[TierId, int]
    stored_bytes: Mapping[TierId, int]
    cost: float

    @property
    def token_hit_rate(self) -> float:
        """Share of the trace's prompt tokens that some tier serves."""
        return sum(self.hit_rate.values())


def capacity_plan(
    trace: PageTrace,
    token_bytes: int,
    sizes: Sequence[Mapping[TierId, int]],
    price_per_gb: Mapping[TierId, float] | None = None,
) -> list[CapacityRow]:
    """Return a row for each choice of sizes, in their order.

    One pass over the trace, then O(segments) per distinct total.

    Args:
        trace: the requests.
        token_bytes: KV of one token over all layers, as kept in the tiers.
        sizes: per choice, the bytes of each tier; 0 for a tier that is not there.
        price_per_gb: price of 10^9 bytes of each tier; a tier without one is free.

    Raises:
        ConfigError: ``token_bytes`` or a size is out of range.
    """
    if token_bytes < 1:
        raise ConfigError("token_bytes", f"{token_bytes} bytes", "give 1 or more")
    for choice in sizes:
        for tier, size in choice.items():
            if size < 0:
                raise ConfigError(
                    f"sizes.{tier.label}", f"{size} bytes", "give 0 or more"
                )
    planner = _Planner(trace, token_bytes, price_per_gb or {})
    return [planner.row(choice) for choice in sizes]


class _Planner:
    def __init__(
        self, trace: PageTrace, token_bytes: int, price_per_gb: Mapping[TierId, float]
    ) -> None:
        self._trace = trace
        self._page_bytes = trace.page_tokens * token_bytes
        self._prices = price_per_gb
        self._curve = LRUCurve(trace)
        self._opt = OptBound(trace)

    def row(self, choice: Mapping[TierId, int]) -> CapacityRow:
        sizes = dict(sorted(choice.items()))
        total_tokens = max(1, self._trace.total_tokens)
        hit_rate, loaded, stored = {}, {}, {}
        num_pages = hit_tokens = hit_pages = 0
        used_pages = int(self._trace.num_pages.sum())
        for tier, size in sizes.items():
            above = num_pages
            num_pages += size // self._page_bytes
            tokens = self._curve.hit_tokens(num_pages)
            pages = self._curve.hit_pages(num_pages)
            is_top = tier == TierId.DEVICE
            hit_rate[tier] = (tokens - hit_tokens) / total_tokens
            loaded[tier] = 0 if is_top else (pages - hit_pages) * self._page_bytes
            came = self._curve.pushed_pages(above) if num_pages > above else 0
            stored[tier] = came * self._page_bytes
            hit_tokens, hit_pages = tokens, pages
        if TierId.DEVICE in stored:
            stored[TierId.DEVICE] = (used_pages - hit_pages) * self._page_bytes
        return CapacityRow(
            capacity_bytes=sizes,
            hit_rate=hit_rate,
            opt_hit_rate=self._opt.hit_tokens(num_pages) / total_tokens,
            loaded_bytes=loaded,
            stored_bytes=stored,
            cost=sum(
                size / _GB * self._prices.get(tier, 0.0) for tier, size in sizes.items()
            ),
        )
