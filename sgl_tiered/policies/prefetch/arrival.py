"""A request's read begins as soon as the request is queued."""

from __future__ import annotations

from sgl_tiered.policies.prefetch.none import NoPrefetch

__all__ = ["ArrivalPrefetch"]


class ArrivalPrefetch(NoPrefetch):
    """Reads at arrival, into memory of the request's own, however long it will wait.

    As early as can be, and so the memory for reads is held for the whole wait: where
    that runs out, later requests read when they are looked at.
    """

    name = "arrival"
    at_arrival = True
