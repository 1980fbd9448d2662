"""What quality is judged by: held-out text behind a prefix, and questions about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "Case",
    "CaseSource",
    "RandomCases",
    "RecallCase",
    "Split",
    "TextCase",
]

Ints = npt.NDArray[np.int64]
Split = Literal["profile", "development", "evaluation"]
"""``profile``: what layers are measured on; ``development``: what methods are tuned on;
``evaluation``: what is reported, and never looked at before."""


@dataclass(frozen=True, slots=True)
class TextCase:
    """A text; what follows its first ``num_prefix`` tokens is to be predicted."""

    tokens: Ints
    num_prefix: int

    kind = "text"


@dataclass(frozen=True, slots=True)
class RecallCase:
    """A prefix, a question about it and its answer, in one run of tokens.

    Attributes:
        tokens: all three.
        num_prefix: where the question starts; the prefix is compressed before.
        num_answer: the last tokens, to be generated greedily.
        distance: tokens from what was asked for to the question.
        pair_tokens: tokens of the prefix in key-value pairs.
    """

    tokens: Ints
    num_prefix: int
    num_answer: int
    distance: int
    pair_tokens: int = 0

    kind = "recall"


Case = TextCase | RecallCase


class CaseSource(Protocol):
    """Where cases come from; equal arguments give equal cases."""

    def texts(
        self, split: Split, num_cases: int, num_prefix: int, num_after: int
    ) -> Sequence[TextCase]:
        """Return that many texts, or as many as there are."""
        ...

    def recalls(
        self, split: Split, num_cases: int, num_prefix: int, distances: Sequence[int]
    ) -> Iterator[RecallCase]:
        """Yield that many cases of each distance, prefixes of ``num_prefix`` at least.

        The distances take turns, so the first few cases are of all of them.
        """
        ...


class RandomCases:
    """Cases of random tokens: no model knows them, but every path can be walked."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._seed = seed

    def texts(
        self, split: Split, num_cases: int, num_prefix: int, num_after: int
    ) -> Sequence[TextCase]:
        """Return random tokens."""
        rng = np.random.default_rng((self._seed, len(split), 0))
        size = num_prefix + num_after
        return [
            TextCase(rng.integers(self._vocabulary, size=size), num_prefix)
            for _ in range(num_cases)
        ]

    def recalls(
        self, split: Split, num_cases: int, num_prefix: int, distances: Sequence[int]
    ) -> Iterator[RecallCase]:
        """Yield random tokens in which a span comes twice."""
        rng = np.random.default_rng((self._seed, len(split), 1))
        for _ in range(num_cases):
            for distance in distances:
                count = max(num_prefix, distance + 8)
                tokens = rng.integers(self._vocabulary, size=count + 6)
                begin = count - distance - 6
                tokens[count:] = tokens[begin : begin + 6]
                yield RecallCase(tokens, count, 3, distance, 6)
