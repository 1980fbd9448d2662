"""Answer lengths from SGLang's requests."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_tiered.engines.sglang.lengths import LengthReader, length_facts
from sgl_tiered.policies.length.base import LengthFacts, LengthPrediction
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.policies.length.online import OnlineLengths


def request(
    rid: str = "r",
    num_done: int = 0,
    reason: str | None = None,
    custom: Any = None,
    **names: str,
) -> SimpleNamespace:
    """Return as much of SGLang's ``Req`` as is read."""
    output = list(range(num_done))
    finished = None
    if reason is not None:
        finished = SimpleNamespace(to_json=lambda: {"type": reason})
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * 12,
        # SGLang may have computed a token more than the answer has.
        output_ids=[*output, 0] if reason else output,
        output_ids_through_stop=output,
        finished_reason=finished,
        finished=lambda: finished is not None,
        sampling_params=SimpleNamespace(max_new_tokens=200, custom_params=custom),
        extra_key=names.get("extra_key"),
        cache_salt=names.get("cache_salt"),
    )


def test_facts_are_what_the_request_says() -> None:
    """Lengths and allowance, and what the client tells of group and answer."""
    said = {"tiered": {"output_len": 80, "group": "chat"}}
    assert length_facts(request()) == LengthFacts(12, 200)
    assert length_facts(request(custom=said)) == LengthFacts(12, 200, "\0\0chat", 80)
    flat = length_facts(request(custom={"tiered_output_len": 70}))
    assert flat.said_tokens == 70


def test_groups_of_tenants_never_meet() -> None:
    """The same name under another salt or adapter is another group."""
    said = {"tiered": {"group": "chat"}}
    groups = {
        length_facts(request(custom=said, **names)).group
        for names in (
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"extra_key": "a"},
        )
    }
    assert len(groups) == 4


@pytest.mark.parametrize(
    "custom",
    [
        "text",
        {"tiered": 3},
        {"tiered": {"output_len": "many", "group": 7}},
        {"tiered": {"output_len": True}},
        {"tiered": {"output_len": -4}},
        {"tiered_output_len": 1.5},
    ],
)
def test_nonsense_counts_as_not_said(custom: Any) -> None:
    """A client cannot stop the scheduler with a wrong value."""
    assert length_facts(request(custom=custom)) == LengthFacts(12, 200)


def test_every_answer_that_ends_is_learned_from() -> None:
    """Also one whose length nobody asked for before; without tokens behind the stop."""
    reader = LengthReader(LengthBook(OnlineLengths()))
    for number in range(40):
        reader.released(request(f"r{number}", 60, reason="stop"))
    assert reader.book.score().num_answers == 40
    assert reader.book.score().mean_output_tokens == 60.0
    found = reader.prediction(request("next"))
    assert 58 <= found.lower <= found.upper <= 63


def test_aborted_and_retracted_requests_teach_nothing() -> None:
    """One is forgotten, the other one is still under way."""
    reader = LengthReader(LengthBook(OnlineLengths()))
    for rid in ("aborted", "retracted"):
        reader.prediction(request(rid))
    reader.released(request("aborted", 5, reason="abort"))
    reader.released(request("retracted", 5))
    assert "aborted" not in reader.book
    assert "retracted" in reader.book
    assert reader.book.score().num_answers == 0


def test_predictions_follow_the_request() -> None:
    """With the tokens that are out, also for one that is met in the middle."""
    reader = LengthReader(LengthBook(ConstantLength(50)))
    req = request("r", 10)
    assert reader.prediction(req) == LengthPrediction(50, 50, 50)
    req.output_ids = [0] * 80
    assert reader.prediction(req) == LengthPrediction(81, 81, 81)
    assert reader.prediction(request("late", 60)) == LengthPrediction(61, 61, 61)


def test_stats_are_plain_values() -> None:
    """They go out as JSON, with the experts' weights where there are any."""
    reader = LengthReader(LengthBook(OnlineLengths()))
    reader.released(request("r", 60, reason="length"))
    stats = json.loads(json.dumps(reader.stats()))
    assert stats["predictor"] == "online"
    assert stats["num_answers"] == 1
    assert sum(stats["weights"].values()) == pytest.approx(1.0)
