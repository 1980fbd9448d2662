"""The one place where transfers and lookups are counted. Thread-safe.

Counters only grow, so that any reader may take differences. ``snapshot`` gives a plain
dict that JSON can write; exporters (Prometheus, a log line) implement ``Sink``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.metrics.edges import EdgeCounters, TierCounters

__all__ = ["MetricsRegistry", "Sink"]


class Sink(Protocol):
    """Takes snapshots, e.g. to export them."""

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Take one snapshot, as made by ``MetricsRegistry.snapshot``."""
        ...


class MetricsRegistry:
    """Counters per edge and per tier; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._edges: dict[tuple[TierId, TierId], EdgeCounters] = {}
        self._tiers: dict[TierId, TierCounters] = {}
        self._named: dict[str, float] = {}

    def record_transfer(
        self,
        source: TierId,
        target: TierId,
        *,
        num_pages: int,
        num_bytes: int,
        seconds: float,
        failed_pages: int = 0,
        failed: bool = False,
    ) -> None:
        """Count one transfer that ended.

        Args:
            source: where the bytes were.
            target: where they went.
            num_pages: pages that arrived.
            num_bytes: bytes that arrived.
            seconds: duration.
            failed_pages: pages that did not arrive.
            failed: the transfer broke although no page can be named.
        """
        with self._lock:
            edge = self._edges.setdefault((source, target), EdgeCounters())
            edge.ops += 1
            edge.pages += num_pages
            edge.bytes += num_bytes
            edge.seconds += seconds
            edge.failures += bool(failed or failed_pages)
            edge.failed_pages += failed_pages

    def record_result(
        self, source: TierId, target: TierId, result: TransferResult
    ) -> None:
        """Count one transfer by its result."""
        num_ok = int(result.ok.sum())
        self.record_transfer(
            source,
            target,
            num_pages=num_ok,
            num_bytes=result.num_bytes,
            seconds=result.seconds,
            failed_pages=len(result.ok) - num_ok,
            failed=bool(result.error),
        )

    def record_lookup(
        self,
        tier: TierId,
        *,
        pages_hit: int,
        pages_missed: int,
        page_tokens: int,
    ) -> None:
        """Count what one request found in a tier, and what it did not."""
        with self._lock:
            counters = self._tiers.setdefault(tier, TierCounters())
            counters.pages_hit += pages_hit
            counters.tokens_hit += pages_hit * page_tokens
            counters.pages_missed += pages_missed
            counters.tokens_missed += pages_missed * page_tokens
            counters.requests_hit += pages_hit > 0
            counters.requests_missed += pages_hit == 0

    def record_evictions(self, tier: TierId, num_pages: int) -> None:
        """Count copies dropped from a tier to make room."""
        with self._lock:
            self._tiers.setdefault(tier, TierCounters()).evictions += num_pages

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter of any other kind, e.g. ``offload_dropped_pages``."""
        with self._lock:
            self._named[name] = self._named.get(name, 0) + amount

    def snapshot(self) -> dict[str, Any]:
        """Return all counters: ``{"edges": {"host->device": {...}}, "tiers": {...}}``.

        Only plain dicts, strings and numbers, so JSON can write it.
        """
        with self._lock:
            edges = {
                f"{source.label}->{target.label}": edge.to_dict()
                for (source, target), edge in sorted(self._edges.items())
            }
            tiers = {
                tier.label: counters.to_dict()
                for tier, counters in sorted(self._tiers.items())
            }
            return {"edges": edges, "tiers": tiers, "counters": dict(self._named)}

    def publish(self, sink: Sink) -> None:
        """Hand a snapshot to an exporter, outside the lock."""
        sink.publish(self.snapshot())
