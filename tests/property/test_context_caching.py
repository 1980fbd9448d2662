"""The context-caching cost model: laws, and the planner as its special case."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.cache.planner import PassFacts, Planner
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibration import CachingFit, FitQuality, LocationFit
from sgl_tiered.cost.context_caching import CachedPrompt, ContextCaching
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost

QUALITY = FitQuality(1, 1.0, 0.0, 0.0)
BELOW = (TierId.HOST, TierId.CXL, TierId.DISK, TierId.PEER)
SECONDS = st.floats(0.0, 1.0)
SMALL = st.floats(0.0, 1e-3)
LAYOUT = PageLayout(num_layers=4, page_tokens=8, token_bytes=32)
TOKEN_BYTES = 2 * LAYOUT.num_layers * LAYOUT.token_bytes


@st.composite
def models(draw: st.DrawFn) -> ContextCaching:
    """Any coefficients, any places."""
    places = tuple(
        LocationFit(
            tier.label,
            draw(SECONDS),
            draw(SMALL),
            draw(SMALL),
            draw(st.booleans()),
            QUALITY,
        )
        for tier in draw(st.sets(st.sampled_from(BELOW)))
    )
    fit = CachingFit(
        *(draw(SECONDS) for _ in range(3)),
        *(draw(SMALL) for _ in range(3)),
        places,
        QUALITY,
    )
    chunk = draw(st.none() | st.integers(1, 300))
    return ContextCaching(fit, draw(st.integers(1, 40)), draw(st.integers(1, 8)), chunk)


@st.composite
def batches(draw: st.DrawFn) -> list[CachedPrompt]:
    """Prompts with any parts of them anywhere, also more than they are long."""
    parts = st.tuples(st.sampled_from(TierId), st.integers(0, 200))
    prompt = st.builds(
        CachedPrompt, st.integers(1, 400), st.lists(parts, max_size=4).map(tuple)
    )
    return draw(st.lists(prompt, max_size=5))


@given(models(), batches())
def test_the_choice_is_the_best_and_can_be_carried_out(
    model: ContextCaching, batch: list[CachedPrompt]
) -> None:
    """No slower than any single rule; whole pages, and a token is left to compute."""
    choice = model.decide(batch)
    for rule in (set(), set(BELOW), *({tier} for tier in BELOW)):
        assert choice.seconds <= model.seconds(batch, rule) * (1 + 1e-12)
    assert choice.all_s == model.seconds(batch, set(BELOW))
    assert choice.places <= model.places
    assert len(choice.reused_tokens) == len(batch)
    for prompt, tokens in zip(batch, choice.reused_tokens, strict=True):
        assert 0 <= tokens < prompt.num_tokens
        assert tokens % model.page_tokens == 0
        assert tokens <= sum(found for _, found in prompt.found)
    assert model.seconds(batch, choice.places) == choice.seconds


@given(models(), batches())
def test_fewer_places_where_they_make_no_difference(
    model: ContextCaching, batch: list[CachedPrompt]
) -> None:
    """Nothing is fetched that saves no time."""
    choice = model.decide(batch)
    for place in choice.places:
        without = choice.places - {place}
        assert model.seconds(batch, without) > choice.seconds


@given(models(), batches(), st.integers(0, 300))
def test_another_prompt_never_makes_the_batch_faster(
    model: ContextCaching, batch: list[CachedPrompt], num_tokens: int
) -> None:
    """Times are not negative, and more work takes no less of it."""
    prompt = CachedPrompt(num_tokens + 1)
    before = model.decide(batch).seconds
    assert 0.0 <= before <= model.decide([*batch, prompt]).seconds * (1 + 1e-12)


@st.composite
def costs(draw: st.DrawFn) -> CostModel:
    """Prefill and the links of a host and a disk."""
    positive = st.floats(1e-6, 1e-2)
    prefill = PrefillCost.from_coefficients(
        draw(positive), draw(positive), draw(st.floats(1e-9, 1e-5))
    )
    speed = st.floats(1e4, 1e9)
    links = {
        tier: LinkCost(draw(positive), draw(speed))
        for tier in (TierId.HOST, TierId.DISK)
    }
    return CostModel(prefill, links)


def both(cost: CostModel, overlaps: bool) -> tuple[Planner, ContextCaching]:
    planner = Planner(cost, LAYOUT, "always", overlaps=overlaps)
    return planner, ContextCaching.of_costs(
        cost,
        token_bytes=TOKEN_BYTES,
        page_tokens=LAYOUT.page_tokens,
        num_layers=LAYOUT.num_layers,
        overlaps=overlaps,
    )


@given(
    costs(),
    st.booleans(),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(1, 100),
    st.sampled_from([TierId.HOST, TierId.DISK]),
)
def test_the_planner_is_the_case_of_one_request(
    cost: CostModel, overlaps: bool, first: int, found: int, rest: int, tier: TierId
) -> None:
    """Always and never loading take what the model says; auto is no worse than it."""
    planner, model = both(cost, overlaps)
    page = LAYOUT.page_tokens
    num_tokens = (first + found) * page + rest
    prompt = CachedPrompt(
        num_tokens, ((TierId.DEVICE, first * page), (tier, found * page))
    )
    tiers = np.full(found, tier, np.uint8)
    times = {}
    for policy in ("always", "never", "auto"):
        planner.load_policy = policy
        choice = planner.choose(tiers, first, num_tokens, may_try=False)
        times[policy] = choice.total_s
    assert times["always"] == pytest.approx(model.seconds([prompt], {tier}))
    assert times["never"] == pytest.approx(model.seconds([prompt], set()))
    assert times["auto"] <= model.decide([prompt]).seconds * (1 + 1e-9)


@given(
    costs(),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=4),
)
def test_loads_accepted_in_turn_cost_the_batch(
    cost: CostModel, overlaps: bool, requests: list[tuple[int, int]]
) -> None:
    """What the planner predicts for the last one, with the others as its facts."""
    planner, model = both(cost, overlaps)
    page = LAYOUT.page_tokens
    batch, compute_s, load_s, total_s = [], 0.0, 0.0, 0.0
    for found, rest in requests:
        num_tokens = found * page + rest
        tiers = np.full(found, TierId.HOST, np.uint8)
        facts = PassFacts(compute_s=compute_s, load_s=load_s)
        total_s = planner.choose(tiers, 0, num_tokens, facts).total_s
        compute_s += cost.recompute_s(found * page, rest)
        load_s += planner.direct_s(tiers)
        batch.append(CachedPrompt(num_tokens, ((TierId.HOST, found * page),)))
    # The planner counts a pass's overhead for each request of it.
    extra_s = (len(requests) - 1) * cost.prefill.overhead_s
    seconds = model.seconds(batch, {TierId.HOST})
    assert seconds <= total_s * (1 + 1e-9)
    assert total_s <= seconds + extra_s * (1 + 1e-9) + 1e-12
