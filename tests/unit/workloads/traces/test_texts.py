"""Readers of texts give typed records, and name the record that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.loogle import read_loogle
from sgl_tiered_workloads.traces.mt_bench import read_mt_bench
from sgl_tiered_workloads.traces.problems import read_human_eval, read_mbpp
from sgl_tiered_workloads.traces.react import (
    ReactStep,
    read_hotpot_questions,
    read_react_prompts,
    read_react_sessions,
)
from sgl_tiered_workloads.traces.sharegpt import ChatText, read_sharegpt_texts
from sgl_tiered_workloads.traces.tau_bench import read_tau_bench
from sgl_tiered_workloads.traces.texts import Message, Question
from sgl_tiered_workloads.traces.wikitext import read_wikitext

from tests.unit.workloads.sample_support import (
    HOTPOT,
    HUMAN_EVAL,
    LOOGLE,
    MBPP,
    MT_BENCH,
    REACT,
    SHAREGPT_TEXTS,
    TAU_BENCH,
    WIKITEXT,
    write_json,
    write_lines,
    write_text,
)


def test_loogle_documents_have_their_questions_or_their_summary(tmp_path: Path) -> None:
    """The Python literal becomes questions; the word none becomes nothing."""
    asked, summed = read_loogle(write_lines(tmp_path / "l", LOOGLE))
    assert asked.title == "Towers"
    assert len(asked.questions) == 7
    assert asked.questions[2] == Question("Which tower is number 2?", "the tall one")
    assert asked.summary == ""
    assert summed.questions == ()
    assert summed.summary == "Lamps are bright."


def test_loogle_evaluates_literals_only(tmp_path: Path) -> None:
    """An expression in the data is an error and is not run."""
    marker = tmp_path / "ran"
    code = f"[open({str(marker)!r}, 'w')]"
    path = write_lines(tmp_path / "l", [{**LOOGLE[0], "qa_pairs": code}])
    with pytest.raises(TraceError, match="no Python list"):
        read_loogle(path)
    assert not marker.exists()


def test_react_sessions_keep_steps_in_order(tmp_path: Path) -> None:
    """A session is its question and what was thought and seen."""
    run = read_react_sessions(write_json(tmp_path / "r", REACT))
    assert run.few_shot.startswith("Solve it")
    assert [len(session.steps) for session in run.sessions] == [2, 1]
    assert run.sessions[1].steps[0] == ReactStep("Finish[because]", "Obs: no")


def test_prompts_and_questions_of_react_are_read(tmp_path: Path) -> None:
    """Prompts come by name, HotpotQA's questions with their answers."""
    prompts = read_react_prompts(write_json(tmp_path / "p", {"webthink": "Question"}))
    assert prompts == {"webthink": "Question"}
    assert read_hotpot_questions(write_json(tmp_path / "h", HOTPOT)) == (
        Question("Who?", "she"),
    )


def test_tau_bench_messages_carry_their_calls(tmp_path: Path) -> None:
    """A call without content is its JSON; roles keep their order."""
    (talk,) = read_tau_bench(write_json(tmp_path / "t", TAU_BENCH))
    assert talk.name == "task3.trial1"
    assert [m.role for m in talk.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert talk.messages[2].text == '[{"name": "book", "arguments": "{}"}]'


def test_programming_tasks_have_prompt_and_solution(tmp_path: Path) -> None:
    """HumanEval asks with code, MBPP with words and tests."""
    human = read_human_eval(write_lines(tmp_path / "h", HUMAN_EVAL))
    assert (human[1].name, human[1].prompt) == ("HumanEval/1", "def add_1(a, b):\n")
    mbpp = read_mbpp(write_lines(tmp_path / "m", MBPP))
    assert mbpp[2].name == "MBPP/2"
    assert mbpp[2].prompt == "Write a function that adds 2.\nassert f(0) == 2"
    assert mbpp[2].solution == "def f(x):\n    return x + 2"


def test_wikitext_articles_begin_at_first_level_titles(tmp_path: Path) -> None:
    """A part's title belongs to its article."""
    lamp, tea = read_wikitext(write_text(tmp_path / "w", WIKITEXT, zipped=True))
    assert (lamp.title, tea.title) == ("Lighthouse", "Tea ( drink )")
    assert "= = Use = =" in lamp.text
    assert tea.text.strip() == "Leaves in hot water ."


def test_mt_bench_turns_are_user_messages(tmp_path: Path) -> None:
    """A question is two messages of the user."""
    (talk,) = read_mt_bench(write_lines(tmp_path / "m", MT_BENCH))
    assert talk.name == "q81"
    assert talk.messages == (
        Message("user", "Write a poem."),
        Message("user", "Make it longer."),
    )


def test_sharegpt_texts_take_lengths_as_text_or_number(tmp_path: Path) -> None:
    """The published file writes lengths as strings."""
    assert read_sharegpt_texts(write_json(tmp_path / "s", SHAREGPT_TEXTS)) == (
        ChatText("How are lamps made?", 12),
        ChatText("And towers?", 3),
    )


BROKEN: list[tuple[Callable[[Path], Any], Any, str]] = [
    (read_loogle, {**LOOGLE[0], "qa_pairs": "['no pair']"}, "lacks Q or A"),
    (read_loogle, {"title": "x"}, "'input' is missing"),
    (read_human_eval, {"task_id": 1}, "should be a string"),
    (read_mbpp, {**MBPP[0], "test_list": [3]}, "something else than texts"),
    (read_mt_bench, {"question_id": 1, "turns": []}, "no list of texts"),
]


@pytest.mark.parametrize(("read", "record", "problem"), BROKEN)
def test_a_bad_line_is_named(
    tmp_path: Path, read: Callable[[Path], Any], record: Any, problem: str
) -> None:
    """Each fault of a line names it."""
    with pytest.raises(TraceError, match=problem) as caught:
        read(write_lines(tmp_path / "bad", [record]))
    assert caught.value.line == 1


BROKEN_FILES: list[tuple[Callable[[Path], Any], Any, str]] = [
    (read_sharegpt_texts, [], "not a JSON list with records"),
    (read_sharegpt_texts, {"input": "x"}, "not a JSON list with records"),
    (read_sharegpt_texts, [3], "item 0 is not an object"),
    (read_sharegpt_texts, [SHAREGPT_TEXTS[0], {"input": "x"}], "item 1: the field"),
    (read_tau_bench, [{**TAU_BENCH[0], "traj": []}], "no assistant speaks"),
    (
        read_tau_bench,
        [{**TAU_BENCH[0], "traj": [{"role": "judge", "content": "x"}]}],
        "item 0: the role 'judge' is unknown",
    ),
    (read_react_sessions, [], "not a JSON object"),
    (read_react_sessions, {"few_shot": "", "sessions": []}, "no sessions"),
    (
        read_react_sessions,
        {"few_shot": "", "sessions": [{"question": "x", "steps": []}]},
        "no step",
    ),
    (read_react_prompts, {"a": 1}, "should be a string"),
    (read_hotpot_questions, [{"question": "x"}], "'answer' is missing"),
]


@pytest.mark.parametrize(("read", "value", "problem"), BROKEN_FILES)
def test_a_bad_item_is_named(
    tmp_path: Path, read: Callable[[Path], Any], value: Any, problem: str
) -> None:
    """Each fault of a file without lines names the item."""
    with pytest.raises(TraceError, match=problem):
        read(write_json(tmp_path / "bad", value))


def test_a_cut_json_file_and_a_foreign_text_are_named(tmp_path: Path) -> None:
    """Half a file and a text without titles are trace errors."""
    with pytest.raises(TraceError, match="not JSON"):
        read_tau_bench(write_text(tmp_path / "cut", '[{"task_id": 1'))
    with pytest.raises(TraceError, match="before the first title"):
        read_wikitext(write_text(tmp_path / "novel", "It was a dark night.\n"))
    with pytest.raises(TraceError, match="no articles"):
        read_wikitext(write_text(tmp_path / "empty", ""))
