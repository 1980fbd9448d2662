"""MT-bench: questions of two turns, one JSON object per line."""

from __future__ import annotations

from pathlib import Path

from sgl_tiered_workloads.traces.files import json_rows
from sgl_tiered_workloads.traces.texts import Conversation, Message

__all__ = ["read_mt_bench"]


def read_mt_bench(path: Path) -> tuple[Conversation, ...]:
    """Read ``question_id`` and ``turns``; each conversation is its user messages.

    Raises:
        TraceError: the file is not in this format.
    """
    found = []
    for row in json_rows(Path(path)):
        turns = row.items("turns")
        if not turns or not all(isinstance(turn, str) for turn in turns):
            raise row.wrong("'turns' is no list of texts", "repair that record")
        messages = tuple(Message("user", turn) for turn in turns)
        found.append(Conversation(f"q{row.integer('question_id', 0)}", messages))
    return tuple(found)
