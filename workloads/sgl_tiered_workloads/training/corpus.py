"""The text: the running Python's standard library and its reference topics.

Every machine that runs this program has it. A file is held out by a digest of its path,
so the split is the same on every machine, whatever order files are listed in, and a
file never changes sides when others come or go. Left out are tests (many installations
have none), tables of character sets, and the source of the topics, which are taken as
texts.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_tiered_workloads.training.vocabulary import Vocabulary

__all__ = ["Corpus", "SourceText", "TextTokens", "is_held_out", "standard_library"]

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
    | {"pydoc_data", "lib-dynload", "__pycache__", "turtledemo"}
)
_HELD_OUT_PER_MILLE = 50


@dataclass(frozen=True, slots=True)
class SourceText:
    """One file or topic; ``path`` is relative to the library, with forward slashes."""

    path: str
    text: str


def standard_library(root: Path | None = None) -> Iterator[SourceText]:
    """Yield the sources below ``root`` in path order, then the reference topics.

    Args:
        root: the library's folder; the running interpreter's unless given. Topics are
            yielded for the interpreter's own library only.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).parts):
        relative = path.relative_to(folder)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield SourceText(relative.as_posix(), text)
    if root is None:
        # Absent where a distribution splits it off; the digest then tells.
        try:
            from pydoc_data.topics import topics
        except ImportError:
            return
        for name in sorted(topics):
            yield SourceText(f"topics/{name}", topics[name])


def is_held_out(path: str) -> bool:
    """Say whether a text of this path is for evaluation only: about one in twenty."""
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 1000 < _HELD_OUT_PER_MILLE


@dataclass(frozen=True, slots=True)
class Corpus:
    """The texts on both sides of the split, in path order."""

    training: tuple[SourceText, ...]
    held_out: tuple[SourceText, ...]

    @staticmethod
    def read(texts: Iterable[SourceText] | None = None) -> Corpus:
        """Split ``texts``, or the standard library."""
        sides: tuple[list[SourceText], list[SourceText]] = ([], [])
        for text in standard_library() if texts is None else texts:
            sides[is_held_out(text.path)].append(text)
        return Corpus(tuple(sides[0]), tuple(sides[1]))

    def digest(self) -> str:
        """Return a digest of all paths and texts, as hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for text in (*self.training, *self.held_out):
            for part in (text.path, text.text):
                digest.update(part.encode("utf-8", "replace") + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Texts as one run of token ids, int32 [num_tokens]: each ``bos text eos``.

    ``is_line_start`` (bool [num_tokens]): a token follows a line's end.
    """

    tokens: NDArray[np.int32]
    is_line_start: NDArray[np.bool_]

    @staticmethod
    def encode(
        texts: Iterable[SourceText], tokenizer: Any, vocabulary: Vocabulary
    ) -> TextTokens:
        """Encode texts by a ``tokenizers.Tokenizer``.

        Raises:
            ValueError: there is no text.
        """
        found = list(texts)
        if not found:
            raise ValueError("a corpus without texts")
        pieces: list[NDArray[np.int32]] = []
        for encoding in tokenizer.encode_batch([text.text for text in found]):
            ids = [vocabulary.bos, *encoding.ids, vocabulary.eos]
            pieces.append(np.array(ids, dtype=np.int32))
        tokens = np.concatenate(pieces)
        is_line_start = np.zeros(len(tokens), dtype=np.bool_)
        is_line_start[1:] = vocabulary.ends_line[tokens[:-1]]
        return TextTokens(tokens, is_line_start)

    def take(
        self, num_tokens: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return a run from a random place, and its line starts; goes round the end."""
        start = int(rng.integers(len(self.tokens)))
        index = np.arange(start, start + num_tokens) % len(self.tokens)
        return self.tokens[index], self.is_line_start[index]
