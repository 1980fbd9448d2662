"""The Mooncake reader gives what the file says, and locates what is wrong with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.mooncake import infer_sessions, read_mooncake

LINES: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [2]},
    {
        "timestamp": 6500,
        "input_length": 1025,
        "output_length": 1,
        "hash_ids": [0, 3, 4],
    },
]


def write(path: Path, lines: list[Any], zipped: bool = False) -> Path:
    text = "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    )
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_requests_keep_lengths_ids_and_relative_times(
    tmp_path: Path, zipped: bool
) -> None:
    """Plain or gzipped by content, the trace is the file's, from time zero."""
    trace = read_mooncake(write(tmp_path / "trace.any", LINES, zipped))
    assert trace.block_tokens == 512
    assert [r.arrival_s for r in trace.requests] == [0.0, 0.0, 3.5]
    assert [r.num_prompt_tokens for r in trace.requests] == [600, 512, 1025]
    assert [r.num_output_tokens for r in trace.requests] == [5, 7, 1]
    assert [r.block_ids.tolist() for r in trace.requests] == [[0, 1], [2], [0, 3, 4]]
    assert trace.requests[0].block_ids.dtype == np.int64


def test_limit_keeps_the_first_requests(tmp_path: Path) -> None:
    """A limit cuts the trace and reads no further."""
    path = write(tmp_path / "t", [*LINES[:2], "not json"])
    assert len(read_mooncake(path, limit=2).requests) == 2
    with pytest.raises(TraceError, match="no requests are left"):
        read_mooncake(path, limit=0)


def test_a_session_is_named_by_the_first_block_that_few_requests_share() -> None:
    """Shared system blocks join nobody; a request of nothing else stands alone."""
    system = 9
    ids = [[9, 1], [9, 2], [9, 1, 3], [9], [4]]
    arrays = [np.array(row, dtype=np.int64) for row in ids]
    assert infer_sessions(arrays, max_requests=4) == [0, 1, 0, -1, 2]
    assert infer_sessions(arrays, max_requests=5) == [0, 0, 0, 0, 1]
    assert sum(system in row for row in ids) == 4


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"timestamp": 1', "not JSON"),
        ("[1]", "not a JSON object"),
        ({**LINES[0], "timestamp": 1}, "goes back"),
        ({**LINES[0], "timestamp": 9e3, "hash_ids": [0]}, "1 hash ids instead of 2"),
        ({**LINES[0], "timestamp": 9e3, "hash_ids": [0, 1.5]}, "not whole numbers"),
        ({**LINES[0], "timestamp": 9e3, "hash_ids": [[0], 1]}, "not whole numbers"),
        ({**LINES[0], "timestamp": 9e3, "output_length": 0}, "at least 1"),
        ({"timestamp": 9e3}, "'input_length' is missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, problem: str) -> None:
    """Each fault gives one sentence with file, line, fault and remedy."""
    path = write(tmp_path / "bad.jsonl", [*LINES, line])
    with pytest.raises(TraceError, match=problem) as caught:
        read_mooncake(path)
    assert caught.value.line == 4
    assert f"{path}, line 4: " in str(caught.value)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    """Absent, empty, cut and binary files are trace errors, not tracebacks."""
    with pytest.raises(TraceError, match="No such file"):
        read_mooncake(tmp_path / "absent")
    with pytest.raises(TraceError, match="empty"):
        read_mooncake(write(tmp_path / "empty", []))
    whole = write(tmp_path / "cut", LINES, zipped=True)
    whole.write_bytes(whole.read_bytes()[:-12])
    with pytest.raises(TraceError, match="damaged"):
        read_mooncake(whole)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_mooncake(binary)
