"""A small corpus with its tokenizer, shared by the tests of the training."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.tokenizer import train_tokenizer
from sgl_tiered_workloads.training.corpus import Corpus, SourceText, TextTokens
from sgl_tiered_workloads.training.vocabulary import RECALL_TOKENS, Vocabulary

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

_FILES = ("argparse", "ast", "calendar", "cmd", "copy", "csv", "shutil", "string")


@dataclass(frozen=True)
class Sample:
    """Some files of the standard library and what is made of them."""

    corpus: Corpus
    folder: Path
    tokenizer: Any
    vocabulary: Vocabulary
    text: TextTokens


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Eight files, the last held out whatever its path says."""
    library = Path(sysconfig.get_path("stdlib"))
    *texts, last = (
        SourceText(f"{name}.py", (library / f"{name}.py").read_text(encoding="utf-8"))
        for name in _FILES
    )
    corpus = Corpus(tuple(texts), (last,))
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(
        folder,
        512,
        texts=[text.text for text in texts],
        vocab_tokens=1024,
        more_tokens=RECALL_TOKENS,
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = Vocabulary.of(tokenizer)
    text = TextTokens.encode(corpus.training, tokenizer, vocabulary)
    return Sample(corpus, folder, tokenizer, vocabulary, text)
