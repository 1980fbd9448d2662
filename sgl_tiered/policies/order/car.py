"""CaR's order: three classes of requests in a window at the head of the queue."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.order.base import Location, WaitingFacts

__all__ = ["CaROrder", "window_end"]

DEFAULT_WINDOW = 32
"""The paper gives no size; four passes of eight requests."""


def window_end(waiting: Sequence[WaitingFacts], window: int) -> int:
    """Return how many of the first waiting requests are in the window.

    The window begins with the oldest request and is ``window`` arrivals wide, whoever
    of them has been served already. So it moves on when its oldest request has been
    served, and nobody who came ``window`` or more arrivals later is ever in it
    together with that request.
    """
    if not waiting:
        return 0
    stop = waiting[0].index + window
    num = min(len(waiting), window)
    while waiting[num - 1].index >= stop:
        num -= 1
    return num


class CaROrder:
    """Device hits, then requests without history, then those that need a slow tier.

    Source: CaR, section III.B.1 (three groups of requests; the Shuffled Window, "a
    fixed-size window at the front of the queue"). Requests that could use the slow
    tier come last, behind those with no cache at all, so that there is time to bring
    their pages. Reordering takes place inside the window only; behind it requests stay
    in order of arrival, and a request leaves the window by being served and in no
    other way.

    Bound: a request is overtaken by at most ``window - 1`` later arrivals, as the
    window never holds it together with others (see ``window_end``). With p requests
    before it when it came, it is served after p + window - 1 others at the latest.

    Args:
        window: arrivals in the window, at least 1.
    """

    name = "car"
    needs_facts = True

    def __init__(self, window: int = DEFAULT_WINDOW) -> None:
        assert window >= 1, f"a window of {window} requests"
        self.window = window

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        """Return the window by class, then the others; ties by arrival."""
        del now_s, pass_number
        num = window_end(waiting, self.window)
        head = sorted(range(num), key=lambda i: _class_of(waiting[i]))
        return [*head, *range(num, len(waiting))]


def _class_of(facts: WaitingFacts) -> int:
    if facts.location is Location.DEVICE:
        return 0
    # What was found and is not worth its load needs no transfer either.
    return 1 if facts.location is Location.NOWHERE else 2
