"""Interface of an admission: how much prefill may delay those that decode.

Every prefill pass makes the decoding requests wait. An admission says, pass by pass,
for how many seconds; a request that would take longer is held, which keeps its place
in the queue. All times are seconds; the clock's value is handed in.

One pass goes: ``begin_pass``, ``see_queue`` if the policy wants to know who waits, then
for each candidate in the queue's order ``judge`` and, if (a part of) it is taken,
``took``. The same calls give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.length.base import LengthPrediction

__all__ = [
    "NO_TARGET",
    "AdmissionPolicy",
    "CandidateFacts",
    "Float64s",
    "QueueFacts",
    "RunningFacts",
    "StepTime",
]

NO_TARGET = float("inf")
"""A target of a request that has none."""

StepTime = Callable[[int], float]
"""Seconds of a decode step once so many more requests take part."""

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunningFacts:
    """A request that decodes.

    Attributes:
        rid: its name.
        num_past_tokens: tokens that decode steps gave it; the first token, which the
            prefill gives, is not one of them.
        past_s: time since its first token, waiting included. Where requests decode in
            turns, an admission is shown those that take part, without their pauses.
        tpot_slo_s: wanted mean time per token after the first; ``NO_TARGET`` for none.
        prediction: tokens of the answer in all, the first one included.
    """

    rid: str
    num_past_tokens: int
    past_s: float
    tpot_slo_s: float
    prediction: LengthPrediction

    @classmethod
    def at(
        cls,
        now_s: float,
        rid: str,
        num_outputs: int,
        first_token_s: float,
        tpot_slo_s: float,
        prediction: LengthPrediction,
    ) -> RunningFacts:
        """Return them for an answer of ``num_outputs`` tokens, the first included."""
        past_s = max(now_s - first_token_s, 0.0)
        return cls(rid, max(num_outputs - 1, 0), past_s, tpot_slo_s, prediction)


@dataclass(frozen=True, slots=True)
class CandidateFacts:
    """A request that waits for its prefill, or for the next part of it.

    Attributes:
        rid: its name.
        waited_s: since it arrived.
        ttft_slo_s: wanted time to the first token; ``NO_TARGET`` for none.
        prefill_s: predicted time of what is left of its prefill, loads that nothing
            hides included.
        is_resumed: it decoded before and lost its pages, so its TPOT is running.
    """

    rid: str
    waited_s: float
    ttft_slo_s: float
    prefill_s: float
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """All that wait, in the queue's order.

    Attributes:
        rids: their names.
        due_in_s: ``due_s`` of each, float64 [n].
        ttft_slo_s: target of each, ``NO_TARGET`` for none, float64 [n].
        prefill_s: predicted time of what is left of each prefill, float64 [n].
    """

    rids: Sequence[str]
    due_in_s: Float64s
    ttft_slo_s: Float64s
    prefill_s: Float64s


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Decides how much prefill goes into a pass."""

    @property
    def name(self) -> str:
        """The word used in flags and reports."""
        ...

    @property
    def needs_facts(self) -> bool:
        """Whether it looks at anything; without, nothing need be gathered."""
        ...

    @property
    def needs_queue(self) -> bool:
        """Whether it wants ``see_queue`` after each ``begin_pass``."""
        ...

    def begin_pass(
        self, running: Sequence[RunningFacts], step_s: StepTime, now_s: float
    ) -> None:
        """Begin a pass.

        Args:
            running: all that decode.
            step_s: of their next step.
            now_s: never earlier than in the pass before.
        """
        ...

    def see_queue(self, queue: QueueFacts) -> None:
        """Take in who waits, candidates of this pass included."""
        ...

    def judge(self, candidate: CandidateFacts) -> float:
        """Return how many seconds of prefill this request may add to the pass.

        Infinity for any number; 0 or less holds it. While nothing decodes, nothing is
        held: an admission never leaves the device idle.
        """
        ...

    def took(self, candidate: CandidateFacts, seconds: float) -> bool:
        """Note that ``seconds`` of a request just judged go into the pass.

        Returns:
            Whether only its being due let it in.
        """
        ...

    def due_s(self, candidate: CandidateFacts) -> float:
        """Return how long it may still be held; 0 or less: it must not be any more.

        Such a request goes to the head of the queue, the most overdue first.
        """
        ...
