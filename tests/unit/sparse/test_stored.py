"""What is stored of pages of which the tiers hold some tokens only."""

import numpy as np
import pytest

from sgl_tiered.core.kept import KeptLayout
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.sparse.keep import SINKS
from sgl_tiered.sparse.stored import StoredTokens, best_of_pages

LAYERS, TOKENS = 2, 8


def choice(seed, num_pages, count=SINKS):
    rng = np.random.default_rng(seed)
    mass = rng.random((LAYERS, num_pages * TOKENS)).astype(np.float32)
    pages = np.arange(num_pages, dtype=np.int32)
    return mass, best_of_pages(mass, pages, TOKENS, count)


def test_the_tokens_read_most_of_each_page_are_kept():
    """As many of every page and layer, and the prompt's first ones in any case."""
    mass, kept = choice(0, 5)
    paged, chosen = (x.reshape(LAYERS, 5, TOKENS) for x in (mass, kept))
    assert (chosen.sum(axis=2) == SINKS).all()
    assert chosen[:, 0, :SINKS].all()
    for layer in range(LAYERS):
        for page in range(1, 5):
            left = paged[layer, page][~chosen[layer, page]]
            assert paged[layer, page][chosen[layer, page]].min() >= left.max()


def test_pages_of_a_plan_are_chosen_as_among_all():
    """What lies between them may be unknown."""
    mass, kept = choice(1, 6)
    mass[:, TOKENS : 2 * TOKENS] = np.nan
    pages = np.array([0, 4, 5], np.int32)
    some = best_of_pages(mass, pages, TOKENS, SINKS)
    want = kept.reshape(LAYERS, 6, TOKENS)[:, pages]
    np.testing.assert_array_equal(some.reshape(want.shape), want)


def test_equal_masses_are_chosen_in_order():
    """So that all who saw the same choose the same."""
    mass = np.zeros((1, TOKENS), np.float32)
    kept = best_of_pages(mass, np.zeros(1, np.int32), TOKENS, 5)
    assert kept.tolist() == [[True] * 5 + [False] * 3]


@pytest.mark.parametrize("tokens", [8, 12, 5])
def test_an_earlier_choice_stays(tokens):
    """For as long as the page has its row; what is unknown is not guessed."""
    stored = StoredTokens(LAYERS, tokens)
    rng = np.random.default_rng(tokens)
    first, second = (rng.random((LAYERS, 2 * tokens)) < 0.5 for _ in range(2))
    rows = np.array([700, 3], np.int32)
    assert stored.kept(rows) is None
    np.testing.assert_array_equal(stored.agree(rows, first), first)
    np.testing.assert_array_equal(stored.agree(rows, second), first)
    # One that is known and one that is not.
    both = stored.agree(np.array([3, 9], np.int32), second)
    np.testing.assert_array_equal(both[:, :tokens], first[:, tokens:])
    np.testing.assert_array_equal(both[:, tokens:], second[:, tokens:])
    found = stored.kept(rows)
    for layer, places in enumerate(found):
        assert places.tolist() == np.flatnonzero(first[layer]).tolist()
    assert stored.num_pages == 3
    stored.forget(np.array([3, 100_000], np.int32))
    assert stored.kept(rows) is None
    assert stored.kept(np.array([100_000], np.int32)) is None
    np.testing.assert_array_equal(
        stored.agree(rows, second)[:, tokens:], second[:, tokens:]
    )


def test_a_page_is_as_small_as_what_is_kept_of_it():
    """And keeps the device's number of tokens, by which pages are found."""
    raw = PageLayout(3, 16, 64)
    layout = KeptLayout(3, 16, 64, PageLayout(3, 6, 64))
    assert layout.page_tokens == 16
    assert layout.page_bytes * 16 == raw.page_bytes * 6
    assert layout.value_offset(2) - layout.key_offset(2) == 6 * 64
    assert layout.encoding.label == "sparse"
    for inner in (PageLayout(3, 17, 64), PageLayout(2, 6, 64), PageLayout(3, 6, 32)):
        with pytest.raises(ValueError, match="no part"):
            KeptLayout(3, 16, 64, inner)
