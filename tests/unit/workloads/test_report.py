"""Tables and pictures say what the records say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.report import (
    draw_demo,
    format_table,
    summarise,
    tokens_by_source,
)


def record(key: str, start_s: float, ttft_s: float, cached: int) -> RequestRecord:
    return RequestRecord(
        key=key,
        order=0,
        prompt=(1,) * 100,
        targeted_s=start_s,
        started_s=start_s,
        token_times_s=(start_s + ttft_s, start_s + ttft_s + 0.1),
        output=(5, 6),
        cached_tokens=cached,
        cached_by_tier={"device": 0, "host": cached} if cached else {},
    )


RUN = [record("s0.t0", 0.0, 0.8, 0), record("s0.t1", 1.0, 0.2, 64)]


def test_sources_add_up_to_all_prompt_tokens() -> None:
    """Every prompt token comes from one tier or was computed."""
    assert tokens_by_source(RUN) == {"host": 64, "computed": 136}
    untold = replace(RUN[1], cached_by_tier={})
    assert tokens_by_source([untold]) == {"device": 64, "computed": 36}


def test_a_summary_is_derived_from_raw_times() -> None:
    """Percentiles, rates and the later turns' median follow from the records."""
    summary = summarise("x", [*RUN, replace(RUN[0], error="HTTP 503")])
    assert (summary.num_requests, summary.num_errors) == (2, 1)
    assert summary.ttft_p50_s == pytest.approx(0.5)
    assert summary.later_ttft_p50_s == pytest.approx(0.2)
    assert summary.tpot_p50_s == pytest.approx(0.1)
    assert summary.output_tokens_per_s == pytest.approx(4 / 1.3)


def test_a_run_without_answers_has_no_summary() -> None:
    """A system that answered nothing gets no figures."""
    with pytest.raises(ValueError, match="no request was answered"):
        summarise("x", [replace(RUN[0], error="HTTP 503")])


def test_the_table_shows_systems_errors_and_used_sources_only() -> None:
    """Errors are seen beside the name; tiers that served nothing take no column."""
    failed = replace(RUN[0], error="HTTP 503")
    table = format_table([summarise("plain", RUN), summarise("sick", [*RUN, failed])])
    assert "sick (1 errors)" in table
    assert "host tok" in table
    assert "disk tok" not in table


def test_the_picture_is_written(tmp_path: Path) -> None:
    """The picture is a PNG of the systems given."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    draw_demo(path, {"plain": RUN, "tiered": RUN}, "two requests")
    assert path.read_bytes().startswith(b"\x89PNG")
