"""Hypothesis strategies for prompts that share prefixes.

Prompts are words over a few letters; a letter stands for a page whose tokens agree
with every other letter's but for the last one. So prefixes are shared often, and
prompts part inside a page as well as between pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from sgl_tiered.core.plans import Int32s

__all__ = ["prompt_traces", "prompts", "spell"]


def spell(word: str, page_tokens: int, tail: int = 0) -> Int32s:
    """Return the prompt of a word, with ``tail`` tokens of a partial page after it."""
    tokens = [
        token for letter in word for token in [7] * (page_tokens - 1) + [ord(letter)]
    ]
    return np.array(tokens + [7] * tail, dtype=np.int32)


@st.composite
def prompts(
    draw: st.DrawFn,
    *,
    page_tokens: int,
    words: Sequence[str],
    letters: str = "abc",
    max_more: int = 2,
) -> Int32s:
    """One prompt: the beginning of a word, then up to ``max_more`` other pages.

    Sometimes with a partial page at the end.
    """
    word = draw(st.sampled_from(words))
    if draw(st.booleans()):
        word = word[: draw(st.integers(0, len(word)))]
        word += draw(st.text(alphabet=letters, max_size=max_more))
    tail = draw(st.integers(0, page_tokens - 1))
    return spell(word, page_tokens, tail)


@st.composite
def prompt_traces(
    draw: st.DrawFn,
    *,
    page_tokens: int,
    max_prompts: int = 30,
    max_pages: int = 8,
    letters: str = "abc",
) -> list[Int32s]:
    """Prompts in order of arrival; most continue or cut an earlier one."""
    words: list[str] = []
    for _ in range(draw(st.integers(1, max_prompts))):
        start = draw(st.sampled_from(["", *words])) if words else ""
        start = start[: draw(st.integers(0, max_pages))]
        more = draw(st.text(alphabet=letters, max_size=max_pages - len(start)))
        words.append(start + more)
    return [spell(word, page_tokens) for word in words]
