"""Small traces: prompts are words, a letter is a page, equal beginnings are shared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from sgl_tiered.sim.page_trace import PageTrace

PAGE_TOKENS = 4


def spell_trace(words: Sequence[str]) -> PageTrace:
    """A trace of pages of 4 tokens; an upper-case letter is a partial page of 3."""
    names: dict[str, int] = {}
    ids = [
        [names.setdefault(page, 1000 - len(names)) for page in prefixes(word)]
        for word in words
    ]
    tokens = [len(word) * PAGE_TOKENS - word[-1:].isupper() for word in words]
    return PageTrace([np.array(run, np.int64) for run in ids], tokens, PAGE_TOKENS)


@st.composite
def word_lists(
    draw: st.DrawFn, max_words: int = 25, max_pages: int = 7, letters: str = "abc"
) -> list[str]:
    """Words most of which continue or cut an earlier one; the last letter may be
    upper-case."""
    words: list[str] = []
    for _ in range(draw(st.integers(0, max_words))):
        start = draw(st.sampled_from(["", *words])).lower()
        start = start[: draw(st.integers(0, max_pages))]
        word = start + draw(st.text(alphabet=letters, max_size=max_pages - len(start)))
        if draw(st.booleans()):
            word = word[:-1] + word[-1:].upper()
        words.append(word)
    return words


def prefixes(word: str) -> list[str]:
    """The pages of a word, each by the prefix that it ends."""
    return [word[:n] for n in range(1, len(word) + 1)]


def lru_places(words: Sequence[str]) -> list[list[int | None]]:
    """Where each page of each word lies in a plain list in order of use, before it."""
    order: list[str] = []
    found = []
    for word in words:
        pages = prefixes(word)
        found.append([order.index(p) if p in order else None for p in pages])
        order = pages + [page for page in order if page not in pages]
    return found
