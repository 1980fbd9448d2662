"""Laws of the layer policies: what moves, what stays, and that nobody starves."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.policies.admission.base import NO_TARGET
from sgl_tiered.policies.layers.forecast import RunningPages, forecast
from sgl_tiered.policies.layers.pressure import LayersHeld, Pressure
from sgl_tiered.policies.layers.retention import (
    least_retained,
    prefill_layer_pages,
    regained,
    retained_in_room,
    retained_layers,
    thinned,
)
from sgl_tiered.policies.layers.turns import PauseTurns, TurnFacts, TurnRoom

NUM_LAYERS = 12
STEP_S = 0.05

times = st.floats(1e-6, 10.0)
held = st.lists(
    st.builds(LayersHeld, st.integers(0, NUM_LAYERS), st.integers(0, 30)), max_size=8
)


def runs_away(num_layers: int, retained: tuple[int, ...]) -> list[int]:
    """Return the lengths of the runs of offloaded layers before each retained one."""
    return [b - a - 1 for a, b in pairwise((-1, *retained))]


@given(st.integers(1, 100), times, times)
def test_x_is_the_least_and_enough(layers: int, offload_s: float, total_s: float):
    """With x the copies are hidden, with one layer less kept they are not."""
    x = least_retained(layers, offload_s, total_s)
    assert 0 <= x <= layers
    assert (layers - x) * offload_s <= total_s * (1 + 1e-9)
    if x:
        assert (layers - x + 1) * offload_s > total_s * (1 - 1e-9)


@given(st.integers(1, 100), times, times, times)
def test_a_longer_prefill_keeps_no_more(
    layers: int, offload_s: float, a_s: float, b_s: float
):
    """Nor does a faster link."""
    short_s, long_s = sorted((a_s, b_s))
    xs = [least_retained(layers, offload_s, t) for t in (short_s, long_s)]
    assert xs[0] >= xs[1]
    slow = least_retained(layers, 2 * offload_s, short_s)
    assert slow >= xs[0]


@given(st.integers(1, 100), st.data())
def test_retained_layers_are_even(layers: int, data: st.DataObject):
    """As many as asked for, the last among them; runs differ by one at most."""
    num = data.draw(st.integers(1, layers))
    kept = retained_layers(layers, num)
    assert len(set(kept)) == num
    assert list(kept) == sorted(kept)
    assert kept[-1] == layers - 1
    runs = runs_away(layers, kept)
    assert max(runs) - min(runs) <= 1
    fewer = data.draw(st.integers(0, num))
    assert set(thinned(kept, fewer)) <= set(kept)


@given(st.integers(1, 40), st.data())
def test_what_is_kept_has_room(layers: int, data: st.DataObject):
    """Its computation too; and one layer more would not have."""
    least = data.draw(st.integers(0, layers))
    num_pages = data.draw(st.integers(1, 50))
    room = data.draw(st.integers(-10, 2_100))
    kept = retained_in_room(layers, least, num_pages, room)
    assert least <= kept <= layers
    if kept > least:
        assert prefill_layer_pages(layers, kept, num_pages) <= room
    if kept < layers:
        assert prefill_layer_pages(layers, kept + 1, num_pages) > room


@given(st.integers(1, 60), st.data())
def test_layers_that_come_back_were_away(layers: int, data: st.DataObject):
    """As many as wanted or all; the longest run never grows."""
    kept = data.draw(st.sets(st.integers(0, layers - 1)))
    wanted = data.draw(st.integers(0, layers))
    back = regained(layers, sorted(kept), wanted)
    assert len(set(back)) == len(back) == min(wanted, layers - len(kept))
    assert not kept & set(back)


@given(held, st.integers(0, 4_000))
def test_offloads_free_enough_or_all(ones: list[LayersHeld], needed: int):
    """And not a layer more; nobody's layers grow."""
    now = [one.num_held for one in ones]
    freed, last = 0, 0
    for change in Pressure(NUM_LAYERS, 1_000).offloads(ones, needed):
        assert 0 <= change.num_layers < now[change.position]
        num = now[change.position] - change.num_layers
        last = ones[change.position].num_pages
        freed += num * last
        now[change.position] = change.num_layers
    assert freed < needed + last or freed == 0
    if freed < needed:
        assert not any(n and one.num_pages for n, one in zip(now, ones, strict=True))


@given(
    st.integers(-50, 500),
    st.lists(
        st.builds(
            RunningPages, st.integers(0, 99), st.integers(1, 300), st.integers(0, 12)
        ),
        max_size=8,
    ),
    st.lists(st.integers(0, 40), max_size=12),
)
def test_eq_5_step_by_step(avail: int, running: list[RunningPages], planned: list[int]):
    """Counted one request and one stage at a time; and a longer answer frees later."""
    found = forecast(avail, running, 10, 16, planned).tolist()
    free, pages = avail, [one.num_layer_pages for one in running]
    for stage in range(10):
        assert found[stage] == free
        free -= planned[stage] if stage < len(planned) else 0
        for n, one in enumerate(running):
            ends = -(-one.tokens_left // 16)
            if stage < ends:
                pages[n] += one.growth
                free -= one.growth
            if stage == ends - 1:
                free += pages[n]
    assert found[10] == free


requests = st.tuples(
    st.integers(0, 3_000),
    st.sampled_from([0, 10_000_000, 200_000_000]),
    st.sampled_from([-1.0, 0.5, 20.0, NO_TARGET]),
    st.booleans(),
)


@given(
    st.lists(requests, min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.integers(0, 10**9),
    st.integers(10, 40),
)
def test_nobody_waits_longer_than_the_bound(
    drawn: list[tuple[int, int, float, bool]],
    share: float,
    free_bytes: int,
    limit_steps: int,
):
    """Between two tokens: twice the limit and a step per request; some decode always.

    The limit is not below two rounds of turns of 4, and of moves of 10 steps at most.
    Nothing ever comes back to the device, and who yields never returns: the worst case.
    """
    limit_s = limit_steps * STEP_S
    turns = PauseTurns(limit_s, turn_tokens=4, link_share=share)
    room = TurnRoom(lambda batch, contexts: STEP_S, 1e9, free_bytes)
    num = len(drawn)
    least_steps = max(limit_steps, 2 * (4 * (1 + num) + 10 * num))
    host = [bytes_ for _, bytes_, _, _ in drawn]
    waited, turn = [0] * num, [0] * num
    for _ in range(4 * least_steps):
        facts = [
            TurnFacts(
                context, host[n], 10**8, waited[n] * STEP_S, turn[n], allowed, hopeless
            )
            for n, (context, _, allowed, hopeless) in enumerate(drawn)
        ]
        plan = turns.choose(facts, room)
        assert plan.decode
        assert sorted((*plan.decode, *plan.paused)) == list(range(num))
        assert sorted(plan.order) == list(range(num))
        assert set(plan.yields) <= set(plan.paused)
        for n in plan.yields:
            assert host[n] == 0
            host[n] = 10**8
        for n in range(num):
            decodes = n in plan.decode
            waited[n] = 0 if decodes else waited[n] + 1
            turn[n] = turn[n] + 1 if decodes else 0
        assert max(waited) <= 2 * least_steps + num
