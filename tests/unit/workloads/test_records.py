"""Records survive the file, and their times are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sgl_tiered_workloads.records import (
    RequestRecord,
    make_header,
    read_records,
    write_records,
)

RECORD = RequestRecord(
    key="s0.t1",
    order=4,
    prompt=(1, 2, 3, 4),
    targeted_s=0.0,
    started_s=0.1,
    token_times_s=(0.30000000000000004, 0.4, 0.6),
    output=(7, 8, 9),
    logprobs=(-0.1, -1 / 3, -2e-30),
    top_logprobs=(((-0.1, 7), (-2.5, 8)), ((-1 / 3, 8),), ((-2e-30, 9),)),
    cached_tokens=3,
    cached_by_tier={"host": 3},
)


def test_a_file_gives_back_exactly_what_was_written(tmp_path: Path) -> None:
    """Reading is the inverse of writing, to the last bit of every float."""
    path = tmp_path / "deep" / "run.jsonl"
    header = make_header("plain", {"seed": 3, "pool_tokens": 4096})
    failed = RequestRecord("s1.t0", 5, (1,), 0.0, 0.2, error="HTTP 503")
    write_records(path, header, [RECORD, failed])
    assert read_records(path) == (header, [RECORD, failed])


def test_times_are_derived_from_the_actual_start() -> None:
    """TTFT, E2E and TPOT start when the request left, not when it should have."""
    assert RECORD.ttft_s == pytest.approx(0.2)
    assert RECORD.e2e_s == pytest.approx(0.5)
    assert RECORD.tpot_s == pytest.approx(0.15)
    assert RECORD.recomputed_tokens == 1


def test_a_request_without_a_token_has_no_finite_ttft() -> None:
    """A failed request cannot lower a latency figure."""
    assert RequestRecord("a", 0, (1,), 0.0, 0.0, error="x").ttft_s == float("inf")


def test_the_header_names_commit_versions_and_machine_but_no_path() -> None:
    """A header explains a run without telling where on a disk it lived."""
    header = make_header("plain", {"seed": 3})
    assert {"processor", "cores", "memory_bytes", "python"} <= set(header.machine)
    assert header.versions["numpy"] != "absent"
    assert str(Path.cwd()) not in json.dumps(
        [header.commit, dict(header.versions), dict(header.machine)]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "no header"), ('{"kind": "surprise"}\n', "unknown kind")],
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """A file that is no records file is an error that says so."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_records(path)
