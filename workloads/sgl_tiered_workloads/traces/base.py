"""What every trace becomes: requests whose prompts are runs of hashed blocks.

A production trace holds no text. Its prompts are lists of block ids, where an id stands
for a whole prefix up to the end of that block; equal ids mean equal tokens. Traces of
lengths only have no ids. Token ids are made from block ids on demand, so that a day of
trace stays small in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Int64s", "Trace", "TraceError", "TraceRequest"]

Int64s = npt.NDArray[np.int64]


class TraceError(ValueError):
    """A trace file cannot be used: says which file, which line, what and what to do."""

    def __init__(self, path: Path, line: int | None, problem: str, remedy: str) -> None:
        where = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}; {remedy}.")
        self.path = path
        self.line = line


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds from the start of the trace.
        num_prompt_tokens: length of the prompt, at least 1.
        num_output_tokens: length of the answer, at least 1.
        block_ids: int64 [ceil(num_prompt_tokens / block_tokens)] or shorter, unique
            in the whole trace per prefix; empty where the trace has none. A last id of
            a partial block stands for that partial block.
        session: conversation that it belongs to; -1 if it stands alone.
        think_s: seconds between the previous answer of its session and this request;
            NaN where the trace does not say.
        serial: its number in the source file; names it where tokens are made that
            no block id covers.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: Int64s
    session: int = -1
    think_s: float = float("nan")
    serial: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: of the source, for reports.
        block_tokens: tokens of one block; 0 where the trace has no ids.
        requests: in order of arrival.
    """

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
