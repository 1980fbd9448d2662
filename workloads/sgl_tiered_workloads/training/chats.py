"""Chats for the demo model: every turn ends with a question whose answer is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sgl_tiered_workloads.sessions import ChatSession, ChatShape
from sgl_tiered_workloads.training.corpus import TextTokens
from sgl_tiered_workloads.training.documents import Weaver
from sgl_tiered_workloads.training.pairs import (
    KEY_TOKENS,
    Pair,
    draw_pairs,
    mentions,
    question,
)
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["RecallChats", "recall_chats"]

_NUM_ASKED = 1 + KEY_TOKENS


@dataclass(frozen=True, slots=True)
class RecallChats:
    """Sessions, and how right answers begin, by the key of their request."""

    sessions: list[ChatSession]
    answers: dict[str, tuple[int, ...]]

    def num_right(self, outputs: dict[str, tuple[int, ...]]) -> int:
        """Count the outputs (by request) that begin as they should."""
        return sum(
            outputs[key][: len(answer)] == answer
            for key, answer in self.answers.items()
            if key in outputs
        )


def recall_chats(
    shape: ChatShape,
    text: TextTokens,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
) -> RecallChats:
    """Return chats about text with key-value pairs strewn in.

    A session's opening states two pairs per turn, and asks for most of them once more;
    each turn, the first included, ends by asking for one.

    Args:
        shape: sizes; all sessions share the system prompt, which is text.
        text: what prompts are made of.
        vocabulary: its markers and words.
        rng: draws everything.
    """
    run, _ = text.take(shape.system_tokens - 1, rng)
    system = (vocabulary.bos, *run.tolist())
    sessions = []
    answers: dict[str, tuple[int, ...]] = {}
    for index in range(shape.num_sessions):
        pairs = draw_pairs(vocabulary, 2 * shape.num_turns, rng)
        asked = [pairs[n] for n in rng.permutation(len(pairs))[: shape.num_turns]]
        name = f"s{index}"
        opening = _message(shape.first_tokens, text, vocabulary, rng, asked[0], pairs)
        later = (
            _message(shape.user_tokens, text, vocabulary, rng, pair)
            for pair in asked[1:]
        )
        messages = (system + opening, *later)
        sessions.append(ChatSession(name, messages, shape.answer_tokens))
        answers |= {f"{name}.t{turn}": pair.value for turn, pair in enumerate(asked)}
    return RecallChats(sessions, answers)


def _message(
    num_tokens: int,
    text: TextTokens,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    asked: Pair,
    stated: list[Pair] | None = None,
) -> tuple[int, ...]:
    """Return text of so many tokens that states some pairs and asks for one."""
    run, is_line_start = text.take(num_tokens, rng)
    weaver = Weaver(run, is_line_start, num_tokens)
    pieces = list(mentions(vocabulary, stated, len(stated), 1.0, rng)) if stated else []
    weaver.strew(pieces, num_tokens - _NUM_ASKED, vocabulary, rng)
    for token in question(vocabulary, asked, 1.0).tokens[:_NUM_ASKED].tolist():
        weaver.token(token)
    return tuple(weaver.document().tokens.tolist())
