"""Documents to learn from: text with pairs, questions and repeated spans strewn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_tiered_workloads.training.corpus import TextTokens
from sgl_tiered_workloads.training.pairs import (
    Piece,
    draw_pairs,
    mean_mention_tokens,
    mentions,
)
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["Document", "Mix", "Weaver", "training_document"]

_MIN_SPAN_TOKENS = 8
_MAX_SPAN_TOKENS = 40
# The first tokens of a repeated span only say which one it is.
_CUE_TOKENS = 2
# A piece goes to the next line's start if one is so near.
_SNAP_TOKENS = 24
# Of the mentions of pairs, so many are statements; the others are questions.
_STATED_SHARE = 0.42


@dataclass(frozen=True, slots=True)
class Mix:
    """What training documents are made of.

    ``pair_share`` and ``copy_share`` are shares of a document's tokens in mentions of
    pairs and in repeated spans; ``noise`` is the share of documents whose text is
    random tokens, in which nothing but copying can be learned; ``answer_weight`` weighs
    the loss of an answer's token against a text's.
    """

    pair_share: float
    copy_share: float
    noise: float = 0.0
    answer_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens (int32), loss weights (float32), answer marks (bool), all [num_tokens].

    ``weights[i]`` and ``is_answer[i]`` are about predicting ``tokens[i]`` from those
    before it; ``is_text[i]`` (bool): it is running text.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    is_answer: NDArray[np.bool_]
    is_text: NDArray[np.bool_]


class Weaver:
    """Writes one document from its start: runs of text, and pieces between them.

    Args:
        run: the text to take from, in order; int32 [at least num_tokens].
        is_line_start: bool, of the same length.
        num_tokens: tokens of the whole document.
        text_weight: loss weight of a token of the text.
    """

    def __init__(
        self,
        run: NDArray[np.int32],
        is_line_start: NDArray[np.bool_],
        num_tokens: int,
        text_weight: float = 1.0,
    ) -> None:
        self._run = run
        self._is_line_start = is_line_start
        self._text_weight = text_weight
        self._taken = 0
        self.num_written = 0
        self._document = Document(
            np.zeros(num_tokens, dtype=np.int32),
            np.zeros(num_tokens, dtype=np.float32),
            np.zeros(num_tokens, dtype=np.bool_),
            np.zeros(num_tokens, dtype=np.bool_),
        )

    def token(self, token: int) -> None:
        """Write one token that nobody is to predict."""
        self._document.tokens[self.num_written] = token
        self.num_written += 1

    def text(self, num_tokens: int) -> None:
        """Write the next ``num_tokens`` tokens of the text."""
        span = slice(self.num_written, self.num_written + num_tokens)
        self._document.tokens[span] = self._run[self._taken : self._taken + num_tokens]
        self._document.weights[span] = self._text_weight
        self._document.is_text[span] = True
        self._taken += num_tokens
        self.num_written += num_tokens

    def piece(self, piece: Piece) -> None:
        """Write a piece."""
        span = slice(self.num_written, self.num_written + len(piece.tokens))
        self._document.tokens[span] = piece.tokens
        self._document.weights[span] = piece.weights
        self._document.is_answer[span] = piece.is_answer
        self.num_written += len(piece.tokens)

    def again(
        self, num_tokens: int, vocabulary: Vocabulary, rng: np.random.Generator
    ) -> None:
        """Repeat a random span that was already written, between markers.

        Writes nothing where less than ``num_tokens`` stand behind the first token.
        """
        if self.num_written <= num_tokens:
            return
        start = int(rng.integers(1, self.num_written - num_tokens + 1))
        span = self._document.tokens[start : start + num_tokens]
        tokens = np.concatenate([[vocabulary.again], span, [vocabulary.end]])
        weights = np.ones(len(tokens), dtype=np.float32)
        weights[: 1 + _CUE_TOKENS] = 0.0
        weights[-1] = 0.0
        nothing = np.zeros(len(tokens), dtype=np.bool_)
        self.piece(Piece(tokens.astype(np.int32), weights, nothing))

    def strew(
        self,
        pieces: Sequence[Piece | int],
        num_tokens: int,
        vocabulary: Vocabulary,
        rng: np.random.Generator,
    ) -> None:
        """Write ``num_tokens`` tokens: the pieces in order, the text around them.

        Places are random. An integer among the pieces asks for a repeated span of so
        many tokens.

        Raises:
            ValueError: the pieces are longer than that.
        """
        stop = self.num_written + num_tokens
        room = num_tokens - sum(
            piece + 2 if isinstance(piece, int) else len(piece.tokens)
            for piece in pieces
        )
        if room < 0:
            raise ValueError(f"pieces are {-room} tokens longer than {num_tokens}")
        begin = self._taken
        cuts = np.sort(rng.integers(0, room + 1, len(pieces))).tolist()
        for cut, piece in zip(cuts, pieces, strict=True):
            place = min(begin + room, self._line_start_near(begin + cut))
            self.text(max(0, place - self._taken))
            if isinstance(piece, int):
                self.again(piece, vocabulary, rng)
            else:
                self.piece(piece)
        self.text(stop - self.num_written)

    def _line_start_near(self, place: int) -> int:
        near = self._is_line_start[place : place + _SNAP_TOKENS]
        return place + int(near.argmax()) if near.any() else place

    def document(self) -> Document:
        """Return the document.

        Raises:
            ValueError: it is not full.
        """
        if self.num_written != len(self._document.tokens):
            raise ValueError(
                f"{self.num_written} of {len(self._document.tokens)} tokens written"
            )
        return self._document


def training_document(
    text: TextTokens,
    vocabulary: Vocabulary,
    mix: Mix,
    num_tokens: int,
    rng: np.random.Generator,
) -> Document:
    """Return one document of exactly ``num_tokens`` tokens (at least 64)."""
    is_noise = rng.random() < mix.noise
    if is_noise:
        run = rng.choice(vocabulary.plain, num_tokens).astype(np.int32)
        is_line_start = np.zeros(num_tokens, dtype=np.bool_)
    else:
        run, is_line_start = text.take(num_tokens, rng)
    weaver = Weaver(run, is_line_start, num_tokens, 0.0 if is_noise else 1.0)
    weaver.token(vocabulary.bos)

    num_mentions = int(mix.pair_share * num_tokens / mean_mention_tokens())
    num_pairs = math.ceil(num_mentions * _STATED_SHARE)
    pieces: list[Piece | int] = []
    if num_mentions > 1:
        pairs = draw_pairs(vocabulary, num_pairs, rng)
        questions = num_mentions - len(pairs)
        pieces += mentions(vocabulary, pairs, questions, mix.answer_weight, rng)
    num_copied = int(mix.copy_share * num_tokens)
    longest = min(_MAX_SPAN_TOKENS, num_tokens // 4)
    while num_copied >= _MIN_SPAN_TOKENS:
        span = int(rng.integers(_MIN_SPAN_TOKENS, longest + 1))
        pieces.insert(int(rng.integers(len(pieces) + 1)), span)
        num_copied -= span + 2
    weaver.strew(_fitting(pieces, num_tokens - 1), num_tokens - 1, vocabulary, rng)
    return weaver.document()


def _fitting(pieces: list[Piece | int], num_tokens: int) -> list[Piece | int]:
    """Return the longest front of ``pieces`` that fits into so many tokens."""
    for count, piece in enumerate(pieces):
        num_tokens -= piece + 2 if isinstance(piece, int) else len(piece.tokens)
        if num_tokens < 0:
            return pieces[:count]
    return pieces
