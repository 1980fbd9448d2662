"""One server's admission: its policy, and who must not wait any more.

Shared by the simulator and the engine, which only say what runs and what waits. Times
are seconds of one clock. Used on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    AdmissionPolicy,
    CandidateFacts,
    QueueFacts,
    RunningFacts,
    StepTime,
)
from sgl_tiered.policies.admission.pieces import piece_tokens

__all__ = ["AdmissionControl", "AdmissionCounts", "Waiter"]

_SPARE = 64
"""Due times of requests that left before the rest is looked through."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits for its prefill or for the next part of it.

    Attributes:
        rid: its name.
        arrival_s: when it came.
        ttft_slo_s: its target; ``NO_TARGET`` for none.
        prefill_s: predicted time of what is left of its prefill.
        is_resumed: it decoded before and lost its pages.
    """

    rid: str
    arrival_s: float
    ttft_slo_s: float
    prefill_s: float
    is_resumed: bool = False


@dataclass(slots=True)
class AdmissionCounts:
    """What was decided so far.

    Attributes:
        held: passes that ended at a request that was held.
        cut: parts of prompts made shorter to fit.
        hurried: parts admitted only because they were due.
    """

    held: int = 0
    cut: int = 0
    hurried: int = 0


class AdmissionControl:
    """Says how many tokens of which prompt a pass may have.

    Args:
        policy: decides.
        page_tokens: parts of prompts end at a page's end.
        least_piece_tokens: a shorter part of a prompt is not worth a pass.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        page_tokens: int,
        least_piece_tokens: int,
    ) -> None:
        self.policy = policy
        self.counts = AdmissionCounts()
        self._page_tokens = page_tokens
        self._least_tokens = max(least_piece_tokens, page_tokens)
        self._now_s = 0.0
        # Who was let in last and has not joined the pass: seconds, whether it was cut.
        self._asked: tuple[CandidateFacts, float, bool] | None = None
        # When each waiting request is due, its TTFT target and its prefill's time.
        self._waiting: dict[str, tuple[float, float, float]] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything need be asked at all."""
        return self.policy.needs_facts

    def begin_pass(
        self, running: Sequence[RunningFacts], step_s: StepTime, now_s: float
    ) -> None:
        """Begin a pass while these requests decode."""
        self._now_s = now_s
        self._asked = None
        self.policy.begin_pass(running, step_s, now_s)

    def see_queue(
        self, rids: Sequence[str], waiter_of: Callable[[int], Waiter]
    ) -> None:
        """Tell the policy who waits, if it wants to know.

        Args:
            rids: of all that wait, in the queue's order; one whose prompt is begun
                comes first.
            waiter_of: describes one of them, by position; asked once for each.
        """
        if not self.policy.needs_queue:
            return
        known = np.array(self._known(rids, waiter_of), np.float64).reshape(-1, 3)
        due_at_s, ttft_slo_s, prefill_s = known.T
        self.policy.see_queue(
            QueueFacts(rids, due_at_s - self._now_s, ttft_slo_s, prefill_s)
        )

    def first_due(
        self, rids: Sequence[str], waiter_of: Callable[[int], Waiter]
    ) -> int | None:
        """Return which waiting request is the most overdue; None if none is due.

        Args:
            rids: of all that wait; O(1) each, but for the first time.
            waiter_of: describes one of them, by position.
        """
        first, first_at_s = None, self._now_s
        for position, (at_s, _, _) in enumerate(self._known(rids, waiter_of)):
            if at_s <= first_at_s:
                # Of two that are due since the same moment, the one ahead.
                if at_s == first_at_s and first is not None:
                    continue
                first, first_at_s = position, at_s
        return first

    def fit(
        self,
        waiter: Waiter,
        pass_s: Callable[[int], float],
        num_tokens: int,
        *,
        can_cut: bool,
        has_room: Callable[[int], bool] | None = None,
    ) -> int:
        """Return how many of the next tokens of a request's prompt to compute.

        It counts as part of the pass once ``commit`` says so. Before that an engine may
        ask again, or for somebody else: nothing was spent.

        Args:
            waiter: of the queue, in its order.
            pass_s: predicted seconds of so many of its tokens.
            num_tokens: those that the pass has room for.
            can_cut: fewer are possible (chunked prefill).
            has_room: asked once, if the policy lets a part in, whether memory has room
                for so many tokens of it; None where that is known.

        Returns:
            ``num_tokens``, fewer if ``can_cut``, or 0: it is held, or has no room.
        """
        self._asked = None
        candidate = self._candidate(waiter)
        self._note(waiter)
        left_s = self.policy.judge(candidate)
        least = self._least_tokens if can_cut else num_tokens
        part = piece_tokens(pass_s, num_tokens, left_s, self._page_tokens, least)
        if not part:
            self.counts.held += 1
            return 0
        if has_room is not None and not has_room(part):
            return 0
        self._asked = candidate, pass_s(part), part < num_tokens
        return part

    def commit(self, rid: str) -> None:
        """Note that what ``fit`` let in last joins the pass, if it is of ``rid``."""
        asked, self._asked = self._asked, None
        if asked is None or asked[0].rid != rid:
            return
        candidate, seconds, is_cut = asked
        self.counts.cut += is_cut
        self.counts.hurried += self.policy.took(candidate, seconds)

    def forget(self, rid: str) -> None:
        """Forget when a request is due: it has been admitted whole, or has left."""
        self._waiting.pop(rid, None)

    def _candidate(self, waiter: Waiter) -> CandidateFacts:
        return CandidateFacts(
            waiter.rid,
            max(self._now_s - waiter.arrival_s, 0.0),
            waiter.ttft_slo_s,
            waiter.prefill_s,
            waiter.is_resumed,
        )

    def _known(
        self, rids: Sequence[str], waiter_of: Callable[[int], Waiter]
    ) -> list[tuple[float, float, float]]:
        """Return the entry of each, made at its first time."""
        waiting = self._waiting
        for position, rid in enumerate(rids):
            if rid not in waiting:
                self._note(waiter_of(position))
        known = [waiting[rid] for rid in rids]
        if len(waiting) > 2 * len(rids) + _SPARE:
            self._waiting = dict(zip(rids, known, strict=True))
        return known

    def _note(self, waiter: Waiter) -> None:
        due_s = self.policy.due_s(self._candidate(waiter))
        at_s = self._now_s + due_s if due_s < NO_TARGET else NO_TARGET
        # One that decoded before has met or missed its TTFT already.
        ttft_slo_s = NO_TARGET if waiter.is_resumed else waiter.ttft_slo_s
        self._waiting[waiter.rid] = (at_s, ttft_slo_s, waiter.prefill_s)
