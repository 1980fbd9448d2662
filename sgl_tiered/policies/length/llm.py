"""The served model is asked how long its answer will be, CaR's way.

CaR (III-B) predicts lengths "utilizing the LLM model" with the method of Zheng et al.,
"Response length perception and sequence scheduling" (2023): before the answer, the
model is given the instruction and asked for the length alone. Here the question comes
after the instruction, so that the prompt's KV is computed once and the request itself
finds it.

A model's word about itself is no measurement. So it is one context among the others of
``online.py``: what the model said is a class of requests, whose real lengths are
learned; before any is known they are taken to lie around what was said. A model that
is wrong by a constant factor is put right, and one that guesses is not listened to.

Who asks, and when, is the caller's business: a ``LengthAsker`` over any ``Ask``, or an
engine that goes on until the reply comes. What it costs is kept in an ``AskingBill``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction
from sgl_tiered.policies.length.online import EXPERTS, Expert, OnlineLengths
from sgl_tiered.policies.length.ranges import (
    MAX_LENGTH,
    STARTS,
    Float64s,
    log_normal,
    range_of,
)

__all__ = [
    "MAX_REPLY_TOKENS",
    "QUESTION",
    "Ask",
    "AskingBill",
    "AskingCost",
    "LLMLengths",
    "LengthAsker",
    "Reply",
    "parse_length",
]

QUESTION = (
    "\n\nDo not answer the above yet. Estimate how many tokens your answer would have, "
    "and reply with that whole number only."
)
MAX_REPLY_TOKENS = 12
"""A number, and a few words around it."""

_TRUST = 2.0 * len(EXPERTS)
"""Two thirds of the weights, until the first answers show what its word is worth."""
_TRUST_SIGMA = 0.7
"""Before anything is known: two thirds lie within a factor of 2 of what was said."""
_TOKENS_PER_WORD = 4 / 3
"""English; for a model that counts words although it was asked for tokens."""
_NUMBER = re.compile(
    r"(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?P<part>\.\d+)?\s*(?P<thousand>[kK]\b)?"
)


def parse_length(text: str) -> int:
    """Return the length that a reply names, in tokens; 0 where it names none.

    The first number counts: ``300``, ``1,200``, ``about 1.5k``, ``~200 words``, and of
    ``200-300`` the first. A number without sense as a length counts as none.
    """
    found = _NUMBER.search(text)
    if found is None:
        return 0
    value = float(found["digits"].replace(",", "") + (found["part"] or ""))
    value *= 1000.0 if found["thousand"] else 1.0
    if text[found.end() :].lstrip().lower().startswith("word"):
        value *= _TOKENS_PER_WORD
    return round(value) if 1.0 <= value < MAX_LENGTH else 0


class LLMLengths:
    """Predicts from ``said_tokens`` and what became of it; as ``online`` without.

    Args:
        coverage: see ``OnlineLengths``.
    """

    name = "llm"

    def __init__(self, coverage: float = 0.9) -> None:
        self._shapes: dict[int, Float64s] = {}
        said = Expert("said", 1_000.0, _said_class, self._around, _TRUST)
        self._online = OnlineLengths(coverage, (*EXPERTS, said))

    @property
    def weights(self) -> dict[str, float]:
        """How much each expert counts now; ``said`` is the model's word."""
        return self._online.weights

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Return percentiles of the mixture above ``num_done``."""
        return self._online.predict(facts, num_done)

    def shares(
        self, facts: LengthFacts, edges: Sequence[int], num_done: int = 0
    ) -> list[float]:
        """Return how likely each class of lengths is; see ``OnlineLengths``."""
        return self._online.shares(facts, edges, num_done)

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Learn also how far the model's word was from the truth."""
        self._online.observe(facts, num_output_tokens)

    def _around(self, facts: LengthFacts) -> Float64s:
        # One array for each of the 120 classes at most.
        place = range_of(facts.said_tokens) // 2
        shape = self._shapes.get(place)
        if shape is None:
            shape = log_normal(float(STARTS[2 * place + 1]), _TRUST_SIGMA)
            self._shapes[place] = shape
        return shape


def _said_class(facts: LengthFacts) -> int | None:
    return range_of(facts.said_tokens) // 2 if facts.said_tokens > 0 else None


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back from a model.

    Attributes:
        text: the reply; empty where none came.
        num_prompt_tokens, num_output_tokens: as the server counts them.
        seconds: from sending to the end.
        error: why none came; empty if one did.
        num_cached_tokens: of the prompt, those that were not computed again.
    """

    text: str
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    num_cached_tokens: int = 0


class Ask(Protocol):
    """A way to the served model; the engine, the simulator or a test gives it."""

    def ask(self, prompt: str, max_tokens: int) -> Reply:
        """Return the model's reply to a prompt; failure is a value."""
        ...


@dataclass(frozen=True, slots=True)
class AskingCost:
    """What asking has cost so far.

    Attributes:
        num_asked: questions that have ended.
        num_failed: without a reply.
        num_unclear: replies without a length.
        num_late: when their request was over.
        prompt_tokens, output_tokens: of all questions and replies; of the prompt's
            tokens all but the question's are the request's own, which it reuses.
        cached_tokens: of the prompts, those that were not computed again.
        seconds: from questions to their ends, added up.
    """

    num_asked: int = 0
    num_failed: int = 0
    num_unclear: int = 0
    num_late: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


class AskingBill:
    """Reads replies, and adds up what they cost."""

    def __init__(self) -> None:
        self.cost = AskingCost()

    def add(self, reply: Reply, *, is_late: bool = False) -> int:
        """Count a reply; return the length that it names, 0 where it names none."""
        length = 0 if reply.error else parse_length(reply.text)
        cost = self.cost
        self.cost = AskingCost(
            num_asked=cost.num_asked + 1,
            num_failed=cost.num_failed + bool(reply.error),
            num_unclear=cost.num_unclear + (not reply.error and not length),
            num_late=cost.num_late + is_late,
            prompt_tokens=cost.prompt_tokens + reply.num_prompt_tokens,
            cached_tokens=cost.cached_tokens + reply.num_cached_tokens,
            output_tokens=cost.output_tokens + reply.num_output_tokens,
            seconds=cost.seconds + reply.seconds,
        )
        return length


class LengthAsker:
    """Asks the served model for lengths, and keeps the bill."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._bill = AskingBill()

    @property
    def cost(self) -> AskingCost:
        """What asking has cost so far."""
        return self._bill.cost

    def length_of(self, instruction: str) -> int:
        """Return how many tokens the model expects in its answer to ``instruction``.

        0 where it says nothing of use; for ``LengthFacts.said_tokens`` either way.
        """
        return self._bill.add(self._ask.ask(instruction + QUESTION, MAX_REPLY_TOKENS))
