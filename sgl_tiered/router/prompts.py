"""What a request's body says about its prompt, without changing a byte of it.

A prompt is a row of units: token ids where the body brings them or a tokenizer is
there, else the characters of its text. The two never match each other, so without a
tokenizer the tree of texts knows only what was sent (with the TTL), as SGLang's events
speak in tokens; ``/router/state`` says which it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = [
    "CHARACTERS",
    "CHARACTERS_PER_TOKEN",
    "PATHS",
    "TOKENS",
    "Prompt",
    "Tokenizer",
    "read_prompt",
]

TOKENS = "tokens"
CHARACTERS = "characters"
CHARACTERS_PER_TOKEN = 4
"""Of English text, about; for loads and lengths only, where no tokenizer is there."""
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
_MAX_TOKEN = 2**31
_NOTHING: tuple[str, Sequence[int]] = (CHARACTERS, ())
_LOG = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Turns texts and chats into the token ids that the servers will see."""

    @property
    def name(self) -> str:
        """What ``/router/state`` calls it."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a text; as ``encode_chat`` where it cannot.

        Both may be called from any thread.
        """
        ...

    def encode_chat(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Return the token ids of a body of ``/v1/chat/completions``.

        Raises:
            Exception: of any kind, where it cannot; characters are used instead.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the router sees it.

    Attributes:
        alphabet: ``TOKENS`` or ``CHARACTERS``.
        units: of the first prompt, int32 values, shape [num_units].
        num_prompts: in the body; the others follow the first.
        num_tokens: of all prompts, an estimate where the alphabet is characters.
        is_stream: whether the answer is to be streamed.
        session: what the body calls its session or user; empty for nothing.
        lora: name of the adapter, empty for none.
        cache_salt: the tenant's salt, empty for none.
        extra_key: what else keeps prefixes apart, empty for nothing.
    """

    alphabet: str
    units: Sequence[int]
    num_prompts: int
    num_tokens: int
    is_stream: bool = False
    session: str = ""
    lora: str = ""
    cache_salt: str = ""
    extra_key: str = ""


def read_prompt(
    path: str, body: Mapping[str, Any], tokenizer: Tokenizer | None
) -> Prompt:
    """Return what a body says.

    Args:
        path: one of ``PATHS``.
        body: the parsed JSON object.
        tokenizer: None for characters.

    A body without a prompt that can be read here (embeddings, images, a mistake) has an
    empty one: an instance will say what it thinks of it, and nobody has its prefix.
    """
    if path == "/v1/chat/completions":
        prompts = [_chat(body, tokenizer)]
    elif path == "/v1/completions":
        prompts = _prompts(body.get("prompt"), tokenizer)
    elif body.get("input_ids") is not None:
        prompts = _prompts(body["input_ids"], tokenizer)
    elif body.get("text") is not None:
        prompts = _prompts(body["text"], tokenizer)
    else:
        prompts = [_NOTHING]
    alphabet, units = prompts[0]
    return Prompt(
        alphabet,
        units,
        len(prompts),
        sum(_num_tokens(*prompt) for prompt in prompts),
        is_stream=body.get("stream") is True,
        session=_session(body),
        lora=_lora(body),
        cache_salt=_text(body.get("cache_salt")),
        extra_key=_text(body.get("extra_key")),
    )


def _num_tokens(alphabet: str, units: Sequence[int]) -> int:
    if alphabet == TOKENS:
        return len(units)
    return -(-len(units) // CHARACTERS_PER_TOKEN)


def _prompts(
    value: Any, tokenizer: Tokenizer | None
) -> list[tuple[str, Sequence[int]]]:
    """Read a text, a row of token ids, or a list of either; never empty."""
    if isinstance(value, str):
        return [_units(value, tokenizer)]
    if not isinstance(value, list) or not value:
        return [_NOTHING]
    if type(value[0]) is int:
        return [_tokens(value)]
    return [
        _units(each, tokenizer) if isinstance(each, str) else _tokens(each)
        for each in value
    ]


def _tokens(values: Any) -> tuple[str, Sequence[int]]:
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        return _NOTHING
    if values and (min(values) < 0 or max(values) >= _MAX_TOKEN):
        return _NOTHING
    return TOKENS, values


def _units(text: str, tokenizer: Tokenizer | None) -> tuple[str, Sequence[int]]:
    if tokenizer is not None:
        try:
            return TOKENS, tokenizer.encode(text)
        except Exception as error:  # noqa: BLE001 - anybody's tokenizer
            _LOG.debug("a text's tokenizer failed: %s", error)
    return CHARACTERS, _characters(text)


def _characters(text: str) -> Sequence[int]:
    # A lone surrogate is legal in JSON; here it is a character like any other.
    raw = text.encode("utf-32-le", "surrogatepass")
    return np.frombuffer(raw, dtype="<i4")  # type: ignore[return-value]


def _chat(
    body: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[str, Sequence[int]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return _NOTHING
    if tokenizer is not None:
        try:
            return TOKENS, tokenizer.encode_chat(body)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            # If anything is wrong with the chat, an instance will say what.
            _LOG.debug("a chat's template failed: %s", error)
    # Tools stand in front of the messages, as templates put them.
    shown = json.dumps([body.get("tools"), messages], ensure_ascii=False)
    return CHARACTERS, _characters(shown)


def _session(body: Mapping[str, Any]) -> str:
    params = body.get("session_params")
    inner = params.get("id") if isinstance(params, dict) else None
    for value in (body.get("session_id"), inner, body.get("user")):
        if isinstance(value, str) and value:
            return value
    return ""


def _lora(body: Mapping[str, Any]) -> str:
    """Return the adapter: ``lora_path``, or what follows the colon of ``model``."""
    path = body.get("lora_path")
    if isinstance(path, str):
        return path
    return _text(body.get("model")).partition(":")[2]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
