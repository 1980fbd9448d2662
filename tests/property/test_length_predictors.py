"""Length predictors and their book, for any traffic."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.policies.length.base import LengthFacts, bounded
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.llm import LLMLengths
from sgl_tiered.policies.length.online import MAX_CONTEXTS, OnlineLengths
from sgl_tiered.policies.length.ranges import MAX_LENGTH, STARTS, range_of

LENGTHS = st.integers(0, 4096) | st.integers(0, 1 << 40)
FACTS = st.builds(
    LengthFacts,
    num_prompt_tokens=LENGTHS,
    max_new_tokens=LENGTHS,
    group=st.sampled_from(["", "a", "b", "c"]),
    said_tokens=st.just(0) | LENGTHS,
)
ANSWERS = st.lists(st.tuples(FACTS, LENGTHS), max_size=25)


@given(st.integers(-5, MAX_LENGTH + 5))
def test_a_range_holds_its_lengths(num_tokens: int) -> None:
    """Each length is in one range, at most a sixteenth wide of where it starts."""
    place = range_of(num_tokens)
    inside = min(max(num_tokens, 0), MAX_LENGTH - 1)
    assert STARTS[place] <= inside < STARTS[place + 1]
    assert STARTS[place + 1] - STARTS[place] <= max(1, STARTS[place] / 16)


@given(FACTS, LENGTHS, LENGTHS, LENGTHS, LENGTHS)
def test_bounded_keeps_the_promises(
    facts: LengthFacts, num_done: int, lower: int, median: int, upper: int
) -> None:
    """Whatever a predictor believes, in whatever order."""
    found = bounded(facts, num_done, lower, median, upper)
    most = max(facts.max_new_tokens, num_done + 1)
    assert num_done + 1 <= found.lower <= found.median <= found.upper <= most


@given(ANSWERS, FACTS, LENGTHS, st.sampled_from([OnlineLengths, LLMLengths]))
def test_learned_predictions_keep_the_promises(
    answers: list[tuple[LengthFacts, int]],
    facts: LengthFacts,
    num_done: int,
    make: type[OnlineLengths] | type[LLMLengths],
) -> None:
    """After any answers: bounds in order and in reach, equal for equal answers."""
    one, two = make(), make()
    for seen, length in answers:
        one.observe(seen, length)
        two.predict(facts, length)
        two.observe(seen, length)
    found = one.predict(facts, num_done)
    most = max(facts.max_new_tokens, num_done + 1)
    assert num_done + 1 <= found.lower <= found.median <= found.upper <= most
    assert found == two.predict(facts, num_done)
    assert math.isclose(sum(one.weights.values()), 1.0)
    assert min(one.weights.values()) > 0.0


@given(ANSWERS, FACTS, LENGTHS, st.lists(st.integers(1, 9999), max_size=5, unique=True))
def test_class_shares_are_a_distribution(
    answers: list[tuple[LengthFacts, int]],
    facts: LengthFacts,
    num_done: int,
    cuts: list[int],
) -> None:
    """Not negative, one per class, and together everything that may still come."""
    predictor = OnlineLengths()
    for seen, length in answers:
        predictor.observe(seen, length)
    edges = [0, *sorted(cuts)]
    shares = predictor.shares(facts, edges, min(num_done, MAX_LENGTH // 2))
    assert len(shares) == len(edges)
    assert min(shares) >= 0.0
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-6)


def test_memory_is_bounded() -> None:
    """Groups without number leave a bounded number of contexts, the latest ones."""
    predictor = OnlineLengths()
    rng = np.random.default_rng(1)
    for number in range(MAX_CONTEXTS):
        facts = LengthFacts(int(rng.integers(1, 1 << 20)), 1 << 20, f"g{number}")
        predictor.observe(facts, 10)
    assert predictor.num_contexts == MAX_CONTEXTS


@given(
    st.lists(
        st.tuples(FACTS, st.integers(1, 300), st.booleans()), min_size=1, max_size=8
    )
)
def test_the_book_forgets_who_left(
    requests: list[tuple[LengthFacts, int, bool]],
) -> None:
    """Predictions hold at every token, and nothing is kept of who ended or left."""
    book = LengthBook(OnlineLengths())
    for rid, (facts, _, _) in enumerate(requests):
        book.entered(rid, facts)
    for rid, (_, length, ends) in enumerate(requests):
        for done in range(length):
            found = book.prediction(rid, done)
            assert found is not None
            assert done + 1 <= found.lower <= found.median <= found.upper
        if ends:
            book.finished(rid, length)
        else:
            book.left(rid)
        assert book.prediction(rid) is None
    assert len(book) == 0
    assert book.score().num_answers == sum(ends for _, _, ends in requests)
