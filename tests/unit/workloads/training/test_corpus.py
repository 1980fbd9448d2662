"""The corpus is split by path, told by a digest, and encoded without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sgl_tiered_workloads.training.corpus import (
    Corpus,
    SourceText,
    TextTokens,
    is_held_out,
    standard_library,
)
from sgl_tiered_workloads.training.vocabulary import RECALL_TOKENS


def test_about_one_text_in_twenty_is_held_out() -> None:
    """The share is near 5 % and the answer depends on the path alone."""
    held = [is_held_out(f"package{i // 7}/module{i}.py") for i in range(4000)]
    assert 150 < sum(held) < 250
    assert is_held_out("a.py") is is_held_out("a.py")


def test_no_text_is_on_both_sides() -> None:
    """Every text is on exactly the side that its path says."""
    texts = [SourceText(f"m{i}.py", f"text {i}") for i in range(300)]
    corpus = Corpus.read(texts)
    assert len(corpus.training) + len(corpus.held_out) == 300
    assert not any(is_held_out(text.path) for text in corpus.training)
    assert all(is_held_out(text.path) for text in corpus.held_out)
    assert corpus.held_out


def test_the_digest_tells_every_change() -> None:
    """Another text, another path or a missing text is another corpus."""
    texts = [SourceText("a.py", "x"), SourceText("b.py", "y")]
    digests = {
        Corpus.read(variant).digest()
        for variant in (
            texts,
            texts[:1],
            [SourceText("a.py", "x "), texts[1]],
            [SourceText("c.py", "x"), texts[1]],
            [SourceText("a.pyx", ""), texts[1]],
        )
    }
    assert len(digests) == 5
    assert Corpus.read(list(texts)).digest() in digests


def test_tests_and_tables_are_left_out(tmp_path: Path) -> None:
    """Files are found in folders, in path order, without what is skipped."""
    for name in ("b/x.py", "a.py", "test/t.py", "b/tests/t.py", "encodings/cp1.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = list(standard_library(tmp_path))
    assert [text.path for text in found] == ["a.py", "b/x.py"]
    assert found[1].text == "b/x.py"


def test_texts_survive_the_tokenizer(sample: Any) -> None:
    """Decoding gives back each text, also one with letters that were never seen."""
    for text in (sample.corpus.held_out[0].text, "naïve \t‰\n\n  x = '\U0001f600'\r\n"):
        ids = sample.tokenizer.encode(text).ids
        assert sample.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_markers_are_single_tokens_of_their_own(sample: Any) -> None:
    """Special and recall tokens are one token each, and none is plain or a word."""
    vocabulary = sample.vocabulary
    for marker in RECALL_TOKENS:
        assert len(sample.tokenizer.encode(marker).ids) == 1
    markers = {vocabulary.set, vocabulary.ask, vocabulary.again, vocabulary.end}
    assert len(markers) == 4
    assert markers.isdisjoint(vocabulary.plain.tolist())
    assert set(vocabulary.words.tolist()) <= set(vocabulary.plain.tolist())


def test_words_are_tokens_again_when_written_as_text(sample: Any) -> None:
    """A question written as text is the same tokens that training saw."""
    words = sample.vocabulary.words[:4].tolist()
    ids = [sample.vocabulary.ask, *words, sample.vocabulary.end]
    text = sample.tokenizer.decode(ids, skip_special_tokens=False)
    assert sample.tokenizer.encode(text).ids == ids
    assert len(sample.vocabulary.words) >= 20


def test_runs_of_text_know_their_line_starts(sample: Any) -> None:
    """Line starts are where the token before holds a line feed, round the end too."""
    text = sample.text
    tokens, starts = text.take(len(text.tokens), np.random.default_rng(5))
    assert len(tokens) == len(text.tokens)
    for at in np.flatnonzero(starts[1:])[:50] + 1:
        assert "\n" in sample.tokenizer.decode([int(tokens[at - 1])])
    assert starts.sum() > 100


def test_an_empty_corpus_is_refused(sample: Any) -> None:
    """Without texts there is nothing to draw from."""
    with pytest.raises(ValueError, match="without texts"):
        TextTokens.encode([], sample.tokenizer, sample.vocabulary)
