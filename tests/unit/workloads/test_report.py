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
        order=int(start_s),
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
    """Every prompt token comes from one tier, is computed again, or is new."""
    sources = tokens_by_source(RUN, 16)
    assert sources == {"host": 64, "recomputed": 32, "new": 104}
    assert sum(sources.values()) == sum(len(record.prompt) for record in RUN)
    untold = replace(RUN[1], cached_by_tier={})
    assert tokens_by_source([untold], 16) == {"device": 64, "new": 36}


def test_the_last_token_of_a_repeated_prompt_is_new() -> None:
    """A server computes at least one token of each prompt; that is no loss."""
    again = replace(RUN[0], key="again", order=1)
    assert tokens_by_source([RUN[0], again], 4) == {"recomputed": 99, "new": 101}


def test_a_summary_is_derived_from_raw_times() -> None:
    """Percentiles, rates and the later turns' median follow from the records."""
    summary = summarise("x", [*RUN, replace(RUN[0], error="HTTP 503")], 16)
    assert (summary.num_requests, summary.num_errors) == (2, 1)
    assert summary.ttft_p50_s == pytest.approx(0.5)
    assert summary.later_ttft_p50_s == pytest.approx(0.2)
    assert summary.tpot_p50_s == pytest.approx(0.1)
    assert summary.output_tokens_per_s == pytest.approx(4 / 1.3)


def test_a_run_without_answers_has_no_summary() -> None:
    """A system that answered nothing gets no figures."""
    with pytest.raises(ValueError, match="no request was answered"):
        summarise("x", [replace(RUN[0], error="HTTP 503")], 16)


def test_the_table_shows_systems_errors_and_used_sources_only() -> None:
    """Errors are seen beside the name; tiers that served nothing take no column."""
    failed = replace(RUN[0], error="HTTP 503")
    table = format_table(
        [summarise("plain", RUN, 16), summarise("sick", [*RUN, failed], 16)]
    )
    assert "sick (1 errors)" in table
    assert "host tok" in table
    assert "disk tok" not in table


def test_the_picture_is_written(tmp_path: Path) -> None:
    """The picture is a PNG of the systems given."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "demo.png"
    draw_demo(path, {"plain": RUN, "tiered": RUN}, 16, "two requests")
    assert path.read_bytes().startswith(b"\x89PNG")
