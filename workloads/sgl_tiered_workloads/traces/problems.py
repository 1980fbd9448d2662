"""Programming tasks: HumanEval and MBPP, one JSON object per line."""

from __future__ import annotations

from pathlib import Path

from sgl_tiered_workloads.traces.files import Row, json_rows
from sgl_tiered_workloads.traces.texts import Problem

__all__ = ["read_human_eval", "read_mbpp"]


def read_human_eval(path: Path) -> tuple[Problem, ...]:
    """Read ``task_id``, ``prompt`` and ``canonical_solution``.

    Raises:
        TraceError: the file is not in this format.
    """
    return tuple(
        Problem(row.text("task_id"), row.text("prompt"), row.text("canonical_solution"))
        for row in json_rows(Path(path))
    )


def read_mbpp(path: Path) -> tuple[Problem, ...]:
    """Read ``task_id``, ``text``, ``code`` and ``test_list``.

    The prompt is the text with its tests, as MBPP is asked.

    Raises:
        TraceError: the file is not in this format.
    """
    return tuple(_mbpp(row) for row in json_rows(Path(path)))


def _mbpp(row: Row) -> Problem:
    tests = row.items("test_list")
    if not all(isinstance(test, str) for test in tests):
        raise row.wrong("'test_list' has something else than texts", "repair it")
    prompt = "\n".join([row.text("text"), *tests])
    return Problem(f"MBPP/{row.integer('task_id', 0)}", prompt, row.text("code"))
