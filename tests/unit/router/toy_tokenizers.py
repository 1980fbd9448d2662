"""Tokenizers of a user's own, for ``--tokenizer python:MODULE:FUNCTION``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Letters", "broken", "letters"]


class Letters:
    """A token per letter. Some words make it do what a hostile template does."""

    name = "letters"

    def encode(self, text: str) -> Sequence[int]:
        if "loop" in text:
            while True:
                pass
        if "exit" in text:
            raise SystemExit(3)
        if "memory" in text:
            return [0] * 10**12
        if "?" in text:
            raise ValueError("no such letter")
        return [ord(letter) for letter in text]

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        words = [each["content"] for each in body["messages"]]
        return self.encode("".join(words))


def letters() -> Letters:
    """Make one."""
    return Letters()


def broken() -> Letters:
    """Fail to."""
    raise ValueError("it has no vocabulary")
