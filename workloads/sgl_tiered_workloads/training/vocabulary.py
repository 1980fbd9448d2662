"""What the generators know of the tokenizer: markers, words and line ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RECALL_TOKENS", "Vocabulary"]

RECALL_TOKENS = ("<|set|>", "<|ask|>", "<|again|>")
"""Markers of the recall tasks; they follow the tokenizer's own special tokens."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids by role.

    ``words`` (int32 [num_words]): tokens that are three lower-case letters or more
    behind a space, without the most frequent. A text made of them has exactly these
    tokens again when it is encoded. ``plain`` (int32): every token that
    is not special. ``ends_line`` (bool [num_tokens]): the token holds a line feed.
    """

    num_tokens: int
    bos: int
    eos: int
    end: int
    set: int
    ask: int
    again: int
    words: NDArray[np.int32]
    plain: NDArray[np.int32]
    ends_line: NDArray[np.bool_]

    @staticmethod
    def of(tokenizer: Any, *, skip_share: float = 0.125) -> Vocabulary:
        """Read a ``tokenizers.Tokenizer`` that has the special and recall tokens.

        Args:
            tokenizer: a byte-level BPE; ids of merges are in order of frequency.
            skip_share: this share of the words, the most frequent ones, are no keys
                or values: they are everywhere in a text.
        """
        num_tokens: int = tokenizer.get_vocab_size()
        special = {
            int(token_id)
            for token_id, added in tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        words: list[int] = []
        ends_line = np.zeros(num_tokens, dtype=np.bool_)
        for token_id in range(num_tokens):
            if token_id in special:
                continue
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            ends_line[token_id] = "\n" in text
            word = text[1:]
            if (
                text[:1] == " "
                and len(word) >= 3
                and word.isascii()
                and word.isalpha()
                and word.islower()
                and tokenizer.encode(text).ids == [token_id]
            ):
                words.append(token_id)
        return Vocabulary(
            num_tokens=num_tokens,
            **{
                role: tokenizer.token_to_id(f"<|{role}|>")
                for role in ("bos", "eos", "end", "set", "ask", "again")
            },
            words=np.array(words[int(skip_share * len(words)) :], dtype=np.int32),
            plain=np.array(sorted(set(range(num_tokens)) - special), dtype=np.int32),
            ends_line=ends_line,
        )
