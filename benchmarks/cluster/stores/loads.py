"""Which documents are computed on which server, and when the other one is asked.

A *step* computes one new document on one of two servers, by turns, and asks the other
one about an older document that was computed on its neighbour and that it was never
asked about before: what it knows of it, it has from elsewhere. So many documents are
known and not yet asked about at any time (``ALIVE``): they are the working set. Which
of them is next is drawn by its age, the newest most often and each doubling of the age
as often as the one before, as reuse is in recorded traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = [
    "ALIVE",
    "ANSWER_TOKENS",
    "LENGTHS",
    "NUM_ASKS",
    "RESTART_AT",
    "Step",
    "draw",
    "length_of",
    "working_set_tokens",
]

LENGTHS = (256, 512, 1024, 2048)
"""Tokens of a document; each length as often as another."""
NUM_ASKS = 300
ALIVE = 48
QUESTION_TOKENS, ANSWER_TOKENS = 32, 4
RESTART_AT = 0.5
"""Share of the asks after which a server is killed and started again."""
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What happens in one step.

    Attributes:
        place: 0 or 1: the server that computes; the other one is asked.
        compute: the new document, with a first question.
        ask: an older one with another question; None before ``ALIVE`` are known.
        age: steps since what is asked about was computed.
    """

    place: int
    compute: PlannedRequest
    ask: PlannedRequest | None
    age: int = 0


def draw(seed: int, num_asks: int, alive: int = ALIVE) -> list[Step]:
    """Return steps with so many asks.

    Args:
        seed: of all that is drawn.
        num_asks: steps with one; as many come before as fill the working set.
        alive: documents that are known and not yet asked about.
    """
    generator = np.random.default_rng(seed)
    known: list[tuple[int, str, Tokens]] = []
    steps: list[Step] = []
    lengths: list[int] = []
    for number in range(alive + num_asks):
        if not lengths:
            lengths = [int(each) for each in generator.permutation(LENGTHS)]
        tokens = random_tokens(generator, lengths.pop(), VOCAB_TOKENS)
        name = f"d{number}.n{len(tokens)}"
        place = number % 2
        step = Step(place, _question(generator, f"{name}.compute", tokens), None)
        if len(known) >= alive:
            # Those of the server that computes now; the other one is asked.
            mine = [each for each in known if each[0] % 2 == place]
            chosen = mine[-_age(generator, len(mine))]
            known.remove(chosen)
            ask = _question(generator, f"{chosen[1]}.ask", chosen[2])
            step = Step(place, step.compute, ask, number - chosen[0])
        steps.append(step)
        known.append((number, name, tokens))
    return steps


def length_of(key: str) -> int:
    """Return the tokens of the document that a request is about."""
    return int(key.split(".")[1].removeprefix("n"))


def working_set_tokens(alive: int = ALIVE) -> int:
    """Return the tokens of the documents that are known and not yet asked about."""
    return alive * sum(LENGTHS) // len(LENGTHS)


def asks(steps: Sequence[Step]) -> list[PlannedRequest]:
    """Return all that is asked, in order."""
    return [step.ask for step in steps if step.ask is not None]


def answered_asks(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records of asks, without those of computations."""
    return [record for record in records if record.key.endswith(".ask")]


def _question(
    generator: np.random.Generator, key: str, document: Tokens
) -> PlannedRequest:
    question = random_tokens(generator, QUESTION_TOKENS, VOCAB_TOKENS)
    return PlannedRequest(key, document + question, ANSWER_TOKENS)


def _age(generator: np.random.Generator, most: int) -> int:
    """Draw a rank by age, 1 for the newest: log-uniform up to ``most``."""
    return min(int(np.exp(generator.uniform(0.0, np.log(most + 1)))), most)
