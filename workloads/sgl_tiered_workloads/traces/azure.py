"""Azure's LLM inference traces of 2023: arrival times and token counts, no content.

CSV with ``TIMESTAMP`` (date and time to 0.1 µs), ``ContextTokens`` and
``GeneratedTokens``.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np

from sgl_tiered_workloads.traces.base import Int64s, Trace, TraceRequest
from sgl_tiered_workloads.traces.files import Row, csv_rows

__all__ = ["read_azure"]

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NO_IDS: Int64s = np.empty(0, dtype=np.int64)


def read_azure(path: Path) -> Trace:
    """Read one of the two traces; times count from its first request.

    Raises:
        TraceError: the file is not in this format.
    """
    path = Path(path)
    requests: list[TraceRequest] = []
    first: datetime | None = None
    for serial, row in enumerate(csv_rows(path, _COLUMNS)):
        moment = _moment(row)
        first = moment if first is None else first
        if (moment.tzinfo is None) != (first.tzinfo is None):
            raise row.wrong("only some timestamps have a zone", "give all one or none")
        arrival_s = (moment - first).total_seconds()
        if requests and arrival_s < requests[-1].arrival_s:
            raise row.wrong("the timestamp goes back", "sort the trace by TIMESTAMP")
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=row.integer("ContextTokens", 1),
                num_output_tokens=row.integer("GeneratedTokens", 1),
                block_ids=_NO_IDS,
                serial=serial,
            )
        )
    return Trace(path.name, 0, tuple(requests))


def _moment(row: Row) -> datetime:
    text = row.text("TIMESTAMP")
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise row.wrong(
            f"the timestamp {text[:40]!r} is no date and time",
            "write it as 2023-11-16 18:15:46.6805900",
        ) from None
