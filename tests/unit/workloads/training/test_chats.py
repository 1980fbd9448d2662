"""Chats whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
from sgl_tiered_workloads.sessions import ChatShape
from sgl_tiered_workloads.training.chats import RecallChats, recall_chats
from sgl_tiered_workloads.training.pairs import KEY_TOKENS

SHAPE = ChatShape(
    num_sessions=3,
    num_turns=4,
    system_tokens=32,
    first_tokens=400,
    user_tokens=20,
    answer_tokens=6,
)


def _chats(sample: Any, seed: int) -> RecallChats:
    rng = np.random.default_rng(seed)
    return recall_chats(SHAPE, sample.text, sample.vocabulary, rng)


def test_every_turn_asks_for_a_pair_that_its_session_stated(sample: Any) -> None:
    """The opening holds marker, key and value of each answer; no key is asked twice."""
    chats = _chats(sample, 1)
    assert len(chats.answers) == SHAPE.num_sessions * SHAPE.num_turns
    for session in chats.sessions:
        opening = session.messages[0]
        assert len(opening) == SHAPE.system_tokens + SHAPE.first_tokens
        stated = " ".join(map(str, opening))
        keys = set()
        for turn, message in enumerate(session.messages):
            asked = message[-1 - KEY_TOKENS :]
            assert asked[0] == sample.vocabulary.ask
            value = chats.answers[f"{session.name}.t{turn}"]
            pair = (sample.vocabulary.set, *asked[1:], *value, sample.vocabulary.end)
            assert " ".join(map(str, pair)) in stated
            keys.add(asked[1:])
            assert turn == 0 or len(message) == SHAPE.user_tokens
        assert len(keys) == SHAPE.num_turns


def test_sessions_share_the_system_prompt_and_nothing_else(sample: Any) -> None:
    """Openings differ behind it; equal seeds give equal chats."""
    chats = _chats(sample, 2)
    openings = [session.messages[0] for session in chats.sessions]
    assert len({opening[: SHAPE.system_tokens] for opening in openings}) == 1
    assert len({opening[SHAPE.system_tokens :] for opening in openings}) == 3
    again = _chats(sample, 2)
    assert [s.messages for s in again.sessions] == [s.messages for s in chats.sessions]


def test_only_an_answer_that_begins_with_the_value_is_right(sample: Any) -> None:
    """One wrong token makes an answer wrong, whatever follows does not."""
    chats = _chats(sample, 3)
    outputs = {key: (*value, 1, 2) for key, value in chats.answers.items()}
    assert chats.num_right(outputs) == len(chats.answers)
    key = next(iter(outputs))
    outputs[key] = (outputs[key][0] + 1, *outputs[key][1:])
    assert chats.num_right(outputs) == len(chats.answers) - 1
