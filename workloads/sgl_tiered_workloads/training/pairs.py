"""Key-value pairs: how a document states one and asks for one.

A statement is ``<|set|> key value <|end|>`` and a question ``<|ask|> key`` with the
answer ``value <|end|>``. Keys are two words and values two to four; inside one document
no word serves twice. A value follows its key at once in both forms, so finding it is
the general skill of a language model that copies what followed the same words before,
and no lookup that only a special position could do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = [
    "KEY_TOKENS",
    "MAX_VALUE_TOKENS",
    "MIN_VALUE_TOKENS",
    "Pair",
    "Piece",
    "draw_pairs",
    "mean_mention_tokens",
    "mentions",
    "question",
    "statement",
]

KEY_TOKENS = 2
MIN_VALUE_TOKENS = 2
MAX_VALUE_TOKENS = 4

# What one mention costs besides key and value: its marker and its end.
_FRAME_TOKENS = 2

# Keys after the marker of a question can be narrowed down to those that were stated:
# worth learning, since every stated key is read for it.
_KEY_WEIGHT = 0.5
_END_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a key and of its value."""

    key: tuple[int, ...]
    value: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to put into a document, all arrays [num_tokens].

    ``weights`` (float32) weigh the loss of predicting each token; ``is_answer`` (bool)
    marks the tokens of an answer.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    is_answer: NDArray[np.bool_]


def mean_mention_tokens() -> float:
    """Return the expected tokens of a statement, and of a question with its answer."""
    return _FRAME_TOKENS + KEY_TOKENS + (MIN_VALUE_TOKENS + MAX_VALUE_TOKENS) / 2


def draw_pairs(
    vocabulary: Vocabulary, num_pairs: int, rng: np.random.Generator
) -> list[Pair]:
    """Draw pairs of which no two share a word.

    Raises:
        ValueError: there are too few words for so many pairs.
    """
    per_pair = KEY_TOKENS + MAX_VALUE_TOKENS
    if num_pairs * per_pair > len(vocabulary.words):
        raise ValueError(f"{num_pairs} pairs of {len(vocabulary.words)} words")
    drawn = rng.choice(vocabulary.words, num_pairs * per_pair, replace=False)
    pairs = []
    for words in drawn.reshape(num_pairs, per_pair).tolist():
        num_value = int(rng.integers(MIN_VALUE_TOKENS, MAX_VALUE_TOKENS + 1))
        key, value = words[:KEY_TOKENS], words[KEY_TOKENS : KEY_TOKENS + num_value]
        pairs.append(Pair(tuple(key), tuple(value)))
    return pairs


def statement(vocabulary: Vocabulary, pair: Pair) -> Piece:
    """Return the piece that states a pair; nothing but its end can be predicted."""
    tokens = [vocabulary.set, *pair.key, *pair.value, vocabulary.end]
    weights = np.zeros(len(tokens), dtype=np.float32)
    weights[-1] = _END_WEIGHT
    return Piece(
        np.array(tokens, dtype=np.int32),
        weights,
        np.zeros(len(tokens), dtype=np.bool_),
    )


def question(vocabulary: Vocabulary, pair: Pair, answer_weight: float) -> Piece:
    """Return the piece that asks for a pair and answers."""
    tokens = [vocabulary.ask, *pair.key, *pair.value, vocabulary.end]
    weights = np.zeros(len(tokens), dtype=np.float32)
    weights[1 : 1 + KEY_TOKENS] = _KEY_WEIGHT
    weights[1 + KEY_TOKENS :] = answer_weight
    is_answer = np.zeros(len(tokens), dtype=np.bool_)
    is_answer[1 + KEY_TOKENS : -1] = True
    return Piece(np.array(tokens, dtype=np.int32), weights, is_answer)


def mentions(
    vocabulary: Vocabulary,
    pairs: Sequence[Pair],
    num_questions: int,
    answer_weight: float,
    rng: np.random.Generator,
) -> Iterator[Piece]:
    """Yield the pairs' statements and ``num_questions`` questions in a random order.

    A question asks for a pair already stated: every other time for the one that waits
    longest for its first question, so that most pairs are read again soon, as a
    conversation comes back to what was said; else for any.
    """
    is_question = np.zeros(len(pairs) + num_questions, dtype=np.bool_)
    is_question[len(pairs) :] = True
    rng.shuffle(is_question)
    stated: list[Pair] = []
    waiting: list[Pair] = []
    to_state = iter(pairs)
    owed = 0
    for asks in is_question.tolist():
        if asks and not stated:
            owed += 1
            continue
        if not asks:
            pair = next(to_state)
            stated.append(pair)
            waiting.append(pair)
            yield statement(vocabulary, pair)
        for _ in range(owed + asks):
            if waiting and rng.random() < 0.5:
                pair = waiting.pop(0)
            else:
                pair = stated[int(rng.integers(len(stated)))]
            yield question(vocabulary, pair, answer_weight)
        owed = 0
