"""ShareGPT requests with text, as LMBenchmark prepares them.

One JSON list; each item has ``input`` (the whole prompt) and ``output_length`` (tokens
of the original answer, as text or number).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sgl_tiered_workloads.traces.files import json_list

__all__ = ["ChatText", "read_sharegpt_texts"]


@dataclass(frozen=True, slots=True)
class ChatText:
    """One request.

    Attributes:
        prompt: whole text.
        num_output_tokens: of the original answer, at least 1.
    """

    prompt: str
    num_output_tokens: int


def read_sharegpt_texts(path: Path) -> tuple[ChatText, ...]:
    """Read the requests in file order (round-robin over users).

    Raises:
        TraceError: the file is not in this format.
    """
    return tuple(
        ChatText(row.text("input"), row.integer("output_length", 1))
        for row in json_list(Path(path))
    )
