"""The WEKA reader expands deltas as the format says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.weka import read_weka


def ask(
    t: float, tokens: int, lcp: int, new: list[list[int]], **more: Any
) -> dict[str, Any]:
    return {"t": t, "in": tokens, "out": 3, "lcp": lcp, "new": new, **more}


def talk(start_s: float, *requests: dict[str, Any], block: int = 4) -> dict[str, Any]:
    return {
        "id": f"c{start_s:g}",
        "start_s": start_s,
        "block_size": block,
        "requests": list(requests),
    }


FIRST = talk(
    100.0,
    ask(0.0, 9, 0, [[1, 2]], think=0),
    ask(5.0, 18, 2, [[3, 2]], think=2.5),
    ask(6.0, 13, 1, [[7, 2]], agent="agent_1", think=None),
    ask(7.0, 17, 3, [[9, 1]], agent="agent_1"),
    ask(8.0, 23, 4, [[5, 1]]),
)
SECOND = talk(50.0, ask(0.0, 4, 0, [[1, 1]]), ask(53.0, 30, 0, [[1, 2], [4, 5]]))


def write(path: Path, *conversations: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(c) + "\n" for c in conversations))
    return path


def test_deltas_expand_against_the_same_agents_request_before(tmp_path: Path) -> None:
    """An agent's first request continues the main agent's, its next its own."""
    trace = read_weka(write(tmp_path / "w", FIRST))
    assert trace.block_tokens == 4
    assert [r.block_ids.tolist() for r in trace.requests] == [
        [1, 2],
        [1, 2, 3, 4],
        [1, 7, 8],
        [1, 7, 8, 9],
        [1, 2, 3, 4, 5],
    ]
    assert {r.session for r in trace.requests} == {0}


def test_conversations_merge_by_time_with_ids_of_their_own(tmp_path: Path) -> None:
    """Requests come in order of arrival; no id is in two conversations."""
    trace = read_weka(write(tmp_path / "w", FIRST, SECOND))
    times = [r.arrival_s for r in trace.requests]
    assert times == sorted(times)
    assert times[:3] == [50.0, 100.0, 103.0]
    by_session: dict[int, set[int]] = {0: set(), 1: set()}
    for request in trace.requests:
        by_session[request.session].update(request.block_ids.tolist())
    assert by_session[0].isdisjoint(by_session[1])
    assert len(by_session[1]) == 7
    assert sorted(r.serial for r in trace.requests) == list(range(7))


def test_think_time_is_unknown_where_the_file_has_none(tmp_path: Path) -> None:
    """0, null and absent mean not recorded, and no answer counts as one token."""
    silent = talk(0.0, {**ask(0.0, 4, 0, [[1, 1]]), "out": 0})
    trace = read_weka(write(tmp_path / "w", FIRST, silent))
    think = [r.think_s for r in trace.requests if r.session == 0]
    assert think[1] == 2.5
    assert all(math.isnan(t) for t in (think[0], *think[2:]))
    assert trace.requests[0].num_output_tokens == 1


def test_a_conversation_stops_at_its_first_too_long_request(tmp_path: Path) -> None:
    """Later requests go too, even short ones; other conversations stay whole."""
    trace = read_weka(write(tmp_path / "w", FIRST, SECOND), max_prompt_tokens=17)
    assert [(r.session, r.num_prompt_tokens) for r in trace.requests] == [
        (1, 4),
        (0, 9),
    ]


def test_conversations_without_a_request_are_refused(tmp_path: Path) -> None:
    """Nobody could replay them. What a limit leaves nothing of is the caller's."""
    with pytest.raises(TraceError, match="it has no requests"):
        read_weka(write(tmp_path / "w", talk(0.0)))
    assert not read_weka(write(tmp_path / "v", FIRST), max_prompt_tokens=1).requests


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        (talk(0.0, ask(0.0, 8, 1, [[1, 1]])), "keeps 1 ids of 0"),
        (talk(0.0, ask(0.0, 8, 0, [[1, 3]])), "3 block ids instead of 2"),
        (talk(0.0, ask(0.0, 8, 0, [[1]])), "runs are"),
        (talk(0.0, ask(0.0, 8, 0, [[1, 0], [1, 2]])), "runs are"),
        (
            talk(0.0, ask(2.0, 4, 0, [[1, 1]]), ask(1.0, 4, 1, [])),
            "'t' goes back",
        ),
        (talk(0.0, block=8), "blocks of 8 tokens after blocks of 4"),
        ({"id": "x", "start_s": 0.0, "block_size": 4}, "'requests' is missing"),
        ({**talk(0.0), "requests": [3]}, "a list of objects"),
        (talk(-1.0), "at least 0"),
    ],
)
def test_a_bad_conversation_is_named(
    tmp_path: Path, conversation: dict[str, Any], problem: str
) -> None:
    """Each fault names the file and the line of its conversation."""
    path = write(tmp_path / "w", FIRST, conversation)
    with pytest.raises(TraceError, match=problem) as caught:
        read_weka(path)
    assert caught.value.line == 2
