"""Cases for the demo model keep their splits apart and ask for what stands there."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

LIBRARY = ("argparse", "ast", "calendar", "cgi", "cmd", "code", "copy", "csv", "dis")


@pytest.fixture(scope="module")
def corpus_and_folder(tmp_path_factory):
    """A few files of the library on both sides, and a tokenizer trained on them."""
    from sgl_tiered_workloads.tokenizer import train_tokenizer
    from sgl_tiered_workloads.training.corpus import Corpus, SourceText
    from sgl_tiered_workloads.training.vocabulary import RECALL_TOKENS

    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for name in LIBRARY if (path := folder / f"{name}.py").exists()]
    texts = tuple(SourceText(path.name, path.read_text()) for path in paths)
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(
        out,
        8192,
        texts=[text.text for text in texts],
        vocab_tokens=1536,
        more_tokens=RECALL_TOKENS,
    )
    return Corpus(training=texts[:2], held_out=texts[2:]), out


@pytest.fixture(scope="module")
def source(corpus_and_folder):
    """The cases."""
    from offline.trained import TrainedCases

    corpus, folder = corpus_and_folder
    return TrainedCases(folder, corpus)


def test_no_text_is_in_two_splits(source) -> None:
    """Windows of development and evaluation, and of training text, are all others."""
    windows = {
        split: {case.tokens.tobytes() for case in source.texts(split, 50, 300, 100)}
        for split in ("profile", "development", "evaluation")
    }
    assert all(windows.values())
    assert sum(map(len, windows.values())) == len(set.union(*windows.values()))


def test_texts_are_of_the_size_that_was_asked_for(source) -> None:
    """From a text's beginning, or a window of its middle."""
    for case in source.texts("evaluation", 5, 300, 100):
        assert len(case.tokens) == 400
        assert case.num_prefix == 300


def test_the_answer_stands_at_its_distance(source) -> None:
    """Value behind key, last where the distance says, in a long enough prefix."""
    cases = list(source.recalls("development", 2, 900, (300, 1000)))
    assert [case.distance for case in cases] == [300, 1000, 300, 1000]
    for case in cases:
        assert case.num_prefix >= 900
        assert case.pair_tokens <= 0.1 * case.num_prefix
        answer = case.tokens[-case.num_answer :]
        question = case.tokens[case.num_prefix : -case.num_answer]
        sought = np.concatenate([question[1:], answer])
        found = [
            begin
            for begin in range(case.num_prefix)
            if np.array_equal(case.tokens[begin : begin + len(sought)], sought)
        ]
        assert len(found) == 2
        end = found[-1] + len(sought)
        # The mention's own end mark is behind the value.
        assert case.num_prefix - end - 1 == case.distance


def test_equal_arguments_give_equal_cases(source) -> None:
    """Asked twice, and other splits give others."""
    first, again = (
        [case.tokens.tolist() for case in source.recalls("evaluation", 1, 500, (300,))]
        for _ in range(2)
    )
    other = next(iter(source.recalls("development", 1, 500, (300,))))
    assert first == again
    assert other.tokens.tolist() not in first
