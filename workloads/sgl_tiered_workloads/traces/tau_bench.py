"""tau-bench: recorded conversations of a tool-calling agent with a simulated user.

One JSON list; each item has ``task_id``, ``trial`` and ``traj``, a list of messages
with ``role``, ``content`` (null beside calls) and for the assistant ``tool_calls``.
"""

from __future__ import annotations

import json
from pathlib import Path

from sgl_tiered_workloads.traces.files import Row, json_list
from sgl_tiered_workloads.traces.texts import Conversation, Message

__all__ = ["read_tau_bench"]

_ROLES = ("system", "user", "assistant", "tool")


def read_tau_bench(path: Path) -> tuple[Conversation, ...]:
    """Read the conversations in file order.

    Raises:
        TraceError: the file is not in this format.
    """
    return tuple(_conversation(row) for row in json_list(Path(path)))


def _conversation(row: Row) -> Conversation:
    messages = tuple(
        _message(Row(row.path, row.line, message.fields, row.item))
        for message in row.rows("traj")
    )
    if not any(message.role == "assistant" for message in messages):
        raise row.wrong("no assistant speaks in it", "remove that trajectory")
    name = f"task{row.integer('task_id', 0)}.trial{row.integer('trial', 0)}"
    return Conversation(name, messages)


def _message(row: Row) -> Message:
    role = row.text("role")
    if role not in _ROLES:
        raise row.wrong(f"the role {role!r} is unknown", f"use {', '.join(_ROLES)}")
    text = "" if row.fields.get("content") is None else row.text("content")
    calls = row.fields.get("tool_calls")
    if calls:
        asked = [call.fields.get("function") for call in row.rows("tool_calls")]
        text += json.dumps(asked)
    return Message(role, text)
