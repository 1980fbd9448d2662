"""Slopes, growth and limits of a soak."""

import numpy as np
import pytest

from tests.soak.figures import (
    LEAK_BYTES,
    MAX_RSS_MB_PER_HOUR,
    expected_mb_per_hour,
    failures,
    growth,
    growth_over_plain,
    slope,
)

TIMES_S = np.arange(90) * 20.0
"""Half an hour of rounds."""


def good():
    """Return the figures of a run in which all is as it must be."""
    return {
        "rss_mb_per_hour": 1.5,
        "step_time_growth": -0.01,
        "step_time_growth_over_plain": 0.01,
        **dict.fromkeys(
            ["flows", "pins", "empty_namespaces", "fd_growth", "thread_growth"], 0
        ),
        "wrong": 0,
        "errors": 0,
        "judged": 100,
        "reused": {"device": 10, "host": 10, "disk": 10},
        "planted": {
            "expected_mb_per_hour": 40.0,
            "rss_mb_per_hour": 41.0,
            "caught": True,
        },
    }


def stairs(mb_per_hour, seed=0):
    """Return memory that grows in steps of half a megabyte, and jitters."""
    noise = np.random.default_rng(seed).normal(0.0, 0.2, TIMES_S.size)
    grown = mb_per_hour * TIMES_S / 3600
    return np.floor(grown / 0.5) * 0.5 + noise


def test_a_line_has_its_slope():
    """Values on a line give its slope, and an interval without width."""
    found = slope(TIMES_S, 5 + 12 * TIMES_S / 3600)
    assert found.per_hour == pytest.approx(12)
    assert found.half_width == pytest.approx(0, abs=1e-9)


def test_jumps_do_not_move_it():
    """A piece of memory that a process takes once and keeps is no slope."""
    values = np.zeros(TIMES_S.size)
    values[10:] += 4.0
    values[50] += 30.0
    assert slope(TIMES_S, values).per_hour == pytest.approx(0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.0, 10.0, 40.0])
def test_growth_in_steps_is_found(rate, seed):
    """An allocator's steps and jitter leave the slope where it is."""
    found = slope(TIMES_S, stairs(rate, seed))
    assert found.per_hour == pytest.approx(rate, abs=2.0)
    assert found.half_width < 15.0


def test_too_short_for_an_interval():
    """Few samples give a slope, and say that nothing is known of its error."""
    found = slope([0.0, 3600.0], [1.0, 4.0])
    assert found.per_hour == pytest.approx(3.0)
    assert found.half_width == float("inf")


def test_nonsense_is_refused():
    """No slope of one sample, none of unlike lists, no thirds of two values."""
    with pytest.raises(ValueError, match="no slope"):
        slope([0.0], [1.0])
    with pytest.raises(ValueError, match="no slope"):
        slope([0.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="no thirds"):
        growth([1.0, 2.0])


def test_growth_compares_the_thirds():
    """The middle third does not count, nor does an outlier in a third."""
    assert growth([1, 1, 9, 5, 5, 5, 1.1, 1.1, 0]) == pytest.approx(0.1)


def step_times(grown, faster, seed=0):
    """Return step times of both servers on a machine that becomes faster.

    Args:
        grown: by which share ours have grown in the last third.
        faster: by which factor the machine is, from then on.
    """
    noise = np.random.default_rng(seed)
    num = 3 * 60
    is_last = np.arange(num) >= 2 * num // 3
    machine = np.where(is_last, 1 / faster, 1.0)
    plain = machine * noise.normal(6e-3, 2e-4, num)
    ours = machine * noise.normal(6e-3, 2e-4, num)
    return ours * np.where(is_last, 1.0 + grown, 1.0), plain


@pytest.mark.parametrize("faster", [4 / 3, 1.0, 3 / 4])
@pytest.mark.parametrize("grown", [0.0, 0.2])
def test_the_machine_hides_no_growth_of_steps(grown, faster):
    """A machine that speeds up hides 20 % in the growth alone; over plain's it shows.

    Nor is a slower machine taken for growth.
    """
    ours, plain = step_times(grown, faster)
    assert (growth(ours) > 0.05) == (faster < 1 or (grown > 0 and faster == 1))
    found = growth_over_plain(ours, plain)
    assert found.share == pytest.approx(grown, abs=0.03)
    assert found.half_width < 0.05
    figures = {**good(), "step_time_growth": growth(ours)}
    told = failures({**figures, "step_time_growth_over_plain": found.share})
    assert [text.split()[0] for text in told] == (
        ["step_time_growth_over_plain"] if grown else []
    )


def test_few_rounds_say_nothing_of_the_error_of_growth():
    """They give a growth over plain's; values of other rounds are refused."""
    found = growth_over_plain([1.0, 1.0, 1.2], [1.0, 1.0, 1.0])
    assert found.share == pytest.approx(0.2)
    assert found.half_width == float("inf")
    with pytest.raises(ValueError, match="beside"):
        growth_over_plain([1.0, 1.0, 1.0], [1.0, 1.0])


def test_the_planted_leak_shows_at_a_sufficient_rate():
    """716 bytes a request are above the limit from eight requests a second on."""
    assert expected_mb_per_hour(LEAK_BYTES, 7) < MAX_RSS_MB_PER_HOUR
    leak = expected_mb_per_hour(LEAK_BYTES, 8)
    assert leak > MAX_RSS_MB_PER_HOUR
    assert slope(TIMES_S, leak * TIMES_S / 3600).per_hour > MAX_RSS_MB_PER_HOUR


def test_a_good_run_has_no_failures():
    """What is within all limits passes."""
    assert failures(good()) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rss_mb_per_hour": 20.1}, "rss_mb_per_hour"),
        ({"rss_mb_per_hour": float("nan")}, "rss_mb_per_hour"),
        ({"step_time_growth_over_plain": 0.06}, "step_time_growth_over_plain"),
        ({"step_time_growth_over_plain": float("nan")}, "step_time_growth_over_plain"),
        ({"flows": 1}, "flows"),
        ({"pins": 1}, "pins"),
        ({"empty_namespaces": 1}, "empty_namespaces"),
        ({"fd_growth": 1}, "fd_growth"),
        ({"thread_growth": 1}, "thread_growth"),
        ({"wrong": 1}, "wrong"),
        ({"errors": 1}, "errors"),
        ({"judged": 0}, "compared"),
        ({"reused": {"device": 5, "host": 5}}, "disk"),
    ],
)
def test_each_limit_fails_alone(change, word):
    """One figure beyond its limit fails the run, and is named."""
    (sentence,) = failures({**good(), **change})
    assert word in sentence


def test_a_leak_that_was_not_caught_fails():
    """Neither a missed leak nor a load too slow to show it is a success."""
    planted = {"expected_mb_per_hour": 40.0, "rss_mb_per_hour": 3.0, "caught": False}
    (sentence,) = failures({**good(), "planted": planted})
    assert "not caught" in sentence
    planted = {"expected_mb_per_hour": 15.0, "rss_mb_per_hour": 25.0, "caught": True}
    (sentence,) = failures({**good(), "planted": planted})
    assert "too slow" in sentence
