"""Documents and prompts are what they say: shares, order, distances, answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sgl_tiered_workloads.training.documents import Mix, Weaver, training_document
from sgl_tiered_workloads.training.pairs import (
    KEY_TOKENS,
    draw_pairs,
    mentions,
    question,
    statement,
)
from sgl_tiered_workloads.training.prompts import MAX_PAIR_SHARE, recall_prompt


def find_mentions(tokens: Any, vocabulary: Any) -> list[tuple[int, bool, list[int]]]:
    """Return (place of the end, is a question, words) of every mention."""
    found = []
    tokens = tokens.tolist()
    for at, token in enumerate(tokens):
        if token in (vocabulary.set, vocabulary.ask) and vocabulary.end in tokens[at:]:
            end = tokens.index(vocabulary.end, at)
            found.append((end, token == vocabulary.ask, tokens[at + 1 : end]))
    return found


def test_no_two_pairs_share_a_word(sample: Any) -> None:
    """Keys and values are drawn without replacement, and too many are refused."""
    pairs = draw_pairs(sample.vocabulary, 3, np.random.default_rng(1))
    words = [word for pair in pairs for word in (*pair.key, *pair.value)]
    assert len(set(words)) == len(words)
    with pytest.raises(ValueError, match="pairs of"):
        draw_pairs(sample.vocabulary, 10_000, np.random.default_rng(1))


def test_only_answers_weigh_as_answers(sample: Any) -> None:
    """A statement's words cannot be predicted; the value in a question can."""
    [pair] = draw_pairs(sample.vocabulary, 1, np.random.default_rng(2))
    stated = statement(sample.vocabulary, pair)
    assert stated.weights[:-1].tolist() == [0.0] * (len(stated.tokens) - 1)
    assert not stated.is_answer.any()
    asked = question(sample.vocabulary, pair, 3.0)
    assert asked.tokens[asked.is_answer].tolist() == list(pair.value)
    assert (asked.weights[asked.is_answer] == 3.0).all()
    assert asked.weights[0] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_questions_come_after_their_statements(sample: Any, seed: int) -> None:
    """All pairs are stated, all questions asked, none too early, all answers right."""
    rng = np.random.default_rng(seed)
    pairs = draw_pairs(sample.vocabulary, 3, rng)
    values: dict[tuple[int, ...], tuple[int, ...]] = {}
    num_questions = 0
    for piece in mentions(sample.vocabulary, pairs, 5, 1.0, rng):
        words = piece.tokens[1:-1].tolist()
        key, value = tuple(words[:KEY_TOKENS]), tuple(words[KEY_TOKENS:])
        if piece.tokens[0] == sample.vocabulary.set:
            values[key] = value
        else:
            num_questions += 1
            assert values[key] == value
    assert num_questions == 5
    assert values == {pair.key: pair.value for pair in pairs}


@pytest.mark.parametrize(
    ("mix", "num_tokens"),
    [
        (Mix(0.5, 0.3, 0.3), 129),
        (Mix(0.1, 0.1), 257),
        (Mix(0.0, 0.0), 64),
        (Mix(0.3, 0.5, 1.0), 200),
    ],
)
def test_training_documents_are_full_and_marked(
    sample: Any, mix: Mix, num_tokens: int
) -> None:
    """Length is exact, marks agree with tokens, and shares are kept on average."""
    rng = np.random.default_rng(3)
    mentioned = 0
    for _ in range(30):
        document = training_document(
            sample.text, sample.vocabulary, mix, num_tokens, rng
        )
        assert len(document.tokens) == len(document.weights) == num_tokens
        assert document.tokens[0] == sample.vocabulary.bos
        assert document.weights[0] == 0.0
        assert document.tokens.max() < sample.vocabulary.num_tokens
        assert not (document.is_text & document.is_answer).any()
        assert set(document.tokens[document.is_answer].tolist()) <= set(
            sample.vocabulary.words.tolist()
        )
        mentioned += int(document.is_answer.sum())
    # A third of a mention or so is answers, in a bit more than half of the mentions.
    share = mentioned / (30 * num_tokens)
    assert share <= mix.pair_share * 0.4
    assert (share > mix.pair_share * 0.08) == (mix.pair_share > 0)


def test_a_repeated_span_repeats_what_stood_before(sample: Any) -> None:
    """Behind the marker stands an earlier span, and its cue weighs nothing."""
    run = sample.vocabulary.plain[np.arange(40) % 50]
    weaver = Weaver(run, np.zeros(40, dtype=bool), 30)
    weaver.token(sample.vocabulary.bos)
    weaver.again(8, sample.vocabulary, np.random.default_rng(0))
    assert weaver.num_written == 1
    weaver.text(19)
    weaver.again(8, sample.vocabulary, np.random.default_rng(0))
    document = weaver.document()
    tokens = document.tokens.tolist()
    assert tokens[20] == sample.vocabulary.again
    windows = [tokens[at : at + 8] for at in range(1, 13)]
    assert tokens[21:29] in windows
    assert document.weights[20:30].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0]


def test_a_document_that_is_not_full_is_refused(sample: Any) -> None:
    """Neither half a document nor pieces that do not fit pass in silence."""
    weaver = Weaver(sample.text.tokens, sample.text.is_line_start, 20)
    with pytest.raises(ValueError, match="0 of 20"):
        weaver.document()
    with pytest.raises(ValueError, match="longer than 5"):
        weaver.strew([10], 5, sample.vocabulary, np.random.default_rng(0))


@pytest.mark.parametrize("distance", [256, 1000])
@pytest.mark.parametrize("read_again", [True, False])
def test_prompts_ask_at_the_distance(
    sample: Any, distance: int, read_again: bool
) -> None:
    """The last mention of the asked pair ends so many tokens before the question."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        prompt = recall_prompt(
            sample.text, sample.vocabulary, distance, rng, read_again=read_again
        )
        words = [*prompt.question[1:].tolist(), *prompt.answer.tolist()]
        own = [
            (end, asks)
            for end, asks, found in find_mentions(prompt.prefix, sample.vocabulary)
            if found == words
        ]
        assert [asks for _, asks in own] == [False, True][: 1 + read_again]
        assert len(prompt.prefix) - 1 - own[-1][0] == prompt.distance == distance
        if read_again:
            assert own[1][0] - own[0][0] > 100
        assert prompt.question[0] == sample.vocabulary.ask
        assert prompt.tokens[-1] == prompt.answer[-1]


def test_pairs_are_at_most_a_tenth_of_a_prompt(sample: Any) -> None:
    """Mentions found in the tokens are as many as stated, and few."""
    rng = np.random.default_rng(8)
    for distance in (256, 700, 1500):
        prompt = recall_prompt(sample.text, sample.vocabulary, distance, rng)
        found = find_mentions(prompt.prefix, sample.vocabulary)
        assert sum(len(words) + 2 for *_, words in found) == prompt.pair_tokens
        assert prompt.pair_tokens <= MAX_PAIR_SHARE * len(prompt.prefix)
        assert any(asks for _, asks, _ in found)


def test_the_text_of_a_prompt_is_the_text_it_was_given(sample: Any) -> None:
    """Without its mentions, a prompt is one run of the given text."""
    prompt = recall_prompt(
        sample.text, sample.vocabulary, 300, np.random.default_rng(9)
    )
    tokens = prompt.prefix.tolist()
    plain, at = [], 1
    markers = (sample.vocabulary.set, sample.vocabulary.ask)
    while at < len(tokens):
        if tokens[at] in markers:
            at = tokens.index(sample.vocabulary.end, at)
        else:
            plain.append(tokens[at])
        at += 1
    twice = np.concatenate([sample.text.tokens, sample.text.tokens]).tobytes()
    assert np.array(plain, dtype=np.int32).tobytes() in twice


def test_a_short_distance_is_refused(sample: Any) -> None:
    """Below 256 tokens the pairs would be more than a tenth."""
    with pytest.raises(ValueError, match="no room"):
        recall_prompt(sample.text, sample.vocabulary, 100, np.random.default_rng(0))
