"""Texts become ids that repeat where texts repeat."""

from __future__ import annotations

import pytest
from sgl_tiered_workloads.text_tokens import WordEncoder

PROSE = (
    "The keeper climbed the stairs of the lighthouse every evening, trimmed the wick, "
    "and wrote the weather into a book that nobody had read for 40 years."
)


def test_a_longer_text_begins_with_the_ids_of_its_front() -> None:
    """Prefixes of texts are prefixes of ids, up to the last piece."""
    encode = WordEncoder(8192)
    whole, front = encode(PROSE), encode(PROSE[:80])
    assert whole[: len(front) - 1] == front[:-1]


def test_equal_words_give_equal_ids_in_every_encoder() -> None:
    """Nothing depends on what was encoded before."""
    first, second = WordEncoder(8192), WordEncoder(8192)
    second("something else altogether")
    assert first(PROSE) == second(PROSE)
    assert len(set(first(PROSE))) > 15


def test_prose_has_about_as_many_ids_as_tokens() -> None:
    """A common tokenizer gives a token per four to five letters."""
    assert 3.5 < len(PROSE) / len(WordEncoder(8192)(PROSE)) < 6.0


def test_ids_are_plain_and_in_the_vocabulary() -> None:
    """No special token, none beyond the end, whatever the script."""
    ids = WordEncoder(20)(PROSE + " 日本語のテキスト \u00e9\u00e0_()\n\n\t\x00")
    assert min(ids) >= 7
    assert max(ids) < 20


def test_a_vocabulary_without_plain_tokens_is_refused() -> None:
    """Seven ids are special."""
    with pytest.raises(ValueError, match="no plain tokens"):
        WordEncoder(7)
