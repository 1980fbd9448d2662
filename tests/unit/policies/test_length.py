"""What each length predictor believes, and what it costs to ask a model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.length.base import (
    LengthFacts,
    LengthPrediction,
    LengthPredictor,
)
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.policies.length.llm import (
    MAX_REPLY_TOKENS,
    QUESTION,
    LengthAsker,
    LLMLengths,
    Reply,
    parse_length,
)
from sgl_tiered.policies.length.online import OnlineLengths
from sgl_tiered.policies.length.oracle import OracleLength
from sgl_tiered.policies.length.ranges import log_normal
from sgl_tiered.policies.length.registry import make_length_predictor

FREE = LengthFacts(num_prompt_tokens=1000, max_new_tokens=1 << 30)


def taught(predictor: LengthPredictor, lengths: list[int], facts: LengthFacts) -> None:
    for length in lengths:
        predictor.observe(facts, length)


def test_a_shape_is_a_distribution_with_its_median() -> None:
    """Shares add up to 1, half of them below the median, none at no tokens."""
    shape = log_normal(300.0, 1.0)
    assert shape.sum() == pytest.approx(1.0)
    assert shape[0] == 0.0
    predictor = OnlineLengths()
    found = predictor.predict(FREE)
    # The prior's, before anything was seen.
    assert 170 <= found.median <= 230
    assert found.lower < 60
    assert found.upper > 600


def test_answers_of_one_length_are_soon_known() -> None:
    """After thirty alike, all three bounds are at that length."""
    predictor = OnlineLengths()
    taught(predictor, [100] * 30, FREE)
    found = predictor.predict(FREE)
    assert 96 <= found.lower <= found.median <= found.upper <= 104


def test_the_bounds_are_percentiles() -> None:
    """Of lengths that are evenly spread, a tenth lies below and above the bounds."""
    predictor = OnlineLengths(coverage=0.9)
    rng = np.random.default_rng(1)
    taught(predictor, rng.integers(1000, 2000, 3000).tolist(), FREE)
    found = predictor.predict(FREE)
    assert found.lower == pytest.approx(1100, abs=60)
    assert found.median == pytest.approx(1500, abs=60)
    assert found.upper == pytest.approx(1900, abs=60)


def test_what_is_out_already_tells_of_the_rest() -> None:
    """Answers are of 50 or of 800 tokens: who has 100 will have 800."""
    predictor = OnlineLengths()
    taught(predictor, [50, 800] * 200, FREE)
    assert predictor.predict(FREE).lower <= 52
    found = predictor.predict(FREE, num_done=100)
    assert 750 <= found.lower <= found.median <= 850


def test_an_answer_longer_than_any_before_is_expected_to_go_on() -> None:
    """Beyond all that was seen it still predicts, further out as it grows."""
    predictor = OnlineLengths()
    taught(predictor, [20] * 500, FREE)
    found = predictor.predict(FREE, num_done=5_000)
    assert 5_001 <= found.lower <= found.median <= found.upper
    assert found.upper > 5_100


def test_groups_are_told_apart() -> None:
    """Two groups with different lengths each get their own, and mixed traffic both."""
    predictor = OnlineLengths()
    short, long = replace(FREE, group="short"), replace(FREE, group="long")
    for _ in range(200):
        predictor.observe(short, 30)
        predictor.observe(long, 3000)
    assert predictor.predict(short).upper < 100
    assert predictor.predict(long).lower > 1000
    assert predictor.predict(replace(FREE, group="new")).lower < 100


def test_prompt_lengths_are_told_apart() -> None:
    """Where long prompts get short answers, that is learned without any groups."""
    predictor = OnlineLengths()
    short, long = (
        replace(FREE, num_prompt_tokens=50),
        replace(FREE, num_prompt_tokens=50_000),
    )
    for _ in range(300):
        predictor.observe(short, 900)
        predictor.observe(long, 40)
    assert predictor.predict(long).median < 100
    assert predictor.predict(short).median > 700


def test_drift_is_followed() -> None:
    """When answers change after 5,000 alike, some hundred new ones are enough."""
    predictor = OnlineLengths()
    taught(predictor, [1000] * 5000, FREE)
    taught(predictor, [50] * 300, FREE)
    assert predictor.predict(FREE).median < 100


def test_answers_cut_at_their_allowance_are_not_taken_for_short() -> None:
    """Those tell only that they would have been at least so long."""
    predictor = OnlineLengths()
    cut = replace(FREE, max_new_tokens=100)
    taught(predictor, [100] * 300, cut)
    assert predictor.predict(cut) == LengthPrediction(100, 100, 100)
    assert predictor.predict(FREE).lower > 100


def test_fixed_lengths_are_known_exactly() -> None:
    """Clients that ignore the end of text always use what they allow."""
    predictor = OnlineLengths()
    rng = np.random.default_rng(2)
    for length in rng.integers(10, 500, 300).tolist():
        predictor.observe(replace(FREE, max_new_tokens=length), length)
    for length in (10, 77, 500):
        found = predictor.predict(replace(FREE, max_new_tokens=length))
        assert found == LengthPrediction(length, length, length)


@pytest.mark.parametrize("coverage", [0.5, 1.0, 0.0, float("nan")])
def test_a_coverage_that_is_none_is_refused(coverage: float) -> None:
    """It lies above one half and below all."""
    with pytest.raises(ConfigError, match="coverage"):
        OnlineLengths(coverage)


def test_class_shares_follow_what_was_seen() -> None:
    """Half of the answers in each class, and only the upper one once that is sure."""
    predictor = OnlineLengths()
    taught(predictor, [50, 800] * 500, FREE)
    below, above = predictor.shares(FREE, [0, 300])
    assert below == pytest.approx(0.5, abs=0.05)
    assert above == pytest.approx(0.5, abs=0.05)
    assert predictor.shares(FREE, [0, 300], num_done=300) == pytest.approx([0.0, 1.0])


def test_constant_and_oracle_say_what_they_were_told() -> None:
    """Within the allowance, and the next token once they are outrun."""
    facts = LengthFacts(10, 300, said_tokens=120)
    assert ConstantLength(64).predict(facts) == LengthPrediction(64, 64, 64)
    assert ConstantLength(999).predict(facts) == LengthPrediction(300, 300, 300)
    assert ConstantLength(64).predict(facts, 64) == LengthPrediction(65, 65, 65)
    assert OracleLength().predict(facts, 40) == LengthPrediction(120, 120, 120)
    unsaid = replace(facts, said_tokens=0)
    assert OracleLength().predict(unsaid) == LengthPrediction(300, 300, 300)


@pytest.mark.parametrize(
    "name",
    ["", "onlin", "constant", "constant:", "constant:-1", "constant:0", "constant:x"],
)
def test_an_unknown_name_is_refused(name: str) -> None:
    """In one sentence, with what there is to choose from or to mend."""
    with pytest.raises(ConfigError, match="length_predictor"):
        make_length_predictor(name)


def test_constant_takes_its_number_from_the_name() -> None:
    """``constant:N`` predicts N."""
    predictor = make_length_predictor("constant:77")
    assert predictor is not None
    assert predictor.predict(FREE).median == 77


def test_a_model_that_is_wrong_by_a_factor_is_put_right() -> None:
    """It says a third of the truth: after some answers the truth is predicted."""
    predictor = LLMLengths()
    rng = np.random.default_rng(3)
    for length in (rng.lognormal(5.5, 1.0, 2000).astype(int) * 3 + 3).tolist():
        predictor.observe(replace(FREE, said_tokens=length // 3), length)
    for said in (50, 200, 600):
        found = predictor.predict(replace(FREE, said_tokens=said))
        assert found.median == pytest.approx(3 * said, rel=0.15)
    assert predictor.weights["said"] > 0.5


def test_a_model_is_believed_before_anything_is_known() -> None:
    """The first prediction lies around what it said; without a word, at the prior."""
    predictor = LLMLengths()
    first = predictor.predict(replace(FREE, said_tokens=5000))
    assert first.upper > 5000
    assert first.median > predictor.predict(FREE).median
    assert predictor.predict(FREE) == OnlineLengths().predict(FREE)


def test_a_model_that_guesses_is_not_listened_to() -> None:
    """Its word has nothing to do with the answers: they are predicted as without."""
    predictor, without = LLMLengths(), OnlineLengths()
    rng = np.random.default_rng(4)
    for length in rng.integers(90, 111, 1000).tolist():
        said = int(rng.integers(1, 10_000))
        predictor.observe(replace(FREE, said_tokens=said), length)
        without.observe(FREE, length)
    found = predictor.predict(replace(FREE, said_tokens=9000))
    expected = without.predict(FREE)
    assert found.median == pytest.approx(expected.median, abs=5)
    assert found.lower == pytest.approx(expected.lower, abs=10)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("300", 300),
        ("About 1,200 tokens.", 1200),
        ("~1.5k", 1500),
        ("2 K tokens", 2000),
        ("150 words", 200),
        ("200-300", 200),
        ("My answer would have 42", 42),
        ("0", 0),
        ("3 kinds", 3),
        ("I cannot know", 0),
        ("99999999999", 0),
        ("", 0),
    ],
)
def test_replies_are_read(text: str, tokens: int) -> None:
    """The first number that is a length; 0 where there is none."""
    assert parse_length(text) == tokens


class ScriptedAsk:
    """A model that replies what a test has written down."""

    def __init__(self, replies: list[Reply]) -> None:
        self.replies = replies
        self.prompts: list[tuple[str, int]] = []

    def ask(self, prompt: str, max_tokens: int) -> Reply:
        self.prompts.append((prompt, max_tokens))
        return self.replies.pop(0)


def test_asking_has_a_bill() -> None:
    """Each question counts, whether it brought a length or not."""
    ask = ScriptedAsk(
        [
            Reply("250", 40, 2, 0.5),
            Reply("no idea", 40, 3, 0.25),
            Reply("", seconds=1.0, error="no server answers"),
        ]
    )
    asker = LengthAsker(ask)
    assert [asker.length_of("Write a poem.") for _ in range(3)] == [250, 0, 0]
    # The question comes last, so that the instruction's KV is shared.
    assert ask.prompts[0] == ("Write a poem." + QUESTION, MAX_REPLY_TOKENS)
    cost = asker.cost
    assert (cost.num_asked, cost.num_failed, cost.num_unclear) == (3, 1, 1)
    assert (cost.prompt_tokens, cost.output_tokens, cost.seconds) == (80, 5, 1.75)


class CountingPredictor(ConstantLength):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(50)
        self.num_asked = 0

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        self.num_asked += 1
        return super().predict(facts, num_done)


def test_the_book_asks_seldom() -> None:
    """An answer of 49 tokens within its bound, looked at with each token: few asks."""
    predictor = CountingPredictor()
    book = LengthBook(predictor)
    book.entered("r", FREE)
    for done in range(49):
        assert book.prediction("r", done) == LengthPrediction(50, 50, 50)
    assert predictor.num_asked <= 4


def test_the_book_scores_first_predictions() -> None:
    """What was predicted before the first token is compared with the end."""
    book = LengthBook(ConstantLength(50))
    for rid, length in enumerate([40, 50, 70]):
        book.entered(rid, FREE)
        book.prediction(rid, length - 1)
        book.finished(rid, length)
    book.entered("aborted", FREE)
    book.left("aborted")
    book.finished("never entered", 9)
    score = book.score()
    assert score.num_answers == 3
    assert score.coverage == pytest.approx(2 / 3)
    assert score.mean_error_tokens == pytest.approx(10.0)
    assert score.mean_lower_tokens == 50.0
    assert score.mean_output_tokens == pytest.approx(160 / 3)
