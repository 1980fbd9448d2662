"""What was decided for one request and what came of it, for the request's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.core.plans import Bools, Decision, LoadPlan, UInt8s, count_act

__all__ = ["LoadReport", "with_rebuilds"]

_MICRO = 6


class Told(Protocol):
    """A part of the report that somebody else fills in."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able value; times in seconds."""
        ...


@dataclass(slots=True)
class LoadReport:
    """The decision in force when a request was admitted, and its outcome.

    Attributes:
        decision: the last one before the admission; None where nothing was looked up.
        replans: what was decided anew while a read was under way, oldest first.
        pages_loaded, pages_read: pages that came to the device, and those of them that
            were read from disk for it.
        pages_by_tier: pages that came to the device, by the tier that had them.
        act_by_tier: those of them that came as activations, and were rebuilt.
        copy_s_by_tier: ``load_s`` by the tier that was copied from; what was read from
            disk is copied from the host's memory.
        read_s: time of the read from disk, from its first byte to its last.
        load_s: time of the copies to the device, shared with the rest of its batch.
        stall_s: time that its pass stood still for them, shared likewise.
        waited_s: time that the request could have been admitted but for its pages.
        is_split: its front was computed in passes of its own while pages behind were
            read, so that what was cached is not the beginning of the prompt.
        peer: what became of the wish for a peer's pages; None where there was none.
    """

    decision: Decision | None = None
    replans: list[str] = field(default_factory=list)
    pages_loaded: int = 0
    pages_read: int = 0
    pages_by_tier: dict[TierId, int] = field(default_factory=dict)
    act_by_tier: dict[TierId, int] = field(default_factory=dict)
    copy_s_by_tier: dict[TierId, float] = field(default_factory=dict)
    read_s: float = 0.0
    load_s: float = 0.0
    stall_s: float = 0.0
    waited_s: float = 0.0
    is_split: bool = False
    peer: Told | None = None

    def add_copies(self, seconds: Mapping[TierId, float]) -> None:
        """Add the time of copies to the device, by the tier copied from."""
        for tier, copy_s in seconds.items():
            self.copy_s_by_tier[tier] = self.copy_s_by_tier.get(tier, 0.0) + copy_s

    def add_pages(self, plan: LoadPlan, used: Bools) -> None:
        """Add the pages of a load that came to the device."""
        self.pages_loaded += int(used.sum())
        _add_counts(self.pages_by_tier, plan.tiers[used])
        self.pages_read = self.pages_by_tier.get(TierId.DISK, 0)
        if plan.representations is not None:
            is_act = plan.representations == Representation.ACT
            _add_counts(self.act_by_tier, plan.tiers[used & is_act])

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able value; times in seconds."""
        made: dict[str, Any] = {}
        acts = self.act_by_tier
        decision = self.decision
        if decision is not None:
            made = {
                "reason": decision.reason,
                "lookup": decision.lookup.name,
                "pages_found": decision.num_found,
                "spans": [
                    {
                        "first_page": span.first_page,
                        "pages": span.num_pages,
                        "action": span.action,
                        "source": None if span.source is None else span.source.label,
                    }
                    for span in decision.spans
                ],
                "predicted": {
                    "load_s": round(decision.load_s, _MICRO),
                    "wait_s": round(decision.wait_s, _MICRO),
                    "recompute_s": round(decision.recompute_s, _MICRO),
                    "total_s": round(decision.total_s, _MICRO),
                    "total_without_load_s": round(decision.alternative_s, _MICRO),
                },
            }
        if self.peer is not None:
            made["peer"] = self.peer.as_dict()
        made["split"] = self.is_split
        made["replans"] = list(self.replans)
        made["actual"] = {
            "pages_loaded": self.pages_loaded,
            "pages_read": self.pages_read,
            "read_s": round(self.read_s, _MICRO),
            "load_s": round(self.load_s, _MICRO),
            "stall_s": round(self.stall_s, _MICRO),
            "waited_s": round(self.waited_s, _MICRO),
            "by_tier": {
                tier.label: {
                    "pages": self.pages_by_tier.get(tier, 0),
                    **({"act_pages": acts[tier]} if tier in acts else {}),
                    "copy_s": round(self.copy_s_by_tier.get(tier, 0.0), _MICRO),
                }
                for tier in sorted(self.pages_by_tier.keys() | self.copy_s_by_tier)
            },
        }
        return made


def with_rebuilds(reason: str, tiers: UInt8s, kinds: UInt8s | None) -> str:
    """Return a reason that says as well what is to be rebuilt, and from where."""
    if not count_act(kinds):
        return reason
    counts = np.bincount(tiers[kinds == Representation.ACT]).tolist()
    parts = [f"{num} from {TierId(t).label}" for t, num in enumerate(counts) if num]
    return f"{reason}; rebuild {sum(counts)} pages: {', '.join(parts)}"


def _add_counts(by_tier: dict[TierId, int], tiers: UInt8s) -> None:
    for number, num_pages in enumerate(np.bincount(tiers).tolist()):
        if num_pages:
            by_tier[TierId(number)] = by_tier.get(TierId(number), 0) + num_pages
