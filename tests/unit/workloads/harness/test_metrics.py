"""Figures follow from records as their definitions say."""

from __future__ import annotations

import pytest
from sgl_tiered_workloads.harness.errors import RecordsError
from sgl_tiered_workloads.harness.metrics import (
    Distribution,
    Slos,
    Window,
    in_window,
    measure,
    span,
)

from tests.unit.workloads.harness.harness_support import record

WHOLE = Window()


def ladder() -> list:
    """One request a second, TTFT 0..101 ms, then two gaps of 10 and 30 ms.

    The last one ends the window, so 101 requests count.
    """
    found = []
    for i in range(102):
        first_s = i + i / 1000
        found.append(
            record(f"r{i}", float(i), [first_s, first_s + 0.01, first_s + 0.04])
        )
    return found


def test_percentiles_of_a_ladder_are_its_rungs() -> None:
    """p50, p90 and p99 of 0..100 ms are 50, 90 and 99 ms."""
    found = measure(ladder(), WHOLE, Slos())
    ttft = found.ttft_s
    assert (ttft.p50, ttft.p90, ttft.p99) == pytest.approx((0.050, 0.090, 0.099))
    assert found.tpot_s.p50 == pytest.approx(0.020)
    assert found.itl_s.count == 202
    assert found.itl_s.mean == pytest.approx(0.020)
    assert found.itl_s.p99 == pytest.approx(0.030)
    assert found.e2e_s.p50 == pytest.approx(0.090)


def test_throughput_counts_what_arrived_within_the_window() -> None:
    """One request a second gives one answer of three tokens a second."""
    found = measure(ladder(), WHOLE, Slos(ttft_s=1.0))
    assert found.window_s == pytest.approx(101.0)
    assert found.requests_per_s == pytest.approx(1.0)
    assert found.goodput_per_s == pytest.approx(1.0)
    assert found.output_tokens_per_s == pytest.approx(3.0)
    assert found.prompt_tokens_per_s == pytest.approx(100.0)


def test_the_window_leaves_out_both_ends() -> None:
    """Requests targeted before the warm-up's end or in the cool-down do not count."""
    window = Window(warmup_s=10.0, cooldown_s=20.0)
    assert span(ladder(), window) == (10.0, 81.0)
    found = measure(ladder(), window, Slos())
    assert found.num_requests == 71
    assert found.ttft_s.p50 == pytest.approx(0.045)


def test_requests_that_all_leave_at_once_are_measured_to_their_end() -> None:
    """A batch has no last start to end its window with."""
    records = [record("a", 0.0, [1.0, 2.0]), record("b", 0.0, [1.0, 4.0])]
    assert span(records, WHOLE) == pytest.approx((0.0, 4.0))
    found = measure(records, WHOLE, Slos())
    assert found.num_requests == 2
    assert found.output_tokens_per_s == pytest.approx(4 / 4)


def test_a_run_shorter_than_its_warm_up_is_refused() -> None:
    """There is no steady state then."""
    with pytest.raises(RecordsError, match="shorten warmup_s"):
        measure(ladder(), Window(warmup_s=200.0), Slos())


def test_windows_of_repeats_are_pooled() -> None:
    """Each repeat has its own clock, so each has its own window."""
    records = [
        record("a", 0.0, [0.1]),
        record("b", 10.0, [10.1]),
        record("a", 0.0, [0.3], repeat=1),
        record("b", 30.0, [30.3], repeat=1),
    ]
    found = measure(records, WHOLE, Slos())
    assert found.num_repeats == 2
    assert found.window_s == pytest.approx(40.0)
    assert found.ttft_s.p50 == pytest.approx(0.2)


def test_goodput_needs_every_promise_kept() -> None:
    """A failed request keeps none, and has no latency."""
    records = [
        record("good", 0.0, [0.1, 0.2]),
        record("slow-start", 1.0, [1.9, 2.0]),
        record("slow-tokens", 2.0, [2.1, 3.1]),
        record("failed", 3.0, [], error="HTTP 503"),
        record("last", 4.0, [4.1, 4.2]),
    ]
    found = measure(records, WHOLE, Slos(ttft_s=0.5, tpot_s=0.5))
    assert found.num_errors == 1
    assert found.ttft_s.count == 3
    assert found.goodput_per_s == pytest.approx(1 / 4)
    assert found.attainment == pytest.approx(1 / 4)
    assert found.attainment_by_slo == {"ttft": 0.5, "tpot": 0.5}


def test_without_a_promise_there_is_no_goodput() -> None:
    """Nothing to keep is not the same as everything kept."""
    found = measure(ladder(), WHOLE, Slos())
    assert found.goodput_per_s is None
    assert found.attainment is None


def test_one_token_has_a_tpot_of_zero() -> None:
    """And no gap between tokens."""
    found = measure([record("a", 0.0, [0.5])], WHOLE, Slos(tpot_s=0.001))
    assert found.tpot_s.p99 == 0.0
    assert found.itl_s.count == 0
    assert found.attainment == 1.0


def test_lag_is_the_clients_and_no_latency_holds_it() -> None:
    """TTFT runs from the actual start."""
    found = measure([record("a", 1.0, [1.5], lag_s=0.2)], WHOLE, Slos())
    assert found.lag_s.p50 == pytest.approx(0.2)
    assert found.ttft_s.p50 == pytest.approx(0.3)


def test_hits_are_shares_of_the_prompt_tokens() -> None:
    """What no tier claims is unattributed."""
    records = [
        record("a", 0.0, [0.1], cached={"device": 20, "host": 30}),
        record("b", 0.0, [1.1], cached={"unattributed": 50}),
    ]
    found = measure(records, WHOLE, Slos())
    assert found.hit_rate_by_tier == pytest.approx(
        {"device": 0.10, "host": 0.15, "unattributed": 0.25}
    )
    assert found.hit_rate == pytest.approx(0.5)


def test_nothing_answered_is_refused() -> None:
    """A figure of no request would be a lie."""
    with pytest.raises(RecordsError, match="answered"):
        measure(
            [record("a", 0.0, [], error="x"), record("b", 1.0, [], error="x")],
            WHOLE,
            Slos(),
        )


def test_the_window_is_half_open() -> None:
    """A request targeted at its beginning counts, the one that ends it does not."""
    keys = [r.key for r in in_window(ladder(), Window(98.0, 0.0))]
    assert keys == ["r98", "r99", "r100"]


def test_no_samples_summarise_to_nothing() -> None:
    """The count says that the zeros mean nothing."""
    assert Distribution.of([]).count == 0
