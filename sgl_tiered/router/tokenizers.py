"""Tokenizers by the word after ``--tokenizer``.

``none`` is characters. ``python:MODULE:FUNCTION`` calls a function without arguments of
the user's own, which returns a ``prompts.Tokenizer``. Anything else is a folder or a
name that the ``transformers`` library can load: the same one as the servers'
``--tokenizer-path``, or nothing will match.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_tiered.errors import ConfigError
from sgl_tiered.router.prompts import Tokenizer

__all__ = ["PretrainedTokenizer", "make_tokenizer"]

_PYTHON = "python:"


class PretrainedTokenizer:
    """A tokenizer of the ``transformers`` library with its chat template.

    Only what the templates of SGLang's default chat path are given is given here; a
    server with another template (``--chat-template``) sees other tokens.
    """

    def __init__(self, path: str) -> None:
        # Imported only when asked for: it takes seconds and much memory.
        from transformers import AutoTokenizer

        self.name = path
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, special tokens included, as servers do."""
        ids: Sequence[int] = self._tokenizer.encode(text)
        return ids

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the token ids of a chat, with the opening of the answer."""
        # A server's parser fills in what a template reads, e.g. a missing content.
        messages = [
            {**message, "content": message.get("content") or ""}
            for message in json.loads(json.dumps(body["messages"]))
        ]
        extra = body.get("chat_template_kwargs")
        tools = body.get("tools")
        text: str = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            tools=[tool.get("function", tool) for tool in tools] if tools else None,
            **(extra if isinstance(extra, dict) else {}),
        )
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def make_tokenizer(word: str) -> Tokenizer | None:
    """Return the tokenizer of a word of the command line; None for characters.

    Raises:
        ConfigError: it cannot be loaded; says why.
    """
    if word == "none":
        return None
    try:
        if word.startswith(_PYTHON):
            module, _, function = word.removeprefix(_PYTHON).partition(":")
            made: Tokenizer = getattr(importlib.import_module(module), function)()
            return made
        return PretrainedTokenizer(word)
    except Exception as error:
        raise ConfigError(
            "--tokenizer",
            f"{word!r} cannot be loaded ({type(error).__name__}: {error})",
            "name a folder with a tokenizer, python:MODULE:FUNCTION, or none",
        ) from error
