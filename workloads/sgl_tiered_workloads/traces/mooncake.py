"""The Mooncake traces of production chat (FAST '25 release), as published.

One JSON object per line: ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``, one id per block of 512 tokens, the last block possibly partial. An id
stands for the whole prefix up to the end of its block.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sgl_tiered_workloads.traces.base import Int64s, Trace, TraceError, TraceRequest
from sgl_tiered_workloads.traces.files import Row, json_rows

__all__ = ["MOONCAKE_BLOCK_TOKENS", "infer_sessions", "read_mooncake"]

MOONCAKE_BLOCK_TOKENS = 512

_MAX_SESSION_REQUESTS = 120
"""An id in this many requests or more is a system prompt's, not a conversation's."""


def read_mooncake(path: Path, *, limit: int | None = None) -> Trace:
    """Read a Mooncake trace; the first ``limit`` requests of it.

    The format names no sessions; they are inferred (``infer_sessions``), from the
    requests that are read.

    Raises:
        TraceError: the file is not in this format.
    """
    path = Path(path)
    rows: list[tuple[float, int, int, Int64s]] = []
    if limit is not None and limit < 1:
        raise TraceError(path, None, "no requests are left", "give a limit above 0")
    for row in json_rows(path):
        rows.append(_read_row(row, rows[-1][0] if rows else 0.0))
        if len(rows) == limit:
            break
    sessions = infer_sessions([ids for *_, ids in rows])
    first_s = rows[0][0]
    requests = tuple(
        TraceRequest(arrival_s - first_s, prompt, output, ids, session, serial=serial)
        for serial, ((arrival_s, prompt, output, ids), session) in enumerate(
            zip(rows, sessions, strict=True)
        )
    )
    return Trace(path.name, MOONCAKE_BLOCK_TOKENS, requests)


def infer_sessions(
    block_ids: list[Int64s], max_requests: int = _MAX_SESSION_REQUESTS
) -> list[int]:
    """Return a session for each request: those that share their own first block.

    A request's own first block is its first id that fewer than ``max_requests``
    requests contain; ids in more requests belong to system prompts. A request
    without such a block stands alone (-1). Sessions count from 0 by first arrival.
    """
    ids, counts = np.unique(np.concatenate(block_ids), return_counts=True)
    session_of: dict[int, int] = {}
    sessions = []
    for own in block_ids:
        rare = own[counts[np.searchsorted(ids, own)] < max_requests]
        if len(rare) == 0:
            sessions.append(-1)
        else:
            sessions.append(session_of.setdefault(int(rare[0]), len(session_of)))
    return sessions


def _read_row(row: Row, previous_s: float) -> tuple[float, int, int, Int64s]:
    arrival_s = row.number("timestamp") / 1000.0
    if arrival_s < previous_s:
        raise row.wrong(
            f"the timestamp goes back, from {previous_s:g} s to {arrival_s:g} s",
            "sort the trace by timestamp",
        )
    prompt = row.integer("input_length", 1)
    output = row.integer("output_length", 1)
    hashes = row.items("hash_ids")
    try:
        ids = np.array(hashes, dtype=np.int64)
        whole = ids.ndim == 1 and all(type(item) is int for item in hashes)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise row.wrong("'hash_ids' are not whole numbers", "repair that record")
    blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
    if len(ids) != blocks:
        raise row.wrong(
            f"{prompt} tokens have {len(ids)} hash ids instead of {blocks}",
            f"this reader takes one id per {MOONCAKE_BLOCK_TOKENS} tokens only",
        )
    return arrival_s, prompt, output, ids
