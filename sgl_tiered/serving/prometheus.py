"""Prometheus series of the tiers, made from snapshots of the counters.

Series of a tier whose medium or speed is emulated, and of edges that touch one, have
the label ``emulated="yes"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge

__all__ = ["PrometheusSink"]

_EDGE_SERIES = {
    "bytes": "Bytes moved.",
    "seconds": "Seconds that transfers took, summed.",
    "pages": "Pages moved.",
    "failed_pages": "Pages that a transfer lost.",
}
_TIER_SERIES = {
    "tokens_hit": "Prompt tokens served from the tier.",
    "tokens_missed": "Prompt tokens looked for in the tier and not found.",
    "requests_hit": "Requests served at least one page from the tier.",
    "requests_missed": "Requests that found nothing in the tier.",
    "evictions": "Pages evicted from the tier.",
}


class PrometheusSink:
    """Exports counters as ``sgl_tiered:*``; one per process.

    Args:
        page_tokens: tokens in a page, exported once as a gauge.
    """

    def __init__(self, page_tokens: int) -> None:
        self._edges = {
            name: Counter(f"sgl_tiered:edge_{name}", text, ["edge", "emulated"])
            for name, text in _EDGE_SERIES.items()
        }
        self._tiers = {
            name: Counter(f"sgl_tiered:{name}", text, ["tier", "emulated"])
            for name, text in _TIER_SERIES.items()
        }
        self._named = Counter("sgl_tiered:events", "Other events.", ["event"])
        self._occupancy = Gauge(
            "sgl_tiered:occupancy_pages",
            "Pages in the tier.",
            ["tier", "state", "emulated"],
            multiprocess_mode="mostrecent",
        )
        self._copies_at_once = Gauge(
            "sgl_tiered:copies_at_once",
            "1 while new pages are copied to the host when they are computed.",
            multiprocess_mode="mostrecent",
        )
        Gauge(
            "sgl_tiered:page_tokens",
            "Tokens in a page.",
            multiprocess_mode="mostrecent",
        ).set(page_tokens)
        self._seen: dict[tuple[str, str, tuple[str, ...]], float] = {}

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Bring the series up to a snapshot of ``MetricsRegistry`` and occupancy."""
        emulated = set(snapshot["emulated"])

        def mark(*tiers: str) -> str:
            return "no" if emulated.isdisjoint(tiers) else "yes"

        for edge, values in snapshot["edges"].items():
            labels = (edge, mark(*edge.split("->")))
            for name, counter in self._edges.items():
                self._advance(counter, name, labels, values[name])
        for tier, values in snapshot["tiers"].items():
            for name, counter in self._tiers.items():
                self._advance(counter, name, (tier, mark(tier)), values[name])
        for name, value in snapshot["counters"].items():
            self._advance(self._named, "events", (name,), value)
        for tier, states in snapshot["occupancy"].items():
            for state, pages in states.items():
                self._occupancy.labels(tier, state, mark(tier)).set(pages)

        self._copies_at_once.set(snapshot["copies_at_once"])

    def _advance(
        self, counter: Counter, name: str, labels: tuple[str, ...], value: float
    ) -> None:
        key = (counter._name, name, labels)
        step = value - self._seen.get(key, 0.0)
        if step > 0:
            counter.labels(*labels).inc(step)
            self._seen[key] = value
