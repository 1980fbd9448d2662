"""Cases for the demo model: held-out text, and pairs strewn into it.

The split is of texts, by a digest of their paths: the profile comes from what the model
was trained on, and of what was held out one half is for development and one half for
evaluation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from offline.cases import RecallCase, Split, TextCase
from sgl_tiered_workloads.training.corpus import Corpus, SourceText, TextTokens
from sgl_tiered_workloads.training.prompts import recall_prompt
from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["TrainedCases", "split_of"]

_SEEDS: dict[Split, int] = {"profile": 1, "development": 2, "evaluation": 3}
_PROFILE_TEXTS = 40


def split_of(path: str) -> Split:
    """Return which half a held-out text belongs to."""
    digest = hashlib.blake2b(b"half:" + path.encode(), digest_size=1).digest()
    return "evaluation" if digest[0] % 2 else "development"


class TrainedCases:
    """Cases of the tokenizer in a model's folder.

    Args:
        folder: of a model that ``sgl_tiered_workloads.training`` made.
        corpus: of the running Python unless given.
    """

    def __init__(self, folder: Path, corpus: Corpus | None = None) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._vocabulary = Vocabulary.of(self._tokenizer)
        self._corpus = corpus or Corpus.read()
        self._encoded = cache(self._encode)

    def texts(
        self, split: Split, num_cases: int, num_prefix: int, num_after: int
    ) -> Sequence[TextCase]:
        """Return windows of texts, of each text as many as fit, all texts in turn."""
        size = num_prefix + num_after - 1
        windows: list[tuple[int, TextCase]] = []
        for source in self._sources(split):
            ids = self._tokenizer.encode(source.text).ids
            for number, begin in enumerate(range(0, len(ids) - size + 1, size)):
                tokens = [self._vocabulary.bos, *ids[begin : begin + size]]
                windows.append((number, TextCase(np.array(tokens), num_prefix)))
        # First windows first: many texts rather than much of one.
        windows.sort(key=lambda window: window[0])
        return [case for _, case in windows[:num_cases]]

    def recalls(
        self, split: Split, num_cases: int, num_prefix: int, distances: Sequence[int]
    ) -> Iterator[RecallCase]:
        """Yield questions about a pair that was asked for once, soon after it came."""
        text = self._encoded(split)
        for number in range(num_cases):
            for distance in distances:
                rng = np.random.default_rng([_SEEDS[split], distance, number])
                prompt = recall_prompt(text, self._vocabulary, distance, rng)
                # More text in front where the distance makes no prefix long enough.
                more = max(0, num_prefix - len(prompt.prefix))
                front, _ = text.take(more, rng)
                tokens = [prompt.tokens[:1], front, prompt.tokens[1:]]
                yield RecallCase(
                    tokens=np.concatenate(tokens).astype(np.int64),
                    num_prefix=more + len(prompt.prefix),
                    num_answer=len(prompt.answer),
                    distance=distance,
                    pair_tokens=prompt.pair_tokens,
                )

    def _sources(self, split: Split) -> list[SourceText]:
        """Return the texts of a split in an order that paths do not tell."""
        texts = list(self._corpus.held_out)
        if split == "profile":
            texts = list(self._corpus.training)
        else:
            texts = [text for text in texts if split_of(text.path) == split]
        order = np.random.default_rng(_SEEDS[split]).permutation(len(texts))
        texts = [texts[place] for place in order]
        return texts[:_PROFILE_TEXTS] if split == "profile" else texts

    def _encode(self, split: Split) -> TextTokens:
        return TextTokens.encode(
            self._sources(split), self._tokenizer, self._vocabulary
        )
