"""Interface of a prefetch policy: when is a read for a waiting request to begin?

Only the time is decided here. What is read, in the order of the queue and once per
page, and what may be evicted for it is `cache/prefetcher.py`'s business. All times are
predicted seconds from now; the first element of a tuple belongs to the head of the
queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["Decoding", "PrefetchPolicy", "QueueFacts"]


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request that is being answered.

    Attributes:
        num_tokens: predicted length of the whole answer (``len_i`` of CaR).
        past_s: time since its first token (``t - timer_i``).
    """

    num_tokens: int
    past_s: float


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """What is known of the queue and of the device.

    Attributes:
        services_s: per waiting request, time of computing what no tier has of it.
        busy_s: time until the pass under way, if there is one, has ended.
        is_blocked: the head of the queue has to wait until a request that decodes has
            ended; otherwise the next pass takes it.
        tpot_s: time per output token, as measured.
        decoding: the requests that are being answered.
    """

    services_s: tuple[float, ...]
    busy_s: float = 0.0
    is_blocked: bool = False
    tpot_s: float = 0.0
    decoding: tuple[Decoding, ...] = ()


@runtime_checkable
class PrefetchPolicy(Protocol):
    """Says when reads begin; keeps nothing itself."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def at_arrival(self) -> bool:
        """Whether a request's own read begins when the request is queued."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether pages are promoted for requests that wait; asks what is below."""
        ...

    def starts_s(self, facts: QueueFacts) -> tuple[float, ...]:
        """Return when each waiting request could go into a pass; never falling."""
        ...

    def due_in_s(
        self, starts_s: Sequence[float], loads_s: Sequence[float]
    ) -> tuple[float, ...]:
        """Return per waiting request when its read should begin; 0 or less for now.

        Args:
            starts_s: as ``starts_s`` returned them.
            loads_s: time that each one's read takes on the link; 0 for nothing to
                read. They are read one after the other.

        Returns:
            Never falling, as reads begin in the order of the queue; infinite for never.
            A longer read, or an earlier start, never makes it later.
        """
        ...
