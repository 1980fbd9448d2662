"""A run as a Chrome trace: open it in chrome://tracing or Perfetto.

Rows: the device's passes and decode segments, and per request (as asynchronous slices)
its time in the queue, its prefill and its decode. Times are microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.records import RequestRecord, SimResult

__all__ = ["chrome_events", "write_chrome_trace"]

_US = 1e6
_DEVICE, _REQUESTS, _EVENTS = 1, 2, 3
_INSTANTS = frozenset({"retracted", "aborted", "offload_lost", "stage", "staged"})


def chrome_events(result: SimResult) -> list[dict[str, Any]]:
    """Return the trace's events, in order of their kind, then of time."""
    events = [
        _name(_DEVICE, "device"),
        _name(_REQUESTS, "requests"),
        _name(_EVENTS, "tiers"),
    ]
    for done in result.passes:
        details = {
            "requests": done.num_requests,
            "tokens": done.num_tokens,
            "loaded_bytes": done.loaded_bytes,
            "stall_ms": done.stall_s * 1e3,
        }
        events.append(_slice("prefill", done.start_s, done.end_s, details))
    for segment in result.segments:
        end_s = segment.start_s + segment.seconds(segment.num_steps)
        details = {"batch": segment.batch, "steps": segment.num_steps}
        events.append(_slice("decode", segment.start_s, end_s, details))
    for record in result.records:
        events += _request(record)
    for time_s, kind, subject, a, b in result.log.rows:
        if kind in _INSTANTS:
            events.append(
                {
                    "name": kind,
                    "ph": "i",
                    "s": "p",
                    "ts": time_s * _US,
                    "pid": _EVENTS,
                    "tid": 0,
                    "args": {"subject": subject, "a": a, "b": b},
                }
            )
    return events


def write_chrome_trace(path: Path, result: SimResult) -> None:
    """Write the trace as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    trace = {"traceEvents": chrome_events(result), "displayTimeUnit": "ms"}
    try:
        path.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "out", f"{path} cannot be written ({error.strerror})", "give another folder"
        ) from None


def _name(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


def _slice(
    name: str, start_s: float, end_s: float, details: dict[str, float]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
        "pid": _DEVICE,
        "tid": 0,
        "args": details,
    }


def _request(record: RequestRecord) -> list[dict[str, Any]]:
    phases = (
        ("queue", record.arrival_s, record.admitted_s),
        ("prefill", record.admitted_s, record.first_token_s),
        ("decode", record.first_token_s, record.finished_s),
    )
    details = {
        "prompt": record.num_prompt_tokens,
        "output": record.num_output_tokens,
        "from_device": record.device_tokens,
        "from_host": record.host_tokens,
        "from_cxl": record.cxl_tokens,
        "from_disk": record.disk_tokens,
    }
    events = []
    for name, start_s, end_s in phases:
        common = {
            "name": name,
            "cat": "request",
            "id": record.request,
            "pid": _REQUESTS,
            "tid": 0,
        }
        events.append({**common, "ph": "b", "ts": start_s * _US, "args": details})
        events.append({**common, "ph": "e", "ts": end_s * _US})
    return events
