"""A request's body as bytes -> what the router has to know of it.

A pure function, which a process that can be ended runs for bodies that may cost much
(``readers.py``), and the router itself for short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from sgl_tiered.core.keys import KEY_BYTES
from sgl_tiered.router.prompts import (
    CHARACTERS,
    TEMPLATE_KEYS,
    Prompt,
    PromptKeys,
    Tokenizer,
    read_prompt,
)

__all__ = ["Job", "Reading", "read_request"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked beside the body.

    Attributes:
        path: of the request.
        page_tokens: sizes of pages for which names are wanted.
        page_characters: in a page, where units are characters.
        template_keys: see ``read_prompt``.
        uses_tokenizer: whether the tokenizer is asked, where there is one.
    """

    path: str
    page_tokens: tuple[int, ...]
    page_characters: int
    template_keys: frozenset[str] = TEMPLATE_KEYS
    uses_tokenizer: bool = True


@dataclass(frozen=True, slots=True)
class Reading:
    """What a body says.

    Attributes:
        trouble: one sentence, where it is no JSON object; the rest then says nothing.
        prompt: without its units, which the names stand for.
        names: units in a page -> names of the prompt's pages, 16 bytes each, joined.
        troubles: words for the metrics, where the tokenizer was not asked, or failed.
    """

    trouble: str = ""
    prompt: Prompt = field(default_factory=lambda: Prompt(CHARACTERS, (), 1, 0))
    names: dict[int, bytes] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()

    def keys(self, page_characters: int) -> PromptKeys:
        """Return the names as they are looked up."""
        known = {}
        for page, joined in self.names.items():
            starts = range(0, len(joined), KEY_BYTES)
            known[page] = [joined[at : at + KEY_BYTES] for at in starts]
        return PromptKeys(self.prompt, page_characters, known)


def read_request(job: Job, raw: bytes, tokenizer: Tokenizer | None) -> Reading:
    """Return what a body says; raises nothing but for a want of memory.

    Args:
        job: what is asked.
        raw: the body.
        tokenizer: None for characters.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Reading(f"the body is not JSON: {error}")
    except RecursionError:
        return Reading("the body is nested too deeply")
    if not isinstance(body, dict):
        return Reading("the body is no JSON object")
    troubles: list[str] = []
    try:
        prompt = read_prompt(
            job.path,
            body,
            tokenizer if job.uses_tokenizer else None,
            template_keys=job.template_keys,
            on_trouble=troubles.append,
        )
        keys = PromptKeys(prompt, job.page_characters)
        pages: Sequence[int] = sorted({keys.page(size) for size in job.page_tokens})
        names = {page: b"".join(keys.at(page)) for page in pages}
    except (RecursionError, UnicodeError):
        # A nesting that JSON's own reader bore, or a salt that is no text.
        return Reading("the body is nested too deeply, or has a name that is no text")
    return Reading("", replace(prompt, units=()), names, tuple(troubles))
