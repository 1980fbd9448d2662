"""Which answers go back to prefill: the more it saves and the less it costs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import CachingFit, FitQuality, LocationFit
from sgl_tiered.cost.context_caching import ContextCaching
from sgl_tiered.cost.returning import (
    RETURN_POLICIES,
    ReturnChoice,
    choose_return,
    return_cost_s,
)

QUALITY = FitQuality(1, 1.0, 0.0, 0.0)
PAGE, LAYERS = 16, 4
TOKEN_BYTES = 4096
SECONDS = st.floats(0.0, 0.1)
PER_TOKEN = st.floats(1e-7, 1e-3)
PAGES = st.integers(0, 200)
SPEED = st.floats(1e5, 1e11)
CHANCE = st.floats(0.0, 1.0)


@st.composite
def fits(draw: st.DrawFn) -> CachingFit:
    """An instance whose host tier is not slower than computing."""
    token_s = draw(PER_TOKEN)
    host = LocationFit(
        TierId.HOST.label,
        draw(SECONDS),
        draw(st.floats(0.0, 1.0)) * token_s,
        0.0,
        draw(st.booleans()),
        QUALITY,
    )
    return CachingFit(
        draw(SECONDS),
        draw(SECONDS),
        draw(SECONDS),
        token_s,
        draw(st.floats(0.0, 1e-6)),
        0.0,
        (host,),
        QUALITY,
    )


def chosen(
    fit: CachingFit,
    known: int,
    missing: int,
    speed: float = 1e9,
    chance: float = 1.0,
    policy: str = "auto",
) -> ReturnChoice:
    return choose_return(
        ContextCaching(fit, PAGE, LAYERS),
        (known + missing) * PAGE,
        known * PAGE,
        lambda num: return_cost_s(num * TOKEN_BYTES, speed),
        chance=chance,
        policy=policy,
    )


@given(fits(), PAGES, PAGES, SPEED, CHANCE)
def test_what_is_missing_goes_or_nothing(
    fit: CachingFit, known: int, missing: int, speed: float, chance: float
) -> None:
    """By gain, chance and cost alone; and what is forced is forced."""
    choice = chosen(fit, known, missing, speed, chance)
    assert choice.num_tokens in (0, missing * PAGE)
    assert choice.gain_s >= 0.0
    assert choice.cost_s >= 0.0
    pays = missing > 0 and choice.chance * choice.gain_s > choice.cost_s
    assert bool(choice.num_tokens) == pays
    assert not chosen(fit, known, missing, speed, chance, "never").num_tokens
    forced = chosen(fit, known, missing, speed, chance, "always")
    assert bool(forced.num_tokens) == (known + missing > 0)
    gains = {chosen(fit, known, missing, policy=p).gain_s for p in RETURN_POLICIES}
    assert gains == {choice.gain_s}


@given(fits(), PAGES, st.integers(1, 200), SPEED, st.floats(1.0, 100.0))
def test_a_slower_link_never_brings_an_answer_back(
    fit: CachingFit, known: int, missing: int, speed: float, slower: float
) -> None:
    """It costs more, and saves the same."""
    choice = chosen(fit, known, missing, speed)
    other = chosen(fit, known, missing, speed / slower)
    assert other.cost_s >= choice.cost_s
    assert other.gain_s == choice.gain_s
    assert choice.num_tokens or not other.num_tokens


@given(fits(), PAGES, PAGES, st.integers(1, 200), SPEED)
def test_a_longer_prompt_makes_an_answer_worth_more(
    fit: CachingFit, known: int, longer: int, missing: int, speed: float
) -> None:
    """Its tokens attend to more; they cost the same to send."""
    choice = chosen(fit, known, missing, speed)
    other = chosen(fit, known + longer, missing, speed)
    assert other.cost_s == choice.cost_s
    assert other.gain_s >= choice.gain_s * (1 - 1e-9) - 1e-12
    if choice.gain_s > choice.cost_s * (1 + 1e-6) + 1e-9:
        assert other.num_tokens


@given(fits(), st.integers(1, 200), st.integers(0, 200), st.integers(0, 200))
def test_the_more_is_cached_there_the_less_is_gained(
    fit: CachingFit, total: int, known: int, more: int
) -> None:
    """Of an answer of one length in all; and there is less to send."""
    fit = replace(fit, pair_s=0.0)
    least = min(known, total)
    most = min(least + more, total)
    choice = chosen(fit, least, total - least)
    other = chosen(fit, most, total - most)
    assert other.gain_s <= choice.gain_s * (1 + 1e-9) + 1e-12
    assert other.cost_s <= choice.cost_s


@given(fits(), PAGES, st.integers(1, 200), CHANCE, CHANCE)
def test_the_likelier_the_next_turn_the_more_go_back(
    fit: CachingFit, known: int, missing: int, one: float, two: float
) -> None:
    """What is never continued is never returned."""
    rare = chosen(fit, known, missing, chance=min(one, two))
    often = chosen(fit, known, missing, chance=max(one, two))
    assert often.num_tokens >= rare.num_tokens
    assert not chosen(fit, known, missing, chance=0.0).num_tokens


@given(fits(), PAGES, st.integers(1, 200))
def test_a_place_that_is_not_known_is_worth_nothing(
    fit: CachingFit, known: int, missing: int
) -> None:
    """Nobody would load from there."""
    choice = chosen(replace(fit, locations=()), known, missing)
    assert choice.gain_s == 0.0
    assert not choice.num_tokens
