"""Recorded traces and conversations are replayed as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.arrivals import OpenLoop
from sgl_tiered_workloads.params import WorkloadError
from sgl_tiered_workloads.registry import make_workload
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.workload import Workload

from tests.unit.workloads.sample_support import (
    AZURE,
    HUMAN_EVAL,
    LENGTHS,
    MBPP,
    MOONCAKE,
    MT_BENCH,
    TAU_BENCH,
    write_json,
    write_lines,
    write_servegen,
    write_text,
)

VOCAB = 5000
ANSWER = 6

WEKA = [
    {
        "id": "c",
        "start_s": 10.0,
        "block_size": 8,
        "requests": [
            {"t": 0.0, "in": 20, "out": 4, "lcp": 0, "new": [[1, 2]], "think": 0},
            {"t": 9.0, "in": 30, "out": 4, "lcp": 2, "new": [[3, 1]], "think": 3.0},
        ],
    },
    {
        "id": "d",
        "start_s": 12.0,
        "block_size": 8,
        "requests": [
            {"t": 0.0, "in": 17, "out": 2, "lcp": 0, "new": [[1, 2]], "think": 0},
        ],
    },
]


def sent(workload: Workload) -> list[PlannedRequest]:
    requests = []
    for session in workload.as_sessions():
        while not session.finished:
            requests.append(session.next_request())
            session.record_answer((ANSWER,) * requests[-1].max_new_tokens)
    return requests


def replayed(path: Path, kind: str, **params: Any) -> Workload:
    return make_workload(
        "trace", {"format": kind, "path": str(path), **params}, 1, VOCAB
    )


def test_a_trace_leaves_at_its_own_times_with_its_own_prefixes(tmp_path: Path) -> None:
    """Equal block ids are equal tokens; times are stretched; lengths are kept."""
    path = write_lines(tmp_path / "m", MOONCAKE)
    workload = replayed(path, "mooncake", arrivals={"process": "trace", "slowdown": 2})
    requests = sent(workload)
    assert workload.arrivals == OpenLoop((0.0, 2.0, 4.0, 6.0, 8.0, 10.0))
    assert {len(r.prompt) for r in requests} == {1124}
    # Ids are [0, 10 + n % 3, 20 + n]: all share one block, every third one two.
    assert len({r.prompt[:512] for r in requests}) == 1
    assert requests[0].prompt[:1024] == requests[3].prompt[:1024]
    assert requests[0].prompt[:1024] != requests[1].prompt[:1024]
    assert len({r.prompt[1024:] for r in requests}) == 6


def test_a_shrunk_trace_shares_as_before(tmp_path: Path) -> None:
    """In blocks of 32 tokens the same requests share the same blocks."""
    path = write_lines(tmp_path / "m", MOONCAKE)
    requests = sent(replayed(path, "mooncake", block_tokens=32, num_requests=4))
    assert [len(r.prompt) for r in requests] == [71] * 4
    assert requests[0].prompt[:64] == requests[3].prompt[:64]
    assert requests[0].prompt[:64] != requests[1].prompt[:64]
    with pytest.raises(WorkloadError, match="at most the trace's own 512"):
        replayed(path, "mooncake", block_tokens=1024)


def test_causal_conversations_arrive_once_and_pause_as_recorded(tmp_path: Path) -> None:
    """A conversation starts at its first request; later turns wait and think."""
    path = write_lines(tmp_path / "w", WEKA)
    arrivals = {"process": "trace", "slowdown": 2.0}
    workload = replayed(path, "weka", causal=True, arrivals=arrivals)
    assert workload.arrivals == OpenLoop((0.0, 4.0))
    assert [session.num_turns for session in workload.sessions] == [2, 1]
    session = workload.sessions[0]
    first = session.next_request()
    session.record_answer([1])
    assert session.think_s == 6.0
    second = session.next_request()
    assert second.prompt[:16] == first.prompt[:16]
    assert (len(first.prompt), len(second.prompt)) == (20, 30)


def test_a_context_limit_cuts_conversations(tmp_path: Path) -> None:
    """A limit below every request leaves nothing, which is said."""
    path = write_lines(tmp_path / "w", WEKA)
    assert replayed(path, "weka", max_prompt_tokens=20).num_requests == 2
    with pytest.raises(WorkloadError, match="longer than some request"):
        replayed(path, "weka", max_prompt_tokens=3)


def test_sampling_keeps_a_part_of_the_sessions(tmp_path: Path) -> None:
    """One session in three of six single ones is two."""
    lines = [
        {**line, "hash_ids": [0, 50 + n, 60 + n]} for n, line in enumerate(MOONCAKE)
    ]
    # With few requests even block 0 is rare, so all are one session: drop it.
    for line in lines:
        line["hash_ids"][0] = 70 + line["hash_ids"][1]
    path = write_lines(tmp_path / "m", lines)
    assert replayed(path, "mooncake", keep_one_in=3).num_requests == 2


def test_traces_of_lengths_share_nothing(tmp_path: Path) -> None:
    """Azure has times, arXiv has none; prompts are random and of the right length."""
    azure = replayed(write_text(tmp_path / "a", AZURE), "azure")
    assert [len(r.prompt) for r in sent(azure)] == [40, 60]
    lengths = write_text(tmp_path / "x", LENGTHS)
    arxiv = replayed(lengths, "arxiv")
    assert arxiv.concurrency == 16
    assert [r.max_new_tokens for r in sent(arxiv)] == [5, 4, 6, 3, 1]
    with pytest.raises(WorkloadError, match="has no times"):
        replayed(lengths, "arxiv", arrivals={"process": "trace"})
    with pytest.raises(WorkloadError, match="format must be one of mooncake"):
        replayed(lengths, "vidur")


def test_sharegpt_turns_grow_to_the_recorded_lengths(tmp_path: Path) -> None:
    """With answers as long as recorded, each prompt is as long as recorded."""
    params = {"lengths": str(write_text(tmp_path / "l", LENGTHS))}
    workload = make_workload("sharegpt", params, 1, VOCAB)
    requests = sent(workload)
    assert sorted(len(r.prompt) for r in requests) == [10, 12, 15, 20, 30]
    by_key = {r.key: r for r in requests}
    first, second = by_key["s0.t0"], by_key["s0.t1"]
    assert second.prompt[:15] == (*first.prompt, *(ANSWER,) * 5)


def test_sharegpt_sessions_end_at_the_context_limit(tmp_path: Path) -> None:
    """Turns that no longer fit are cut; single turns are LayerKV's use of it."""
    base = {"lengths": str(write_text(tmp_path / "l", LENGTHS))}
    cut = make_workload("sharegpt", {**base, "max_tokens": 24}, 1, VOCAB)
    assert cut.num_requests == 4
    single = make_workload("sharegpt", {**base, "max_turns": 1}, 1, VOCAB)
    assert single.num_requests == 3
    with pytest.raises(WorkloadError, match="long enough for a session"):
        make_workload("sharegpt", {**base, "max_tokens": 9}, 1, VOCAB)
    with pytest.raises(WorkloadError, match="at most 3"):
        make_workload("sharegpt", {**base, "num_sessions": 4}, 1, VOCAB)


def test_an_agent_speaks_where_the_assistant_spoke(tmp_path: Path) -> None:
    """Two turns; the tool's answer opens the second after the tool's time."""
    params = {
        "path": str(write_json(tmp_path / "t", TAU_BENCH)),
        "think_s": 4.0,
        "tool_s": 0.5,
    }
    (session,) = make_workload("tau_bench", params, 1, VOCAB).sessions
    assert session.num_turns == 2
    assert session.think_s == 0.0
    first = session.next_request()
    session.record_answer([ANSWER])
    assert session.think_s == 0.5
    assert session.next_request().prompt[: len(first.prompt)] == first.prompt


def test_questions_of_two_turns_carry_the_answer(tmp_path: Path) -> None:
    """The second MT-bench prompt holds the first and the model's answer."""
    params = {"path": str(write_lines(tmp_path / "m", MT_BENCH)), "answer_tokens": 2}
    first, second = sent(make_workload("mt_bench", params, 1, VOCAB))
    carried = (*first.prompt, ANSWER, ANSWER)
    assert second.prompt[: len(carried)] == carried


def test_problems_share_their_solved_examples(tmp_path: Path) -> None:
    """The first tasks are the template of all others; none are asked again."""
    path = str(write_lines(tmp_path / "m", MBPP))
    requests = sent(make_workload("problems", {"mbpp": path, "num_shots": 2}, 1, VOCAB))
    assert [r.key for r in requests] == ["MBPP/2", "MBPP/3", "MBPP/4"]
    # Examples are two thirds of each prompt and more.
    shared = len(requests[0].prompt) * 2 // 3
    assert len({r.prompt[:shared] for r in requests}) == 1
    with pytest.raises(WorkloadError, match="num_shots must be below 5"):
        make_workload("problems", {"mbpp": path, "num_shots": 5}, 1, VOCAB)


def test_problems_can_be_asked_cold(tmp_path: Path) -> None:
    """Without examples HumanEval is 164 prompts that share little; here four."""
    path = str(write_lines(tmp_path / "h", HUMAN_EVAL))
    params = {"human_eval": path, "num_shots": 0, "num_requests": 3}
    assert [r.key for r in sent(make_workload("problems", params, 1, VOCAB))] == [
        "HumanEval/0",
        "HumanEval/1",
        "HumanEval/2",
    ]


def test_a_service_without_requests_in_that_time_is_refused(tmp_path: Path) -> None:
    """ServeGen's clients may all be silent."""
    params = {"path": str(write_servegen(tmp_path / "s")), "duration_s": 600}
    with pytest.raises(WorkloadError, match="a time in which a client sends"):
        make_workload("servegen", params, 1, VOCAB)
