"""Nothing is held: SGLang's own way, prefill first."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.admission.base import (
    NO_TARGET,
    CandidateFacts,
    QueueFacts,
    RunningFacts,
    StepTime,
)

__all__ = ["NoAdmission"]


class NoAdmission:
    """Lets every request in that has room: the lowest TTFT, and no bound on TPOT."""

    name = "none"
    needs_facts = False
    needs_queue = False

    def begin_pass(
        self, running: Sequence[RunningFacts], step_s: StepTime, now_s: float
    ) -> None:
        """Do nothing."""

    def see_queue(self, queue: QueueFacts) -> None:
        """Do nothing."""

    def judge(self, candidate: CandidateFacts) -> float:
        """Return infinity."""
        del candidate
        return NO_TARGET

    def took(self, candidate: CandidateFacts, seconds: float) -> bool:
        """Return False: nothing is due."""
        del candidate, seconds
        return False

    def due_s(self, candidate: CandidateFacts) -> float:
        """Return infinity: nothing is held, so nothing is due."""
        del candidate
        return NO_TARGET
