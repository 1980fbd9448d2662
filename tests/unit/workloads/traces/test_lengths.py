"""Readers of lengths: Azure's trace and the length files of ShareGPT and arXiv."""

from __future__ import annotations

from pathlib import Path

import pytest
from sgl_tiered_workloads.traces.azure import read_azure
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.lengths import (
    read_arxiv_lengths,
    read_sharegpt_lengths,
)

from tests.unit.workloads.sample_support import AZURE, LENGTHS, write_text


def test_azure_times_count_from_the_first_request(tmp_path: Path) -> None:
    """Dates become seconds, across midnight too; there are no ids and no sessions."""
    trace = read_azure(write_text(tmp_path / "a", AZURE, zipped=True))
    assert trace.block_tokens == 0
    assert [r.arrival_s for r in trace.requests] == [0.0, pytest.approx(1.5)]
    assert [r.num_prompt_tokens for r in trace.requests] == [40, 60]
    assert [r.num_output_tokens for r in trace.requests] == [2, 9]
    assert [(len(r.block_ids), r.session) for r in trace.requests] == [(0, -1)] * 2


def test_a_chat_goes_on_where_a_prompt_is_longer_than_all_before_it(
    tmp_path: Path,
) -> None:
    """A row continues the row above only if that row's text fits before it."""
    trace = read_sharegpt_lengths(write_text(tmp_path / "s", LENGTHS))
    assert [r.session for r in trace.requests] == [0, 0, 0, 1, 2]
    assert [r.serial for r in trace.requests] == [0, 1, 2, 3, 4]


def test_arxiv_rows_stand_alone(tmp_path: Path) -> None:
    """Each row is a request of its own without a time."""
    trace = read_arxiv_lengths(write_text(tmp_path / "x", LENGTHS, zipped=True))
    assert {r.session for r in trace.requests} == {-1}
    assert {r.arrival_s for r in trace.requests} == {0.0}
    assert [r.num_output_tokens for r in trace.requests] == [5, 4, 6, 3, 1]


@pytest.mark.parametrize(
    ("text", "problem", "line"),
    [
        (AZURE + "soon,1,1\n", "no date and time", 4),
        (AZURE + "2023-11-16 00:00:00,1,1\n", "goes back", 4),
        (AZURE + "2023-11-18 00:00:00,0,1\n", "at least 1", 4),
        (AZURE + "2023-11-18 00:00:00,x,1\n", "a whole number", 4),
        (AZURE + "2023-11-18 00:00:00,1\n", "2 values under 3 columns", 4),
        ("TIMESTAMP,ContextTokens\n", "lacks GeneratedTokens", 1),
        (AZURE.splitlines()[0] + "\n", "no rows", None),
        ("", "lacks TIMESTAMP", 1),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, text: str, problem: str, line: int | None
) -> None:
    """Each fault names its line and what is wrong there."""
    with pytest.raises(TraceError, match=problem) as caught:
        read_azure(write_text(tmp_path / "bad.csv", text))
    assert caught.value.line == line
