"""The papers' workloads have the shapes that the papers describe."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from sgl_tiered_workloads.generators.react import few_shots
from sgl_tiered_workloads.params import WorkloadError
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.workload import Workload

from tests.unit.workloads.sample_support import (
    LENGTHS,
    LOOGLE,
    REACT,
    SHAREGPT_TEXTS,
    WIKITEXT,
    write_json,
    write_lines,
    write_text,
)

VOCAB = 5000
ANSWER = 6


def sent(workload: Workload) -> list[PlannedRequest]:
    """Return every request, each answer being as long as asked, of one token."""
    requests = []
    for session in workload.as_sessions():
        while not session.finished:
            requests.append(session.next_request())
            session.record_answer((ANSWER,) * requests[-1].max_new_tokens)
    return requests


def test_text_analysis_picks_templates_at_random_and_bodies_are_new() -> None:
    """128 templates by default, each used about as often, no body twice."""
    workload = make_workload(
        "text_analysis",
        {"num_requests": 1280, "prefix_tokens": 8, "body_tokens": 8},
        1,
        VOCAB,
    )
    requests = sent(workload)
    templates = Counter(request.prompt[:8] for request in requests)
    assert len(templates) == 128
    assert max(templates.values()) < 30
    assert len({request.prompt[8:] for request in requests}) == 1280
    assert all(len(request.prompt) == 16 for request in requests)


def test_text_analysis_has_more_requests_than_templates() -> None:
    """k > n, or the sentence says so."""
    params = {"num_prefixes": 5, "num_requests": 5}
    with pytest.raises(WorkloadError, match=r"num_requests must be .* at least 6"):
        make_workload("text_analysis", params, 1, VOCAB)


def test_system_chat_prepends_one_prompt_to_single_inputs(tmp_path: Path) -> None:
    """All requests share the system prompt; inputs come from texts or lengths."""
    texts = str(write_json(tmp_path / "t", SHAREGPT_TEXTS))
    lengths = str(write_text(tmp_path / "l", LENGTHS))
    for params in ({}, {"texts": texts}, {"lengths": lengths}):
        base = {"num_requests": 20, "system_tokens": 16}
        requests = sent(make_workload("system_chat", {**base, **params}, 1, VOCAB))
        assert len({request.prompt[:16] for request in requests}) == 1
        assert len({request.prompt[16:] for request in requests}) > 1
        if "lengths" in params:
            # Only first turns: later rows hold what was said before.
            assert {len(r.prompt) - 16 for r in requests} <= {10, 12, 15}


def test_chat_sessions_share_the_system_prompt_and_carry_answers() -> None:
    """A later prompt holds the earlier one and its answer."""
    params = {
        "num_sessions": 2,
        "num_turns": 2,
        "system_tokens": 5,
        "first_tokens": 4,
        "user_tokens": 3,
        "answer_tokens": 2,
    }
    a0, a1, b0, _ = sent(make_workload("chat", params, 1, VOCAB))
    assert a0.prompt[:5] == b0.prompt[:5]
    assert a0.prompt[5:] != b0.prompt[5:]
    assert a1.prompt[:11] == (*a0.prompt, ANSWER, ANSWER)
    assert len(a1.prompt) == 14


def test_fixed_lengths_are_layerkvs() -> None:
    """100 requests of one length and 512 output tokens at one per second."""
    workload = make_workload("fixed_lengths", {"prompt_tokens": 128}, 1, VOCAB)
    requests = sent(workload)
    assert len(requests) == 100
    assert {(len(r.prompt), r.max_new_tokens) for r in requests} == {(128, 512)}
    assert 60.0 < requests[-1].start_s < 150.0
    assert len({request.prompt[:16] for request in requests}) == 100


def test_a_length_sweep_repeats_the_same_prompts_in_a_second_pass() -> None:
    """One at a time, every length, and pass two finds pass one's prompts."""
    params = {"prompt_lengths": [8, 32], "num_repeats": 2, "num_passes": 2}
    workload = make_workload("length_sweep", params, 1, VOCAB)
    requests = sent(workload)
    assert workload.concurrency == 1
    assert [len(r.prompt) for r in requests] == [8, 32, 8, 32] * 2
    first, second = requests[:4], requests[4:]
    assert [r.prompt for r in first] == [r.prompt for r in second]
    assert len({r.prompt for r in first}) == 4
    assert [r.key for r in requests[:5]] == [
        "n8.r0.p0",
        "n32.r0.p0",
        "n8.r1.p0",
        "n32.r1.p0",
        "n8.r0.p1",
    ]


def test_longalign_lengths_fill_their_range() -> None:
    """Between 8k and 64k by default; a third in each doubling."""
    params = {"num_requests": 300, "min_tokens": 100, "max_tokens": 800}
    lengths = [
        len(r.prompt) for r in sent(make_workload("longalign", params, 1, VOCAB))
    ]
    assert min(lengths) >= 100
    assert max(lengths) <= 800
    doublings = [sum(low <= n < 2 * low for n in lengths) for low in (100, 200, 400)]
    assert all(70 < count < 130 for count in doublings)


def test_memserves_cut_of_loogle(tmp_path: Path) -> None:
    """The front of each document, five questions, the set as often as shared."""
    params = {
        "loogle": str(write_lines(tmp_path / "l", LOOGLE)),
        "first_tokens": 50,
        "num_questions": 5,
        "share_ratio": 3,
    }
    workload = make_workload("long_document", params, 1, VOCAB)
    requests = sent(workload)
    assert len(workload.sessions) == 3
    assert len(requests) == 15
    assert len({request.prompt[:50] for request in requests}) == 1
    assert sorted(Counter(r.prompt for r in requests).values()) == [3] * 5
    assert {request.max_new_tokens for request in requests} == {3}


def test_questions_do_not_enter_the_next_prompt() -> None:
    """Every prompt of a document is as long as the document and one question."""
    params = {"num_documents": 2, "document_tokens": 40, "question_tokens": 8}
    requests = sent(make_workload("long_document", params, 1, VOCAB))
    assert {len(request.prompt) for request in requests} == {48}
    assert len({request.prompt[:40] for request in requests}) == 2
    assert len({request.prompt for request in requests}) == 10


def test_wikitext_articles_are_documents(tmp_path: Path) -> None:
    """Each article gets invented questions."""
    params = {"wikitext": str(write_text(tmp_path / "w", WIKITEXT))}
    workload = make_workload("long_document", params, 1, VOCAB)
    assert len(workload.sessions) == 2
    assert workload.num_requests == 10


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    """LooGLE's summaries ask nothing."""
    params = {"loogle": str(write_lines(tmp_path / "l", LOOGLE[1:]))}
    with pytest.raises(WorkloadError, match="a file with questions"):
        make_workload("long_document", params, 1, VOCAB)


def test_react_steps_carry_the_models_own_steps_and_the_observations(
    tmp_path: Path,
) -> None:
    """A step's prompt is the one before, its answer, and what was seen."""
    params = {"sessions": str(write_json(tmp_path / "r", REACT)), "tool_s": 1.5}
    workload = make_workload("react", params, 1, VOCAB)
    session = workload.sessions[0]
    first = session.next_request()
    session.record_answer((ANSWER,) * first.max_new_tokens)
    assert session.think_s == 1.5
    second = session.next_request()
    carried = (*first.prompt, *(ANSWER,) * first.max_new_tokens)
    assert second.prompt[: len(carried)] == carried
    assert len(second.prompt) > len(carried)
    assert [s.num_turns for s in workload.sessions] == [2, 1]


def test_few_shots_keep_the_first_examples() -> None:
    """MemServe takes two; none leaves the instructions."""
    assert few_shots(REACT["few_shot"], 1) == "Solve it.\nQuestion: a?\nThought 1: b"
    assert few_shots(REACT["few_shot"], 0) == "Solve it."
    assert few_shots(REACT["few_shot"], 9) == REACT["few_shot"]


def test_invented_agents_take_about_as_many_steps_as_recorded_ones() -> None:
    """Steps average 3.7 within a fifth; all begin with one few-shot prompt."""
    params = {"num_sessions": 600, "few_shot_tokens": 4}
    workload = make_workload("react", params, 1, VOCAB)
    assert workload.num_requests / 600 == pytest.approx(3.7, rel=0.2)
    assert len({s.next_request().prompt[:4] for s in workload.sessions}) == 1
