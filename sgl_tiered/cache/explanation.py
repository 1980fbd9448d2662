"""What engine and simulator alike tell of a request: predictions, misses, edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.cache.waiting_state import WaitingLoad
from sgl_tiered.core.ids import Lookup, TierId
from sgl_tiered.core.plans import Decision

__all__ = ["add_edge", "add_load_edges", "missing_spans", "predicted_service_s"]

_MICRO = 6


def predicted_service_s(
    cache: TieredCache, decision: Decision | None, num_tokens: int
) -> float:
    """Return the predicted time of a pass for a request alone, its loads included.

    Args:
        cache: predicts.
        decision: about its pages; None where there is none.
        num_tokens: to have KV for.
    """
    planner = cache.planner
    num_pages = -(-num_tokens // cache.config.layout.page_tokens)
    if decision is None:
        return planner.compute_s(0, num_pages)
    first = decision.first_page + decision.num_pages
    compute_s = planner.compute_s(first, max(num_pages - first, 1))
    if not decision.num_pages:
        return compute_s
    before_s = 0.0
    if num_read := decision.num_from(TierId.DISK):
        before_s = planner.load_s(TierId.DISK, num_read)
    direct_s = max(0.0, decision.load_s - before_s)
    return decision.wait_s + before_s + planner.pass_s(compute_s, direct_s)


def missing_spans(
    cache: TieredCache,
    state: WaitingLoad[Any],
    prefix_pages: int,
    siblings: Mapping[str, bytes],
) -> list[dict[str, Any]]:
    """Say why the pages behind a request's prefix are computed.

    Args:
        cache: knows.
        state: of the request's load.
        prefix_pages: pages that are on the device or on their way to it.
        siblings: namespaces that may be told of.
    """
    page = cache.config.layout.page_tokens
    decision = state.report.decision
    first, end = prefix_pages, state.max_pages
    told = []
    reason = state.reason
    if decision is not None and decision.lookup is not Lookup.PENDING:
        found_end = min(decision.first_page + decision.num_found, end)
        if first < found_end and not state.is_split:
            span = {
                "first_token": first * page,
                "tokens": (found_end - first) * page,
                "cause": "not loaded",
                "text": reason or decision.reason,
            }
            told.append(span)
        first = max(first, found_end)
    spans = cache.misses.explain(
        state.digest, state.tokens, first, end, held=reason, siblings=siblings
    )
    return told + [span.as_dict(page) for span in spans]


def add_load_edges(
    edges: dict[str, Any],
    actual: dict[str, Any],
    page_bytes: int,
    act_page_bytes: int = 0,
) -> None:
    """Add what was brought to the device for a request, from its report's numbers.

    The disk is read by whole pages, whatever they hold.
    """
    for label, part in actual.get("by_tier", {}).items():
        name = f"{label}->device"
        num_act = part.get("act_pages", 0)
        num_bytes = (part["pages"] - num_act) * page_bytes + num_act * act_page_bytes
        if label == TierId.DISK.label:
            add_edge(edges, "disk->host", part["pages"] * page_bytes, actual["read_s"])
            name = "host->device"
        add_edge(edges, name, num_bytes, part["copy_s"])


def add_edge(edges: dict[str, Any], name: str, num_bytes: int, seconds: float) -> None:
    """Add bytes and seconds to an edge such as ``host->device``."""
    before = edges.get(name, {"bytes": 0, "s": 0.0})
    edges[name] = {
        "bytes": before["bytes"] + num_bytes,
        "s": round(before["s"] + seconds, _MICRO),
    }
