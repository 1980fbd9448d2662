"""What is learned of decode steps that stream layers."""

from __future__ import annotations

import pytest

from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.streaming import StreamingCost

RATE = 1e9


def test_steps_that_stream_are_not_taken_for_computation() -> None:
    """Else their waits would allow more streaming, and so on.

    This happened: a server that streamed all it had, at 20 times a step's time.
    """
    cost = StreamingCost(DecodeCost(0.01, 0.001, 1e-6))
    before = cost.seconds(4, 4_000)
    for _ in range(100):
        cost.observe(4, 4_000, 0.500, 400e6, 0.0, RATE)
    assert cost.seconds(4, 4_000) == before
    for _ in range(100):
        cost.observe(4, 4_000, 0.050, 0.0, 0.0, RATE)
    assert cost.seconds(4, 4_000) == pytest.approx(0.050, rel=0.1)


def test_what_streaming_adds() -> None:
    """18 ms by itself; with 5 MB under it 20.

    What is beyond the link's time teaches nothing, and no byte costs more than the
    link takes for it.
    """
    cost = StreamingCost(DecodeCost(0.01, 0.001, 1e-6))
    for _ in range(200):
        cost.observe(4, 4_000, 0.020, 5e6, 0.0, RATE)
    assert cost.byte_s == pytest.approx(0.002 / 5e6, rel=0.01)
    for _ in range(200):
        cost.observe(4, 4_000, 9.0, 50e6, 0.0, RATE)
    assert cost.byte_s == pytest.approx(0.002 / 5e6, rel=0.01)
    for _ in range(200):
        cost.observe(4, 4_000, 9.0, 5e6, 0.0, RATE)
    assert cost.byte_s == pytest.approx(1.0 / RATE, rel=0.01)


def test_an_estimate_that_is_too_long_ends_though_all_steps_stream() -> None:
    """This happened: after four slow steps of a machine 39 ms passed for 276.

    From then on eight streamed where one did, at steps of 127 ms, and no step without
    streaming came to correct it.
    """
    cost = StreamingCost(DecodeCost(0.030, 0.030, 1e-8))
    assert cost.seconds(8, 7_500) > 0.260
    for _ in range(20):
        cost.observe(8, 7_500, 0.127, 50e6, 0.0, 0.5e9)
    assert cost.seconds(8, 7_500) < 0.127 / 0.75
    # What is shorter by chance teaches nothing: that would be a bias.
    before = cost.seconds(8, 7_500)
    for _ in range(20):
        cost.observe(8, 7_500, 0.9 * before, 50e6, 0.0, 0.5e9)
    assert cost.seconds(8, 7_500) == before


def test_steps_that_stall_stream_less_whatever_was_estimated() -> None:
    """And more again after others, of which some may not stream at all."""
    cost = StreamingCost(DecodeCost(0.01, 0.001, 1e-6))
    for _ in range(100):
        cost.observe(4, 4_000, 0.020, 5e6, 0.003, RATE)
    assert cost.share == pytest.approx(0.05)
    cost.observe(4, 4_000, 0.020, 5e6, 0.001, RATE)
    cost.observe(4, 4_000, 0.020, 0.0, 0.001, RATE)
    assert cost.share == pytest.approx(0.05 + 0.01 + 0.005)
    for _ in range(200):
        cost.observe(4, 4_000, 0.020, 5e6, 0.001, RATE)
    assert cost.share == 1.0
