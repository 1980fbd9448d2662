"""What a request's body says about its prompt, without changing a byte of it.

A prompt is a row of units: token ids where the body brings them or a tokenizer is
there, else the characters of its text. The two never match each other, so without a
tokenizer the tree of texts knows only what was sent (with the TTL), as SGLang's events
speak in tokens; ``/router/state`` says which it is.

What clients send costs no more than a bound: of a longer prompt the first units count,
and of what a chat hands to its template only plain values under known names, as a name
may be one of the library's own (``chat_template`` is a program).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sgl_tiered.core.plans import Int64s
from sgl_tiered.router.tree import keys_of, root_key

__all__ = [
    "CHARACTERS",
    "CHARACTERS_PER_TOKEN",
    "MAX_PAGES",
    "PATHS",
    "TEMPLATE_KEYS",
    "TOKENS",
    "Prompt",
    "PromptKeys",
    "Tokenizer",
    "read_prompt",
]

TOKENS = "tokens"
CHARACTERS = "characters"
CHARACTERS_PER_TOKEN = 4
"""Of English text, about; for loads and lengths only, where no tokenizer is there."""
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
MAX_PAGES = 2**16
"""Of a prompt that count: a million tokens in pages of 16."""
_MAX_UNITS = 2**22
"""Of a prompt that count, and characters of a text that is tokenized."""
TEMPLATE_KEYS = frozenset(
    {
        "add_vision_id",
        "builtin_tools",
        "clear_thinking",
        "date_string",
        "enable_thinking",
        "keep_past_thinking",
        "preserve_thinking",
        "reasoning_effort",
        "thinking",
        "thinking_budget",
        "tools_in_user_message",
    }
)
"""What a client may hand to a chat's template: what templates of models ask for."""
_MAX_TEMPLATE_VALUES = 16
_MAX_TEMPLATE_NUMBER = 10**6
_MAX_TEMPLATE_CHARACTERS = 256
_MAX_TOKEN = 2**31
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
        is_batch: whether the body has a list of prompts, be it of one.
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
    is_batch: bool = False


class PromptKeys:
    """The names of a prompt's first ``MAX_PAGES`` pages, per page size.

    Args:
        prompt: whose.
        page_characters: in one page, where its units are characters.
        known: names that were derived elsewhere, by the units in a page.
    """

    def __init__(
        self,
        prompt: Prompt,
        page_characters: int,
        known: Mapping[int, list[bytes]] | None = None,
    ) -> None:
        self._prompt = prompt
        self._page_characters = page_characters
        self._keys: dict[int, list[bytes]] = dict(known or {})

    def page(self, page_tokens: int) -> int:
        """Return the units in a page on an instance with pages of so many tokens."""
        is_tokens = self._prompt.alphabet == TOKENS
        return page_tokens if is_tokens else self._page_characters

    def at(self, page: int) -> list[bytes]:
        """Return the names of the whole pages of so many units."""
        keys = self._keys.get(page)
        if keys is None:
            prompt = self._prompt
            root = root_key(
                prompt.alphabet,
                page,
                lora=prompt.lora,
                cache_salt=prompt.cache_salt,
                extra_key=prompt.extra_key,
            )
            units = prompt.units[: MAX_PAGES * page]
            keys = self._keys[page] = keys_of(root, units, page)
        return keys

    def num_tokens(self, num_pages: Int64s, page: int) -> Int64s:
        """Return the tokens in so many pages each; an estimate for characters."""
        num_units = num_pages * page
        if self._prompt.alphabet == TOKENS:
            return num_units
        return num_units // CHARACTERS_PER_TOKEN


def read_prompt(
    path: str,
    body: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    *,
    template_keys: frozenset[str] = TEMPLATE_KEYS,
    on_trouble: Callable[[str], None] | None = None,
) -> Prompt:
    """Return what a body says.

    Args:
        path: one of ``PATHS``.
        body: the parsed JSON object.
        tokenizer: None for characters.
        template_keys: names that ``chat_template_kwargs`` may have.
        on_trouble: called with one word where the tokenizer was not asked, or failed.

    A body without a prompt that can be read here (embeddings, images, a mistake) has an
    empty one: an instance will say what it thinks of it, and nobody has its prefix.
    """
    reading = _Reading(tokenizer, template_keys, on_trouble or _ignore)
    value: Any = None
    if path == "/v1/chat/completions":
        prompts = [reading.chat(body)]
    else:
        if path == "/v1/completions":
            value = body.get("prompt")
        elif body.get("input_ids") is not None:
            value = body["input_ids"]
        else:
            value = body.get("text")
        prompts = reading.prompts(value)
    alphabet, units, _ = prompts[0]
    return Prompt(
        alphabet,
        units,
        len(prompts),
        sum(num_tokens for _, _, num_tokens in prompts),
        is_stream=body.get("stream") is True,
        session=_session(body),
        lora=_lora(body),
        cache_salt=_text(body.get("cache_salt")),
        extra_key=_text(body.get("extra_key")),
        is_batch=isinstance(value, list) and bool(value) and type(value[0]) is not int,
    )


_Read = tuple[str, Sequence[int], int]
"""Alphabet, units (the first ``_MAX_UNITS``), and tokens of all of it."""
_NOTHING: _Read = (CHARACTERS, (), 0)


def _ignore(word: str) -> None:
    del word


@dataclass(frozen=True, slots=True)
class _Reading:
    tokenizer: Tokenizer | None
    template_keys: frozenset[str]
    on_trouble: Callable[[str], None]

    def prompts(self, value: Any) -> list[_Read]:
        """Read a text, a row of token ids, or a list of either; never empty."""
        if isinstance(value, str):
            return [self._units(value)]
        if not isinstance(value, list) or not value:
            return [_NOTHING]
        if type(value[0]) is int:
            return [_tokens(value)]
        return [
            self._units(each) if isinstance(each, str) else _tokens(each)
            for each in value
        ]

    def chat(self, body: Mapping[str, Any]) -> _Read:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return _NOTHING
        if self.tokenizer is not None:
            if not _are_plain(body.get("chat_template_kwargs"), self.template_keys):
                self.on_trouble("template_kwargs")
            else:
                try:
                    return _known(self.tokenizer.encode_chat(body))
                except Exception as error:  # noqa: BLE001 - a template may raise anything
                    # If anything is wrong with the chat, an instance will say what.
                    self.on_trouble("tokenizer")
                    _LOG.debug("a chat's template failed: %s", error)
        # Tools stand in front of the messages, as templates put them.
        shown = json.dumps([body.get("tools"), messages], ensure_ascii=False)
        return _characters(shown)

    def _units(self, text: str) -> _Read:
        if self.tokenizer is not None and len(text) > _MAX_UNITS:
            self.on_trouble("text_length")
        elif self.tokenizer is not None:
            try:
                return _known(self.tokenizer.encode(text))
            except Exception as error:  # noqa: BLE001 - anybody's tokenizer
                self.on_trouble("tokenizer")
                _LOG.debug("a text's tokenizer failed: %s", error)
        return _characters(text)


def _known(tokens: Sequence[int]) -> _Read:
    return TOKENS, tokens[:_MAX_UNITS], len(tokens)


def _tokens(values: Any) -> _Read:
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        return _NOTHING
    if values and (min(values) < 0 or max(values) >= _MAX_TOKEN):
        return _NOTHING
    return _known(values)


def _characters(text: str) -> _Read:
    # A lone surrogate is legal in JSON; here it is a character like any other.
    raw = text[:_MAX_UNITS].encode("utf-32-le", "surrogatepass")
    units: Sequence[int] = np.frombuffer(raw, dtype="<i4")  # type: ignore[assignment]
    return CHARACTERS, units, -(-len(text) // CHARACTERS_PER_TOKEN)


def _are_plain(values: Any, names: frozenset[str]) -> bool:
    """Return whether what is for a template are few small values of known names."""
    if values is None:
        return True
    if not isinstance(values, dict) or len(values) > _MAX_TEMPLATE_VALUES:
        return False
    return all(
        name in names
        and (
            all(_is_plain(each) for each in value)
            if isinstance(value, list) and len(value) <= _MAX_TEMPLATE_VALUES
            else _is_plain(value)
        )
        for name, value in values.items()
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_TEMPLATE_CHARACTERS
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= _MAX_TEMPLATE_NUMBER
    return value is None


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
