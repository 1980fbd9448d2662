"""Which of the simulated sizes to buy, and why: pure functions of a plan's points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CapacityPoint", "Recommendation", "frontier", "recommend"]

_WORTH = 0.05
"""Of the mean TTFT: a smaller saving is within what a model without a calibration may
be wrong by, and no reason to buy anything."""


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """One choice of sizes; ``cost`` is in the unit of the prices.

    Attributes:
        host_gb, disk_gb: decimal GB.
        device_hits, host_hits, disk_hits: shares of all prompt tokens.
        ttft_mean_s, ttft_p99_s: NaN where no request could run.
        slo_attainment: share of all requests within both targets.
        is_overloaded: the queue grew as long as requests came, so the times say how
            long the load was and not how fast the server is.
        lru_hits, opt_hits: bounds without time; NaN without a trace.
    """

    host_gb: float
    disk_gb: float
    cost: float
    device_hits: float
    host_hits: float
    disk_hits: float
    ttft_mean_s: float
    ttft_p99_s: float
    slo_attainment: float
    is_overloaded: bool
    lru_hits: float
    opt_hits: float

    @property
    def hits(self) -> float:
        """Prompt tokens that were not computed over all."""
        return self.device_hits + self.host_hits + self.disk_hits


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to buy, in words; ``point`` is None where nothing pays."""

    point: CapacityPoint | None
    reason: str


def frontier(points: Sequence[CapacityPoint]) -> list[CapacityPoint]:
    """Return the points that no other one beats, cheapest first (Pareto).

    One beats another if it has a lower mean TTFT for no more cost.
    """
    best: list[CapacityPoint] = []
    runs = [point for point in points if not math.isnan(point.ttft_mean_s)]
    for point in sorted(runs, key=lambda point: (point.cost, point.ttft_mean_s)):
        if not best or point.ttft_mean_s < best[-1].ttft_mean_s:
            best.append(point)
    return best


def recommend(
    points: Sequence[CapacityPoint], ttft_slo_s: float, unit: str
) -> Recommendation:
    """Return the sizes to buy.

    The cheapest ones with a P99 TTFT within the target; where none has it, the knee of
    the frontier: the point furthest above the line from its cheapest to its best one,
    both axes from 0 to 1 (Satopaa et al., "Finding a Kneedle in a Haystack", 2011).

    Args:
        points: of the plan.
        ttft_slo_s: target for the first token; 0 for none.
        unit: of the cost.
    """
    best = frontier(points)
    if not best:
        return Recommendation(None, "Nothing: no request could run with any size.")
    cheapest, fastest = best[0], best[-1]
    saving_s = cheapest.ttft_mean_s - fastest.ttft_mean_s
    if saving_s < _WORTH * cheapest.ttft_mean_s:
        return Recommendation(
            None,
            f"Nothing beyond {_sizes(cheapest, unit)}: the best of these sizes lowers "
            f"the mean TTFT by {saving_s / cheapest.ttft_mean_s:.1%} only."
            + _overload(cheapest),
        )
    # Both ends have the height 0: where no point lies above, the saving is bought.
    heights = [_height(point, cheapest, fastest) for point in best]
    knee = best[max(range(len(best)), key=lambda index: (heights[index], index))]
    for point in best:
        if 0 < point.ttft_p99_s <= ttft_slo_s and not point.is_overloaded:
            why = f"the cheapest with a P99 TTFT within {ttft_slo_s:g} s"
            reason = _reason(points, best, point, why, unit)
            if knee.cost > point.cost:
                reason += (
                    f" To be faster than asked for: {_sizes(knee, unit)}, mean TTFT "
                    f"{knee.ttft_mean_s:.2f} s; behind it each further saving costs "
                    "more than its share."
                )
            return Recommendation(point, reason)
    why = "behind it each further saving costs more than its share"
    if knee is fastest:
        why = "no cheaper size has its share of the saving"
    if ttft_slo_s:
        why = f"no size brings the P99 TTFT within {ttft_slo_s:g} s, and " + why
    return Recommendation(knee, _reason(points, best, knee, why, unit))


def _height(
    point: CapacityPoint, cheapest: CapacityPoint, fastest: CapacityPoint
) -> float:
    """Return how far a point lies above the line from the cheapest to the fastest."""
    cost = fastest.cost - cheapest.cost
    saving_s = cheapest.ttft_mean_s - fastest.ttft_mean_s
    share = (point.cost - cheapest.cost) / cost if cost else 0.0
    return (cheapest.ttft_mean_s - point.ttft_mean_s) / saving_s - share


def _reason(
    points: Sequence[CapacityPoint],
    best: Sequence[CapacityPoint],
    chosen: CapacityPoint,
    why: str,
    unit: str,
) -> str:
    bounds = [point.opt_hits for point in points if not math.isnan(point.opt_hits)]
    reachable = max(bounds or [point.hits for point in points])
    of_what = "any eviction could reach with these sizes (OPT)"
    if not bounds:
        of_what = "the best of these sizes has"
    cheapest, fastest = best[0], best[-1]
    words = [f"{_sizes(chosen, unit)}: {why}."]
    if reachable > 0:
        words.append(
            f"It has {chosen.hits / reachable:.0%} of the hits that {of_what}."
        )
    if chosen is not cheapest:
        words.append(
            f"Mean TTFT {cheapest.ttft_mean_s:.2f} -> {chosen.ttft_mean_s:.2f} s "
            f"against {_sizes(cheapest, unit)}, P99 {cheapest.ttft_p99_s:.2f} -> "
            f"{chosen.ttft_p99_s:.2f} s; {chosen.slo_attainment:.1%} of the requests "
            "within the targets."
        )
    if chosen is not fastest:
        gained = round(100 * (fastest.hits - chosen.hits), 1) + 0.0  # no -0.0
        words.append(
            f"{_cost(fastest.cost - chosen.cost, unit)} more would add "
            f"{gained:.1f} points of hits and bring the "
            f"mean TTFT to {fastest.ttft_mean_s:.2f} s."
        )
    return " ".join(words) + _overload(chosen)


def _overload(point: CapacityPoint) -> str:
    if not point.is_overloaded:
        return ""
    return (
        " OVERLOADED: the queue grew as long as requests came, so these times belong "
        "to the length of the load; lower the rate or give more devices."
    )


def _sizes(point: CapacityPoint, unit: str) -> str:
    parts = [f"{point.host_gb:,g} GB of host memory"] if point.host_gb else []
    parts += [f"{point.disk_gb:,g} GB of disk"] if point.disk_gb else []
    return f"{' and '.join(parts) or 'no tier'} ({_cost(point.cost, unit)})"


def _cost(cost: float, unit: str) -> str:
    return f"{unit}{cost:,.0f}" if len(unit) == 1 else f"{cost:,.0f} {unit}"
