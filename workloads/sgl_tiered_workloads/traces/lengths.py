"""Data sets of which only the lengths are known: prompt and answer tokens per row.

CSV with at least ``num_prefill_tokens`` and ``num_decode_tokens``, as the Vidur and
Sarathi-Serve repositories publish them for arXiv summarisation and ShareGPT. They have
no arrival times: every request arrives at 0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sgl_tiered_workloads.traces.base import Int64s, Trace, TraceRequest
from sgl_tiered_workloads.traces.files import csv_rows

__all__ = ["read_arxiv_lengths", "read_sharegpt_lengths"]

_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
_NO_IDS: Int64s = np.empty(0, dtype=np.int64)


def read_arxiv_lengths(path: Path) -> Trace:
    """Read lengths of independent requests.

    Raises:
        TraceError: the file is not in this format.
    """
    path = Path(path)
    requests = [
        _request(prompt, output, serial, session=-1)
        for serial, (prompt, output) in enumerate(_pairs(path))
    ]
    return Trace(path.name, 0, tuple(requests))


def read_sharegpt_lengths(path: Path) -> Trace:
    """Read lengths of chat turns, with sessions inferred.

    The turns of a conversation are neighbours and each prompt holds all that came
    before it. So a row continues the conversation of the row above if its prompt is
    longer than that row's prompt and answer together. Neighbours that happen to fit
    are joined too; sessions are an upper estimate.

    Raises:
        TraceError: the file is not in this format.
    """
    path = Path(path)
    requests: list[TraceRequest] = []
    session, context = -1, 0
    for serial, (prompt, output) in enumerate(_pairs(path)):
        if session < 0 or prompt <= context:
            session += 1
        context = prompt + output
        requests.append(_request(prompt, output, serial, session))
    return Trace(path.name, 0, tuple(requests))


def _pairs(path: Path) -> list[tuple[int, int]]:
    return [
        (row.integer("num_prefill_tokens", 1), row.integer("num_decode_tokens", 1))
        for row in csv_rows(path, _COLUMNS)
    ]


def _request(prompt: int, output: int, serial: int, session: int) -> TraceRequest:
    return TraceRequest(0.0, prompt, output, _NO_IDS, session, serial=serial)
