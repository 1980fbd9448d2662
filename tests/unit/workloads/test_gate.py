"""The gate catches what it must, and accepts only what it can explain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sgl_tiered_workloads.gate import (
    NegativeControlError,
    Spread,
    check_equality,
    measure_spread,
    negative_control,
    plain_spread,
    widest_spread,
)
from sgl_tiered_workloads.records import RequestRecord

PAGE = 4
TOP = ((-0.5, 11), (-1.5, 12), (-2.5, 13), (-3.5, 14), (-4.5, 15))
TIE = ((-0.50, 11), (-0.51, 12), (-2.5, 13), (-3.5, 14), (-4.5, 15))
SPREAD = Spread(max_logprob=0.05, mean_logprob=0.01, max_gap=0.06, num_tokens=100)


def record(
    key: str,
    order: int,
    cached: int = 0,
    prompt: tuple[int, ...] = tuple(range(100, 113)),
    tops: tuple[tuple[tuple[float, int], ...], ...] = (TOP, TOP, TOP),
    tier: str = "device",
) -> RequestRecord:
    return RequestRecord(
        key=key,
        order=order,
        prompt=prompt,
        targeted_s=0.0,
        started_s=0.0,
        output=tuple(top[0][1] for top in tops),
        logprobs=tuple(top[0][0] for top in tops),
        top_logprobs=tops,
        cached_tokens=cached,
        cached_by_tier={tier: cached} if cached else {},
    )


def shifted(
    top: tuple[tuple[float, int], ...], by: float
) -> tuple[tuple[float, int], ...]:
    return tuple((logprob + by, token) for logprob, token in top)


COLD = record("a", 0)
HIT = record("b", 1, cached=12)
RUN = [COLD, HIT]


def test_equal_runs_are_green_and_compared_bit_for_bit() -> None:
    """Equal answers of equal computations pass without any tolerance."""
    lower = [COLD, replace(HIT, cached_by_tier={"host": 8, "disk": 4})]
    result = check_equality(RUN, lower, page_size=PAGE, must_cover=("host", "disk"))
    assert result.passed, result.summary()
    assert result.exact_fraction == 1.0
    assert result.exact_tokens_by_tier == {"host": 8, "disk": 4}


def test_a_differing_token_is_caught_with_its_place() -> None:
    """An exact answer with another token is red and names request and token."""
    other = ((-0.5, 12), (-1.5, 11), *TOP[2:])
    wrong = [COLD, record("b", 1, cached=12, tops=(TOP, other, TOP))]
    result = check_equality(RUN, wrong, page_size=PAGE, spread=SPREAD)
    assert [(d.key, d.position) for d in result.differences] == [("b", 1)]
    assert "token 11 became 12" in result.summary()


def test_the_smallest_logprob_difference_is_caught_where_bits_must_agree() -> None:
    """There is no tolerance between equal computations, whatever the spread."""
    wrong = [COLD, record("b", 1, cached=12, tops=(TOP, TOP, shifted(TOP, 1e-6)))]
    result = check_equality(RUN, wrong, page_size=PAGE, spread=SPREAD)
    assert [(d.key, d.position) for d in result.differences] == [("b", 2)]


def test_another_hit_length_puts_a_request_under_the_near_tie_rule() -> None:
    """Rounding within the spread is accepted where the computation differed."""
    tops = (TOP, shifted(TOP, 0.04), TOP)
    recomputed = [COLD, record("b", 1, cached=4, tops=tops)]
    result = check_equality(
        RUN, recomputed, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.5
    )
    assert result.passed, result.summary()
    assert (result.num_exact, result.num_near) == (1, 1)


def test_more_than_the_spread_is_caught_under_the_near_tie_rule() -> None:
    """A logprob that moves farther than plain moves it is red."""
    tops = (TOP, shifted(TOP, 0.2), TOP)
    wrong = [COLD, record("b", 1, cached=4, tops=tops)]
    result = check_equality(
        RUN, wrong, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.5
    )
    assert [(d.key, d.position) for d in result.differences] == [("b", 1)]


def flipped_run(top: tuple[tuple[float, int], ...]) -> list[RequestRecord]:
    """Return a run that takes the second token at the answer's second place."""
    (first, a), (second, b), *rest = top
    flip = ((first, b), (second, a), *rest)
    return [COLD, record("b", 1, cached=4, tops=(TOP, flip, shifted(TOP, 3.0)))]


def test_a_flip_at_a_near_tie_is_explained_and_ends_the_comparison() -> None:
    """After an explained flip the answers follow other texts, out of comparison."""
    reference = [COLD, record("b", 1, cached=12, tops=(TOP, TIE, TOP))]
    result = check_equality(
        reference,
        flipped_run(TIE),
        page_size=PAGE,
        spread=SPREAD,
        min_exact_fraction=0.5,
    )
    assert result.passed, result.summary()
    assert result.near_ties == 1


def test_a_flip_across_a_wide_gap_is_not_explained() -> None:
    """A token may differ only where plain itself could have tipped over."""
    wide = Spread(max_logprob=2.0, mean_logprob=1.0, max_gap=0.06, num_tokens=100)
    result = check_equality(
        RUN, flipped_run(TOP), page_size=PAGE, spread=wide, min_exact_fraction=0.5
    )
    assert [(d.key, d.position) for d in result.differences] == [("b", 1)]
    assert "gap" in result.differences[0].reason


def test_a_hit_on_a_page_that_was_computed_otherwise_is_not_exact() -> None:
    """Equal hit lengths do not suffice: the pages' own history must be alike."""
    reference = [COLD, HIT, record("c", 2, cached=12)]
    candidate = [COLD, record("b", 1, cached=4), record("c", 2, cached=12)]
    result = check_equality(
        reference, candidate, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.0
    )
    assert (result.num_exact, result.num_near) == (1, 2)


def test_a_hit_on_a_page_that_was_computed_twice_is_not_exact() -> None:
    """Two copies may differ in rounding, and either server may serve either."""
    reference = [COLD, record("b", 1), record("c", 2, cached=12)]
    result = check_equality(
        reference, reference, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.0
    )
    assert (result.num_exact, result.num_near) == (2, 1)


def test_a_split_prompt_and_all_of_its_pages_are_not_exact() -> None:
    """What was cached of it lies behind what it computed, so any page may be new."""
    split = replace(HIT, is_split=True)
    reference = [COLD, HIT, record("c", 2, cached=4)]
    candidate = [COLD, split, record("c", 2, cached=4)]
    result = check_equality(
        reference, candidate, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.0
    )
    assert (result.num_exact, result.num_near) == (1, 2)


def test_hits_on_other_pages_stay_exact_beside_tainted_ones() -> None:
    """Taint follows pages, not time: an unrelated prompt is still exact."""
    other = tuple(range(200, 213))
    ends = [record("x", 2, prompt=other), record("y", 3, cached=12, prompt=other)]
    reference = [COLD, HIT, *ends]
    candidate = [COLD, record("b", 1, cached=4), *ends]
    result = check_equality(
        reference, candidate, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.7
    )
    assert result.passed, result.summary()
    assert result.num_exact == 3


def test_one_member_of_a_forced_batch_takes_the_others_out_of_exactness() -> None:
    """Batch mates share the matrix products, so they are exact together or not."""
    other = tuple(range(200, 213))
    reference = [COLD, record("b", 1, cached=12), record("z", 1, prompt=other)]
    candidate = [COLD, record("b", 1, cached=4), record("z", 1, prompt=other)]
    result = check_equality(
        reference, candidate, page_size=PAGE, spread=SPREAD, min_exact_fraction=0.0
    )
    assert (result.num_exact, result.num_near) == (1, 2)


def test_a_batch_known_to_have_differed_and_its_pages_are_not_exact() -> None:
    """What a log says of batches counts, though every length is the same."""
    reference = [COLD, HIT, record("c", 2, prompt=tuple(range(200, 213)))]
    result = check_equality(
        reference, reference, page_size=PAGE, spread=SPREAD, unlike={0}
    )
    # The third shares nothing with the first, whose pages the second reuses.
    assert (result.num_exact, result.num_near) == (1, 2)
    assert not result.passed


def test_batch_mates_that_share_new_pages_do_not_spoil_them() -> None:
    """Of two copies made in one batch the tree keeps one, on both servers alike."""
    mates = [record("a", 0), record("b", 0), record("c", 1, cached=12)]
    result = check_equality(mates, mates, page_size=PAGE)
    assert result.passed, result.summary()
    assert result.num_exact == 3


def test_too_little_compared_exactly_is_red() -> None:
    """A run that recomputes everything cannot pass as an equal one."""
    candidate = [COLD, record("b", 1, cached=4)]
    result = check_equality(RUN, candidate, page_size=PAGE, min_exact_fraction=0.9)
    assert not result.passed
    assert "compared exactly" in result.summary()


def test_a_tier_that_served_nothing_is_red_when_it_must_be_covered() -> None:
    """A green gate says something about every tier that was named."""
    result = check_equality(RUN, RUN, page_size=PAGE, must_cover=("disk",))
    assert "no exact answer used the disk tier" in result.summary()


def test_where_no_bits_are_asked_a_tier_is_covered_by_any_answer() -> None:
    """Free batches compare nothing exactly, and yet a tier has to have served."""
    lower = [COLD, replace(HIT, cached_by_tier={"host": 12})]
    options = {"page_size": PAGE, "spread": SPREAD, "forced": False}
    assert check_equality(RUN, lower, must_cover=("host",), **options).passed
    result = check_equality(RUN, RUN, must_cover=("host",), **options)
    assert "no compared answer used the host tier" in result.summary()


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ([COLD], "missing in the candidate"),
        ([COLD, replace(HIT, error="HTTP 500")], "error in the candidate: HTTP 500"),
        ([COLD, replace(HIT, prompt=(1, 2))], "not the same schedule"),
        ([COLD, replace(HIT, top_logprobs=())], "lacks top logprobs"),
        ([COLD, record("b", 1, cached=12, tops=(TOP,))], "3 output tokens against 1"),
        ([COLD, HIT, record("c", 2)], "missing in the reference"),
    ],
)
def test_what_cannot_be_compared_is_red(
    candidate: list[RequestRecord], reason: str
) -> None:
    """Missing, failed, cut or foreign answers never pass."""
    result = check_equality(RUN, candidate, page_size=PAGE, spread=SPREAD)
    assert reason in result.summary()


def test_no_records_at_all_are_red() -> None:
    """An empty comparison proves nothing."""
    assert not check_equality([], [], page_size=PAGE).passed


def test_free_concurrency_judges_everything_by_the_spread() -> None:
    """Without a forced schedule nothing is exact and a spread is required."""
    near = [COLD, record("b", 1, cached=12, tops=(shifted(TOP, 0.04), TOP, TOP))]
    assert not check_equality(RUN, near, page_size=PAGE, forced=False).passed
    result = check_equality(RUN, near, page_size=PAGE, forced=False, spread=SPREAD)
    assert result.passed, result.summary()
    assert (result.num_exact, result.num_near) == (0, 2)


def test_many_small_moves_are_caught_by_their_mean() -> None:
    """A bias that stays below the largest move is still no noise."""
    tops = (TOP,) * 30
    biased = (shifted(TOP, 0.045),) * 30
    result = check_equality(
        [record("a", 0, tops=tops)],
        [record("a", 0, tops=biased)],
        page_size=PAGE,
        forced=False,
        spread=SPREAD,
    )
    assert "mean logprob move" in result.summary()


def test_spread_is_measured_up_to_the_first_differing_token() -> None:
    """What follows a flip belongs to another text and says nothing of noise."""
    plain = [record("a", 0, tops=(TOP, TIE, TOP))]
    tipped = ((-0.48, 12), (-0.53, 11), *TIE[2:])
    other = [record("a", 0, tops=(shifted(TOP, 0.01), tipped, shifted(TOP, 5.0)))]
    spread = measure_spread(plain, other)
    assert spread.num_tokens == 2
    assert spread.max_logprob == pytest.approx(0.03)
    assert spread.max_gap == pytest.approx(0.06)


def test_spread_refuses_runs_of_different_schedules() -> None:
    """A spread over other prompts would allow anything."""
    with pytest.raises(ValueError, match="not two runs of one schedule"):
        measure_spread(RUN, [COLD])


def test_plain_s_spread_leaves_out_what_was_computed_alike() -> None:
    """Answers that cannot move would make the mean smaller than what it is held to."""
    moved = record("b", 1, cached=4, tops=(TOP, shifted(TOP, 0.04), TOP))
    spread = plain_spread(RUN, [COLD, moved], PAGE)
    assert spread.num_tokens == 3
    assert spread.mean_logprob == pytest.approx(0.04 / 3)
    assert measure_spread(RUN, [COLD, moved]).mean_logprob == pytest.approx(0.04 / 6)


def test_plain_s_spread_of_runs_that_were_all_alike_is_that_of_all() -> None:
    """Nothing else is there to be measured."""
    assert plain_spread(RUN, RUN, PAGE) == Spread(0.0, 0.0, 0.0, 6)


def test_the_widest_spread_allows_what_any_does() -> None:
    """Each bound is the largest, whichever spread it comes from."""
    spreads = [Spread(0.3, 0.01, 0.1, 5), Spread(0.2, 0.02, 0.4, 6)]
    assert widest_spread(spreads) == Spread(0.3, 0.02, 0.4, 11)


def test_plain_s_spread_refuses_a_run_that_failed() -> None:
    """An answer that is missing has no spread."""
    failed = replace(HIT, error="the server is gone")
    with pytest.raises(ValueError, match="the server is gone"):
        plain_spread(RUN, [COLD, failed], PAGE)


def test_negative_control_passes_only_when_every_corruption_is_caught() -> None:
    """A gate that lets a damaged run pass is itself an error."""
    damaged = [COLD, record("b", 1, cached=12, tops=(shifted(TOP, 0.3), TOP, TOP))]
    caught = check_equality(RUN, damaged, page_size=PAGE)
    missed = check_equality(RUN, RUN, page_size=PAGE)
    negative_control({"zero": caught, "swap": caught})
    with pytest.raises(NegativeControlError, match="'swap' was not caught"):
        negative_control({"zero": caught, "swap": missed})
    with pytest.raises(ValueError, match="at least one"):
        negative_control({})


def test_negative_control_does_not_count_a_run_that_merely_lacks_answers() -> None:
    """A missing answer is red, but it proves nothing about damaged KV."""
    missing = check_equality(RUN, [COLD], page_size=PAGE)
    with pytest.raises(NegativeControlError):
        negative_control({"zero": missing})
