"""Agentic coding conversations (WEKA's kv-cache-tester) in their delta format.

One conversation per line: ``id``, ``start_s``, ``block_size`` and ``requests``. A
request has ``t`` (seconds from the conversation's start), ``in`` and ``out`` tokens,
``think`` seconds (0 or null: not recorded), ``agent`` (absent: the main agent) and its
block ids as a delta, ``ids = prev[:lcp] + expand(new)``: ``new`` is a list of
[first id, count] runs, and ``prev`` are the ids of the same agent's request before,
or for an agent's first request the main agent's latest. Only full blocks have ids,
so a prompt ends in up to ``block_size - 1`` tokens that no id covers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sgl_tiered_workloads.traces.base import Int64s, Trace, TraceError, TraceRequest
from sgl_tiered_workloads.traces.files import Row, json_rows

__all__ = ["read_weka"]

_NO_IDS: Int64s = np.empty(0, dtype=np.int64)
_MAX_ID = 1 << 62
_MAX_RUN = 1 << 24
"""Blocks of one run: longer than any prompt, and short enough for an array."""


def read_weka(path: Path, *, max_prompt_tokens: int | None = None) -> Trace:
    """Read conversations, merged into one stream by their start times.

    Ids identify a prefix inside one conversation only, so each conversation's ids are
    moved behind those of the conversations before it. All agents of a conversation
    have its session. An answer recorded as empty counts as one token.

    Args:
        path: the file, plain or gzipped.
        max_prompt_tokens: stop a conversation at its first longer request, as a
            model of that context length would; nothing may be left.

    Raises:
        TraceError: the file is not in this format, or has no requests.
    """
    path = Path(path)
    merged: list[TraceRequest] = []
    block_tokens = 0
    first_free_id = 0
    for session, row in enumerate(json_rows(path)):
        own_block_tokens = row.integer("block_size", 1)
        if block_tokens not in (0, own_block_tokens):
            raise row.wrong(
                f"blocks of {own_block_tokens} tokens after blocks of {block_tokens}",
                "split the file by block_size",
            )
        block_tokens = own_block_tokens
        conversation = _Conversation(row, session, block_tokens, first_free_id)
        for request in row.rows("requests"):
            if max_prompt_tokens is not None and (
                request.integer("in", 1) > max_prompt_tokens
            ):
                break
            merged.append(conversation.take(request, serial=len(merged)))
        first_free_id = conversation.first_free_id
    if not merged and max_prompt_tokens is None:
        raise TraceError(path, None, "it has no requests", "give a file with some")
    merged.sort(key=lambda request: (request.arrival_s, request.serial))
    return Trace(path.name, block_tokens, tuple(merged))


class _Conversation:
    """Expands the deltas of one conversation.

    Attributes:
        first_free_id: above every id given out so far.
    """

    def __init__(self, row: Row, session: int, block_tokens: int, base: int) -> None:
        self._start_s = row.number("start_s")
        self._session = session
        self._block_tokens = block_tokens
        self._base = base
        self._previous: dict[str | None, Int64s] = {None: _NO_IDS}
        self._previous_t = 0.0
        self.first_free_id = base

    def take(self, row: Row, serial: int) -> TraceRequest:
        """Return the conversation's next request, in file order."""
        offset_s = row.number("t")
        if offset_s < self._previous_t:
            raise row.wrong(
                f"'t' goes back, from {self._previous_t:g} s to {offset_s:g} s",
                "keep the requests of a conversation in their order",
            )
        self._previous_t = offset_s
        prompt = row.integer("in", 1)
        think_s = float("nan")
        if row.fields.get("think"):
            think_s = row.number("think")
        return TraceRequest(
            arrival_s=self._start_s + offset_s,
            num_prompt_tokens=prompt,
            num_output_tokens=max(1, row.integer("out", 0)),
            block_ids=self._expand(row, prompt),
            session=self._session,
            think_s=think_s,
            serial=serial,
        )

    def _expand(self, row: Row, prompt: int) -> Int64s:
        agent = row.fields.get("agent")
        previous = self._previous.get(agent, self._previous[None])
        kept = row.integer("lcp", 0)
        if kept > len(previous):
            raise row.wrong(
                f"'lcp' keeps {kept} ids of {len(previous)}",
                "the request before it is missing or out of order",
            )
        ids: Int64s = np.concatenate([previous[:kept], *self._runs(row)])
        blocks = prompt // self._block_tokens
        if len(ids) != blocks:
            raise row.wrong(
                f"{prompt} tokens have {len(ids)} block ids instead of {blocks}",
                "repair 'lcp' or 'new' of that request",
            )
        self._previous[agent] = ids
        return ids

    def _runs(self, row: Row) -> list[Int64s]:
        runs = []
        for run in row.items("new"):
            whole = isinstance(run, list) and [type(n) for n in run] == [int, int]
            if not whole or not 0 <= run[0] < _MAX_ID or not 1 <= run[1] <= _MAX_RUN:
                raise row.wrong(
                    f"'new' has the run {repr(run)[:60]}",
                    "runs are [first id, count >= 1]",
                )
            first = self._base + run[0]
            if first >= _MAX_ID:
                raise row.wrong("its ids are too large", "count ids from 0")
            runs.append(np.arange(first, first + run[1], dtype=np.int64))
            self.first_free_id = max(self.first_free_id, first + run[1])
        return runs
