"""LooGLE: long documents with questions.

One JSON object per line: ``input`` (the document), ``title``, ``qa_pairs`` and
``output``. ``qa_pairs`` is a Python literal in a string, a list of {"Q", "A", ...}, or
the word none for the summarisation task, whose ``output`` is the summary.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.traces.files import Row, json_rows
from sgl_tiered_workloads.traces.texts import Document, Question

__all__ = ["read_loogle"]

_NONE = "none"


def read_loogle(path: Path) -> tuple[Document, ...]:
    """Read the documents of one task with all their questions.

    Raises:
        TraceError: the file is not in this format.
    """
    return tuple(
        Document(row.text("title"), row.text("input"), _questions(row), _summary(row))
        for row in json_rows(Path(path))
    )


def _summary(row: Row) -> str:
    output = row.text("output")
    return "" if output.lower() == _NONE else output


def _questions(row: Row) -> tuple[Question, ...]:
    literal = row.text("qa_pairs")
    if literal.lower() == _NONE:
        return ()
    try:
        pairs = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pairs = None
    if not isinstance(pairs, list):
        raise row.wrong("'qa_pairs' is no Python list", "give LooGLE's own file")
    return tuple(_question(row, pair) for pair in pairs)


def _question(row: Row, pair: Any) -> Question:
    if not isinstance(pair, dict) or "Q" not in pair or "A" not in pair:
        raise row.wrong("a pair of 'qa_pairs' lacks Q or A", "remove that pair")
    # The cloze task's answers are a table of masks; its text is as good as any.
    return Question(str(pair["Q"]), str(pair["A"]))
