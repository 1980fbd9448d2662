"""The loads of the cluster bench, and its figures."""

from __future__ import annotations

from collections import Counter

import pytest
from parts.figures import figures, ratio, table
from parts.loads import (
    DOCUMENT_TOKENS,
    LOADS,
    QUESTIONS,
    draw_sessions,
    replayed,
    shared_documents,
)

from tests.unit.benchmarks.played import answer_all


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_as_many_requests_as_asked(name: str) -> None:
    """At most the last session goes beyond; a seed gives the same prompts again."""
    first = answer_all(draw_sessions(name, 30, 5))
    sessions = {record.key.rpartition(".")[0] for record in first}
    longest = max(Counter(r.key.rpartition(".")[0] for r in first).values())
    assert 30 <= len(first) < 30 + longest
    assert len(sessions) > 1
    assert [r.prompt for r in answer_all(draw_sessions(name, 30, 5))] == [
        record.prompt for record in first
    ]
    assert answer_all(draw_sessions(name, 30, 6))[0].prompt != first[0].prompt


def test_each_document_is_asked_about_by_as_many_users() -> None:
    """At share ratio 2 every prompt of a document's session comes twice."""
    records = answer_all(shared_documents(3, 2, 5, answer_tokens=1, think_s=0.4))
    prompts = Counter(record.prompt for record in records)
    assert set(prompts.values()) == {2}
    documents = {prompt[:DOCUMENT_TOKENS] for prompt in prompts}
    assert len(documents) == 3
    assert len(prompts) == 3 * QUESTIONS


def test_a_replay_sends_the_recorded_prompts() -> None:
    """Whatever is answered the second time, prompts and lengths are the first run's."""
    told = answer_all(draw_sessions("sharegpt", 10, 5))
    again = answer_all(replayed(told))
    assert [(r.key, r.prompt, len(r.output)) for r in again] == [
        (r.key, r.prompt, len(r.output)) for r in told
    ]


def test_figures_of_a_cell() -> None:
    """TTFT runs from the start, TPOT over later tokens, JCT to the last one."""
    records = answer_all(draw_sessions("loogle", 5, 5))
    told = figures(records)
    assert told["ttft_mean_s"] == pytest.approx(0.5)
    assert told["ttft_p99_s"] == pytest.approx(0.5)
    assert told["tpot_mean_s"] == pytest.approx(0.1)
    last_s = 0.5 + 0.1 * (len(records[0].output) - 1)
    assert told["jct_mean_s"] == pytest.approx(last_s)
    assert told["cached_share"] == 0.0
    assert ratio(records, records, "jct_mean_s") == 1.0
    lines = list(table({("loogle", "PD"): records}))
    assert len(lines) == 2
    assert "PD" in lines[1]
