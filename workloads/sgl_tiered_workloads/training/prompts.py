"""Questions to judge by: a pair at an exact distance, the question at the end.

The asked pair stands early; behind its last mention come exactly ``distance`` tokens of
text and of other pairs' mentions, then the question. All mentions together are at most
a tenth of the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_tiered_workloads.training.corpus import TextTokens
from sgl_tiered_workloads.training.documents import Weaver
from sgl_tiered_workloads.training.pairs import (
    KEY_TOKENS,
    MAX_VALUE_TOKENS,
    draw_pairs,
    mentions,
    question,
    statement,
)
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["MAX_PAIR_SHARE", "RecallPrompt", "recall_prompt"]

MAX_PAIR_SHARE = 0.1
"""Share of a prompt's tokens in mentions of pairs, at most."""

_MAX_MENTION_TOKENS = 2 + KEY_TOKENS + MAX_VALUE_TOKENS
_STATED_SHARE = 0.45


@dataclass(frozen=True, slots=True)
class RecallPrompt:
    """A context and a question about it.

    ``prefix`` (int32 [num_prefix]) ends where the question begins: a cache may be
    compressed there without knowing what will be asked. ``question`` (int32) is the
    marker and the key, ``answer`` (int32) the value, to be generated greedily.
    ``distance``: tokens between the pair's last mention and the question.
    ``pair_tokens``: tokens of the prefix in mentions of pairs.
    """

    prefix: NDArray[np.int32]
    question: NDArray[np.int32]
    answer: NDArray[np.int32]
    distance: int
    pair_tokens: int

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prefix, question and answer in one."""
        return np.concatenate([self.prefix, self.question, self.answer])


def recall_prompt(
    text: TextTokens,
    vocabulary: Vocabulary,
    distance: int,
    rng: np.random.Generator,
    *,
    read_again: bool = True,
) -> RecallPrompt:
    """Return a prompt whose asked pair was last mentioned ``distance`` tokens before.

    Args:
        text: what to strew the pairs in.
        vocabulary: its markers and words.
        distance: tokens, at least 256.
        rng: draws everything.
        read_again: the pair was asked for once, soon after it was stated, as a
            conversation comes back to what was said; the distance counts from there.
            Otherwise its statement is its only mention.

    Raises:
        ValueError: the distance is too short.
    """
    if distance < 256:
        raise ValueError(f"a distance of {distance} tokens leaves no room")
    front = int(rng.integers(200, 300))
    num_tokens = front + distance
    own = _MAX_MENTION_TOKENS * (2 if read_again else 1)
    num_others = int((MAX_PAIR_SHARE * num_tokens - own) / _MAX_MENTION_TOKENS)
    num_pairs = max(1, round(num_others * _STATED_SHARE))
    asked, *others = draw_pairs(vocabulary, 1 + num_pairs, rng)

    run, is_line_start = text.take(num_tokens, rng)
    weaver = Weaver(run, is_line_start, num_tokens)
    weaver.token(vocabulary.bos)
    stated = statement(vocabulary, asked)
    asking = question(vocabulary, asked, 1.0)
    if read_again:
        # More than any local window lies between the two, so that reading it again
        # shows as long-range attention.
        gap = int(rng.integers(100, 160))
        early = front - 1 - gap - len(asking.tokens)
        weaver.strew([stated], early, vocabulary, rng)
        weaver.text(gap)
        weaver.piece(asking)
    else:
        weaver.text(front - 1 - len(stated.tokens))
        weaver.piece(stated)
    pieces = list(mentions(vocabulary, others, num_others - num_pairs, 1.0, rng))
    weaver.strew(pieces, distance, vocabulary, rng)

    mentioned = [stated, asking, *pieces] if read_again else [stated, *pieces]
    num_asked = 1 + KEY_TOKENS
    return RecallPrompt(
        prefix=weaver.document().tokens,
        question=asking.tokens[:num_asked],
        answer=asking.tokens[num_asked:-1],
        distance=distance,
        pair_tokens=sum(len(piece.tokens) for piece in mentioned),
    )
