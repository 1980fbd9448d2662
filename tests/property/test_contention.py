"""Guarded swaps: what a collective may lose by them, and that they end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.pipelines.contention import (
    MIN_POLL_S,
    ContentionGuard,
    sub_unit_pages,
)
from tests.property.link_model import run_link

BYTES_PER_S = 25e9
UNIT = 5_000_000
UNIT_S = UNIT / BYTES_PER_S
SLACK_S = 1e-9
"""Rounding of sums of many times."""

collectives = st.lists(
    st.tuples(st.floats(0.0, 5e-3), st.integers(1_000, 64_000_000)),
    min_size=1,
    max_size=20,
)
swaps = st.lists(st.integers(1_000, UNIT), min_size=1, max_size=30)
starts = st.floats(0.0, 10e-3)


@given(collectives=collectives, swap=swaps, starts_s=starts)
@settings(max_examples=300)
def test_a_collective_loses_one_sub_unit_at_most(collectives, swap, starts_s):
    """Whatever the sizes and gaps: only what was on its way can delay it."""
    run = run_link(BYTES_PER_S, collectives, swap, starts_s=starts_s)
    assert len(run.delays_s) == len(collectives)
    assert max(run.delays_s) <= max(swap) / BYTES_PER_S + SLACK_S
    assert run.beside == 0


@given(
    sizes=st.lists(st.integers(4 * UNIT, 12 * UNIT), min_size=1, max_size=8),
    gap_s=st.floats(0.0, 1e-3),
    starts_s=st.floats(0.0, 1e-4),
)
def test_without_the_guard_collectives_lose_more(sizes, gap_s, starts_s):
    """The negative control: the law above is broken by the same swap, unguarded."""
    collectives = [(gap_s, size) for size in sizes]
    swap = [UNIT] * 200
    guarded = run_link(BYTES_PER_S, collectives, swap, starts_s=starts_s)
    free = run_link(BYTES_PER_S, collectives, swap, starts_s=starts_s, guarded=False)
    assert max(guarded.delays_s) <= UNIT_S + SLACK_S
    assert max(free.delays_s) > 3 * UNIT_S
    assert sum(free.delays_s) > sum(guarded.delays_s)


@given(sizes=st.lists(st.integers(2 * UNIT, 12 * UNIT), min_size=1, max_size=8))
def test_a_swap_in_one_piece_is_not_guarded_well(sizes):
    """The second control: without sub-units, one look at the start is not enough.

    The swap begins before the first collective, and then there is no second look.
    """
    collectives = [(1e-4, size) for size in sizes]
    whole = run_link(BYTES_PER_S, collectives, [40 * UNIT])
    cut = run_link(BYTES_PER_S, collectives, [UNIT] * 40)
    assert max(cut.delays_s) <= UNIT_S + SLACK_S < max(whole.delays_s)


@given(
    swap=swaps,
    size=st.integers(UNIT, 20 * UNIT),
    max_wait_s=st.floats(0.0, 5e-3),
    fraction=st.floats(0.01, 1.0),
)
def test_a_swap_ends_although_the_link_is_never_free(swap, size, max_wait_s, fraction):
    """Collectives without a gap: every sub-unit goes after ``max_wait_s``."""
    num_bytes = 2 * sum(swap) + (len(swap) + 1) * (max_wait_s * BYTES_PER_S + size)
    chain = [(0.0, size)] * (int(num_bytes / size) + 2)
    run = run_link(BYTES_PER_S, chain, swap, fraction=fraction, max_wait_s=max_wait_s)
    assert run.took_s <= 2 * sum(swap) / BYTES_PER_S + len(swap) * (
        max_wait_s + SLACK_S
    )
    assert run.beside >= len(swap) - 1


@given(
    collectives=collectives, swap=swaps, starts_s=starts, fraction=st.floats(0.05, 1.0)
)
def test_little_time_is_lost_after_a_collective(collectives, swap, starts_s, fraction):
    """The link is idle for a fraction of the slowest collective at most."""
    run = run_link(BYTES_PER_S, collectives, swap, starts_s=starts_s, fraction=fraction)
    # A collective lasts as long as it takes alone, and one sub-unit more.
    slowest_s = (max(size for _, size in collectives) + max(swap)) / BYTES_PER_S
    pause_s = max(fraction * slowest_s, MIN_POLL_S)
    assert all(idle_s <= pause_s + SLACK_S for idle_s in run.idle_s)


@pytest.mark.parametrize(
    ("fraction", "max_wait_s"), [(0.0, 1.0), (1.5, 1.0), (0.5, -1.0)]
)
def test_bounds_that_make_no_sense_are_refused(fraction, max_wait_s):
    """A pause of nothing would spin, and a negative bound means nothing."""
    with pytest.raises(ValueError, match="must"):
        ContentionGuard(None, ManualClock(), fraction=fraction, max_wait_s=max_wait_s)


@given(
    layer_page_bytes=st.integers(1, 1 << 24),
    bytes_per_s=st.floats(1e6, 1e11),
    max_delay_s=st.floats(1e-6, 1e-2),
)
def test_sub_units_take_no_longer_than_allowed(
    layer_page_bytes, bytes_per_s, max_delay_s
):
    """Several pages only where all of them fit into the delay, and one more not."""
    pages = sub_unit_pages(layer_page_bytes, bytes_per_s, max_delay_s=max_delay_s)
    allowed = bytes_per_s * max_delay_s
    assert pages >= 1
    assert pages == 1 or pages * layer_page_bytes <= allowed * (1 + 1e-9)
    assert (pages + 1) * layer_page_bytes > allowed * (1 - 1e-9)
