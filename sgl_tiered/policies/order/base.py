"""Interface of an order: in which order waiting requests are offered to the next pass.

An order only arranges. Whether a request fits, whether its pages have come and what a
pass may hold is the engine's business: it takes what it can from the front of the
arrangement. Orders see frozen facts and no clock but the time handed in, so they run
alike in the simulator, in an engine and, given the same facts, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

__all__ = ["Location", "RequestOrder", "WaitingFacts"]


class Location(float, Enum):
    """The slowest place that a request's prefix comes from; the value is its distance.

    The distances of device, host, disk and nowhere are the Berkeley report's N (its
    section on Relaxed-FPF). CXL memory, which it did not have, lies half way between
    host and disk: read in place like the host's, over a slower link.
    """

    DEVICE = 0.0
    HOST = 1.0
    CXL = 1.5
    DISK = 2.0
    NOWHERE = 3.0


@dataclass(frozen=True, slots=True)
class WaitingFacts:
    """What an order may know of a waiting request.

    Attributes:
        index: number by order of arrival; the same in every pass, never used again.
        arrival_s: clock value when it joined the queue, seconds.
        location: where the part of its prompt comes from that need not be computed;
            ``NOWHERE`` where all of it is computed.
        num_prompt_tokens: of the prompt (after a retraction, with the answer so far).
        num_uncached_tokens: of these, tokens to compute.
        service_s: predicted seconds of a pass for this request alone: computing what
            is missing, and the loads to the device that computing does not hide.
        has_history: some of its pages were found somewhere, loaded or not.
        num_device_tokens: of the prompt, tokens that the device has: they take no room.
    """

    index: int
    arrival_s: float
    location: Location
    num_prompt_tokens: int
    num_uncached_tokens: int
    service_s: float
    has_history: bool
    num_device_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prompt that need room on the device."""
        return max(self.num_prompt_tokens - self.num_device_tokens, 1)


@runtime_checkable
class RequestOrder(Protocol):
    """Arranges the queue; one object per queue, asked once per scheduling pass.

    It may remember what it saw in earlier passes: who was there and now is not has
    been served, or went away.
    """

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def needs_facts(self) -> bool:
        """Whether anything but ``index`` and ``arrival_s`` has to be looked up."""
        ...

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        """Return the positions in ``waiting`` in the order in which to serve them.

        Args:
            waiting: by order of arrival: ``index`` rises.
            now_s: clock value, not before any arrival; never falls between calls.
            pass_number: of the scheduling pass; rises.
        """
        ...
