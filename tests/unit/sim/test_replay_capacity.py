"""Page traces and the capacity plan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.sim.capacity import capacity_plan
from sgl_tiered.sim.exclusive import ExclusiveTier
from sgl_tiered.sim.page_trace import PageTrace
from sgl_tiered.sim.replay import replay_exclusive
from tests.unit.sim.replay_support import PAGE_TOKENS, spell_trace, word_lists

TIERS = (TierId.DEVICE, TierId.HOST, TierId.DISK)
TOKEN_BYTES = 10
PAGE_BYTES = PAGE_TOKENS * TOKEN_BYTES


def ids(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, np.int64) for row in rows]


def test_blocks_are_cut_into_whole_pages() -> None:
    """Blocks of 4 in pages of 2: equal blocks share pages, a partial page is none."""
    trace = PageTrace(ids([7, 9], [7, 5]), [8, 7], 4, 2)
    first, second = trace.pages(0).tolist(), trace.pages(1).tolist()
    assert [len(first), len(second)] == [4, 3]
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert trace.tokens_of(1, 3) == 6


def test_blocks_are_joined_to_whole_pages() -> None:
    """Two blocks of 4 in a page of 8: shared where both are, and none of one alone."""
    trace = PageTrace(ids([1, 2, 3], [1, 2, 4, 5], [1, 6]), [12, 16, 8], 4, 8)
    assert trace.num_pages.tolist() == [1, 2, 1]
    assert trace.pages(0)[0] == trace.pages(1)[0] != trace.pages(2)[0]


def test_a_partial_block_is_a_page_of_its_own_size() -> None:
    """9 tokens in blocks of 4 are three pages, the last of one token."""
    trace = PageTrace(ids([1, 2, 3]), [9], 4)
    assert [trace.tokens_of(0, n) for n in range(4)] == [0, 4, 8, 9]


@pytest.mark.parametrize(
    ("rows", "tokens", "page_tokens", "setting"),
    [
        ([[1]], [4], 3, "page_tokens"),
        ([[1]], [4], 0, "page_tokens"),
        ([[1], [2]], [4], None, "num_tokens"),
        ([[1], [2, 3]], [4, 4], None, "request 1"),
        ([[1, 2], [3, 2]], [8, 8], None, "request"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(
    rows: list[list[int]], tokens: list[int], page_tokens: int | None, setting: str
) -> None:
    """Odd pages, missing lengths, too many blocks, an id after two different ones."""
    with pytest.raises(ConfigError) as caught:
        PageTrace(ids(*rows), tokens, 4, page_tokens)
    assert caught.value.setting.startswith(setting)


def test_a_row_by_hand() -> None:
    """``a`` and ``b`` twice: one page on the device, one in the host at 3 a GB."""
    sizes = {TierId.HOST: PAGE_BYTES, TierId.DEVICE: PAGE_BYTES + 7}
    (row,) = capacity_plan(
        spell_trace(["a", "b", "a", "b"]),
        TOKEN_BYTES,
        [sizes],
        {TierId.HOST: 3.0},
    )
    assert list(row.capacity_bytes) == [TierId.DEVICE, TierId.HOST]
    assert row.hit_rate == {TierId.DEVICE: 0.0, TierId.HOST: 0.5}
    assert row.token_hit_rate == row.opt_hit_rate == 0.5
    assert row.loaded_bytes == {TierId.DEVICE: 0, TierId.HOST: 2 * PAGE_BYTES}
    assert row.stored_bytes == {
        TierId.DEVICE: 2 * PAGE_BYTES,
        TierId.HOST: 3 * PAGE_BYTES,
    }
    assert row.cost == pytest.approx(3 * PAGE_BYTES / 1e9)


@given(
    words=word_lists(),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
)
def test_rows_are_what_a_replay_finds(
    words: list[str], sizes: tuple[int, int, int]
) -> None:
    """Hits and bytes of each tier equal those of a direct replay."""
    trace = spell_trace(words)
    tiers = [
        ExclusiveTier(t, n, LRUPolicy()) for t, n in zip(TIERS, sizes, strict=True)
    ]
    replayed = replay_exclusive(trace, tiers)
    choice = {t: n * PAGE_BYTES for t, n in zip(TIERS, sizes, strict=True)}
    (row,) = capacity_plan(trace, TOKEN_BYTES, [choice])
    for above, tier in pairwise(TIERS):
        assert row.hit_rate[tier] == pytest.approx(replayed.token_hit_rate_of(tier))
        assert row.loaded_bytes[tier] == replayed.hit_pages[tier] * PAGE_BYTES
        assert row.stored_bytes[tier] == replayed.lost_pages[above] * PAGE_BYTES
    computed = int(trace.num_pages.sum()) - sum(replayed.hit_pages.values())
    assert row.stored_bytes[TierId.DEVICE] == computed * PAGE_BYTES


def test_a_tier_of_no_size_is_not_there() -> None:
    """Nothing comes into it and nothing is hit in it."""
    choice = {TierId.DEVICE: PAGE_BYTES, TierId.HOST: 0, TierId.DISK: PAGE_BYTES}
    (row,) = capacity_plan(spell_trace(["a", "b", "a"]), TOKEN_BYTES, [choice])
    assert (row.stored_bytes[TierId.HOST], row.hit_rate[TierId.HOST]) == (0, 0.0)
    assert row.hit_rate[TierId.DISK] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("token_bytes", "size"), [(0, 1), (1, -1)])
def test_a_plan_that_cannot_be_is_refused(token_bytes: int, size: int) -> None:
    """Tokens of no bytes, and a negative size."""
    with pytest.raises(ConfigError):
        capacity_plan(spell_trace(["a"]), token_bytes, [{TierId.HOST: size}])
