"""How many layers stay, what the forecast says, and what leaves."""

from __future__ import annotations

import pytest

from sgl_tiered.policies.layers.forecast import RunningPages, forecast, taken_ahead
from sgl_tiered.policies.layers.pressure import LayerChange, LayersHeld, Pressure
from sgl_tiered.policies.layers.retention import (
    layer_offload_s,
    least_retained,
    prefill_layer_pages,
    regained,
    retained_in_room,
    retained_layers,
    thinned,
)


def test_eq_4_by_hand() -> None:
    """1,000 tokens of 16 kB a layer over 25 GB/s, half as slow again as promised."""
    assert layer_offload_s(1_000, 16_000, 25e9, beta=1.5) == pytest.approx(0.96e-3)


@pytest.mark.parametrize(
    ("offload_s", "prefill_s", "expected"),
    [(1.0, 8.0, 0), (1.0, 100.0, 0), (1.0, 7.9, 1), (1.0, 3.0, 5), (1.0, 0.5, 8)],
)
def test_x_is_the_least_that_hides_the_copies(
    offload_s: float, prefill_s: float, expected: int
) -> None:
    """Of 8 layers, as many go as the prefill has time for: T_offload <= T_prefill."""
    assert least_retained(8, offload_s, prefill_s) == expected


def test_a_link_that_takes_no_time_keeps_nothing() -> None:
    """Nothing need stay, however short the prompt."""
    assert least_retained(8, 0.0, 0.0) == 0


def test_the_paper_s_layers_stay() -> None:
    """Section 3.1.2: of 8 layers with 4 kept the 1st, 3rd, 5th and 7th."""
    assert retained_layers(8, 4) == (1, 3, 5, 7)
    assert retained_layers(8, 1) == (7,)
    assert retained_layers(8, 0) == ()
    assert retained_layers(3, 9) == (0, 1, 2)


def test_fewer_layers_are_some_of_those_that_were_kept() -> None:
    """What stays when half leave was there before."""
    assert thinned((1, 3, 5, 7), 2) == (3, 7)


def test_layers_come_back_into_the_longest_run() -> None:
    """Each halves the longest run of layers on the host; no more than are away."""
    assert regained(8, (7,), 3) == (3, 1, 5)
    assert sorted(regained(4, (1, 3), 9)) == [0, 2]


def test_room_is_used_and_x_is_kept() -> None:
    """All layers that fit with the two for the copies; x where nothing fits."""
    assert retained_in_room(8, 2, 10, 55) == 3
    assert retained_in_room(8, 2, 10, 79) == 5
    assert retained_in_room(8, 2, 10, 80) == 8
    assert retained_in_room(8, 2, 10, -5) == 2
    assert retained_in_room(8, 2, 0, 0) == 8


def test_a_prompt_needs_two_layers_more_than_it_keeps() -> None:
    """But not more than it has."""
    assert prefill_layer_pages(8, 3, 10) == 50
    assert prefill_layer_pages(8, 7, 10) == 80
    assert prefill_layer_pages(8, 8, 10) == 80


def test_eq_5_by_hand() -> None:
    """Two answers that end after one and three stages, and a prompt in the second."""
    running = [RunningPages(40, 16, 8), RunningPages(100, 40, 8)]
    found = forecast(20, running, 4, 16, planned=(0, 30))
    # Stage 1: both grow, the first ends with all that it has.
    assert found.tolist() == [20, 20 - 16 + 48, 14, 14 - 8 + 124, 130]


def test_a_forecast_ends_where_it_was_told() -> None:
    """An answer that ends later only grows; plans beyond the end do not count."""
    running = [RunningPages(40, 1_000, 8)]
    assert forecast(0, running, 2, 16, planned=(1, 1, 500)).tolist() == [0, -9, -18]


def test_what_is_taken_ahead() -> None:
    """At worst of two stages; nobody takes nothing, and who ends gives back."""
    growing = RunningPages(40, 1_000, 8)
    assert taken_ahead([growing, growing], 16) == 32
    assert taken_ahead([], 16) == 0
    # Its page of the stage that comes is back at its end, with the 40.
    assert taken_ahead([RunningPages(40, 3, 8)], 16) == 0
    assert taken_ahead([RunningPages(40, 20, 8)], 16) == 8


def test_thresholds() -> None:
    """5 % of 1,000 are nobody's: what is needed ahead, or at once, comes on top."""
    pressure = Pressure(8, 1_000, 0.05, 0.10)
    assert pressure.shortage(-30) == 80
    assert pressure.shortage(50) == 0
    assert (pressure.low, pressure.high) == (50, 100)
    assert pressure.to_keep(130, 32) == 48
    assert pressure.to_keep(20, 32) == -62
    assert pressure.reserve(32, 8) == 82
    assert pressure.reserve(-200, 8) == 58
    assert pressure.reserve(-200, 0) == 50


HELD = [LayersHeld(8, 10), LayersHeld(4, 10), LayersHeld(5, 10)]


@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        (0, []),
        (11, [(2, 3)]),
        (25, [(2, 3), (1, 3)]),
        (41, [(2, 3), (1, 2), (0, 7)]),
        (90, [(2, 3), (1, 2), (0, 4), (2, 2)]),
        (999, [(2, 3), (1, 2), (0, 4), (2, 0), (1, 0), (0, 0)]),
    ],
)
def test_halves_leave_first_then_all(
    needed: int, expected: list[tuple[int, int]]
) -> None:
    """The most recent request first, to the layer that is enough."""
    found = Pressure(8, 1_000).offloads(HELD, needed)
    assert found == tuple(LayerChange(*change) for change in expected)
