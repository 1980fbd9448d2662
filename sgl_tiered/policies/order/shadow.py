"""What fcfs would have made of the queue that another order is serving.

Nobody can know it, but a lower bound can be kept: pair the n-th request that leaves the
queue with the n-th that joined it. An order that serves short requests first has served
as many by any time as fcfs has, and usually more; so the n-th leaves no later than
under fcfs, and the wait of such a pair is at most the one that fcfs gives. An order
that takes its measure from these waits cannot talk itself into longer ones: its own
delays are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.order.base import WaitingFacts

__all__ = ["FCFSShadow"]

HISTORY = 8_192
"""Requests that are remembered. A tenth of them waits longer than a level at the
0.9-quantile: that is a hundredth or more of any stretch up to ten times as long that
they are part of, so the level lies below the 99th percentile of its waits. With 512 it
does so for 5,000 requests only, and one burst could raise it above what is rare."""
DECAY = 0.98
"""Of what is known of the hold-up, per request served: about the last fifty count."""


class FCFSShadow:
    """Keeps the waits of the pairs, and how long requests are held up beside passes.

    Args:
        history: pairs that are remembered, at least 1.
    """

    def __init__(self, history: int = HISTORY) -> None:
        assert history >= 1, f"a history of {history} requests"
        # A ring: the oldest is written over.
        self._ring_s = np.zeros(history)
        self._num_pairs = 0
        # By index, in order of arrival: who joined and is not yet paired.
        self._joined: dict[int, tuple[float, float]] = {}
        self._last: dict[int, WaitingFacts] = {}
        self._last_s = 0.0
        self._next_index = 0
        self._held_s = 0.0
        self._num_tokens = 0.0

    @property
    def waits_s(self) -> npt.NDArray[np.float64]:
        """Waits and passes of the last pairs, seconds, in no order: float64 [n]."""
        return self._ring_s[: self._num_pairs]

    @property
    def held_token_s(self) -> float:
        """Time in which somebody waited and no predicted pass ran, not below 0, per
        token of room that those who were served took on the device."""
        return max(self._held_s / self._num_tokens, 0.0) if self._num_tokens else 0.0

    def look(self, waiting: Sequence[WaitingFacts], now_s: float) -> None:
        """Note who waits now; who waited at the last call and is gone was served.

        Args:
            waiting: by order of arrival.
            now_s: clock value.
        """
        current = {facts.index: facts for facts in waiting}
        gone = self._last.keys() - current.keys()
        if gone:
            self._serve(gone, current)
        if len(gone) < len(self._last):
            # Somebody waited all the time, so the server was not out of work.
            served = [self._last[index] for index in gone]
            served_s = sum(facts.service_s for facts in served)
            num_tokens = sum(facts.num_new_tokens for facts in served)
            keep = DECAY ** len(gone)
            self._held_s = self._held_s * keep + now_s - self._last_s - served_s
            self._num_tokens = self._num_tokens * keep + num_tokens
        # Those who are new are the last.
        first = len(waiting)
        while first and waiting[first - 1].index >= self._next_index:
            first -= 1
        for facts in waiting[first:]:
            self._joined[facts.index] = (facts.arrival_s, facts.service_s)
        if waiting:
            self._next_index = max(self._next_index, waiting[-1].index + 1)
        self._last, self._last_s = current, now_s

    def _serve(self, gone: set[int], current: dict[int, WaitingFacts]) -> None:
        """Pair those that left with the oldest that joined."""
        for index in gone & self._joined.keys():
            arrival_s, _ = self._joined[index]
            self._joined[index] = (arrival_s, self._last[index].service_s)
        for _ in range(len(gone)):
            index = next(iter(self._joined))
            arrival_s, service_s = self._joined.pop(index)
            # They left when the last arrangement was made, not when it was missed.
            if index in current:
                service_s = current[index].service_s
            wait_s = self._last_s - arrival_s + service_s
            self._ring_s[self._num_pairs % len(self._ring_s)] = wait_s
            self._num_pairs += 1
