"""Figures, table and chart, from made-up cells."""

from __future__ import annotations

import json
import os

import pytest
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records

from tests.unit.benchmarks.llama.llama_support import (
    MEMORY,
    PAGE,
    TOKENS,
    all_cells,
    cell,
    header_of,
    load_cell,
    request,
    stream_cell,
    ttft_cell,
)

ALLOWED = {"plain": "the reference", "tiered": "green", "hicache": "green"}


@pytest.fixture
def find(parts, tmp_path, monkeypatch):
    """Return a function that finds figures, with gates that are given."""

    def found(cells, gates=ALLOWED):
        verdicts = parts.judging.Verdicts(dict(gates))
        monkeypatch.setattr(parts.results, "judge", lambda *_: verdicts)
        return parts.results.find(cells, tmp_path, PAGE)

    return found


def rows_of(found):
    """Return rows by figure and system."""
    return {(row.figure, row.system): row for row in found.rows}


def test_a_figure_is_the_median_of_the_starts_medians(find):
    """Each start's stands beside it, with the range of what was repeated."""
    found = find(all_cells())
    assert not found.problems
    rows = rows_of(found)
    host = rows["TTFT, 64 tokens, host", "tiered"]
    assert host.starts == (pytest.approx(502.5), pytest.approx(512.5))
    assert host.value == pytest.approx(507.5)
    assert (host.low, host.high) == host.starts
    assert host.samples == 12
    assert host.source == "host 100%"
    assert host.identical == pytest.approx(0.5)
    computed = rows["TTFT, 64 tokens, computed", "plain"]
    # What comes first in a start is left out.
    assert computed.starts == (pytest.approx(2005.0), pytest.approx(2005.0))
    assert computed.samples == 2 * 11
    # Its second start agrees with the first one.
    assert computed.identical == 1.0
    assert rows["TTFT, 64 tokens, device", "plain"].identical == 1.0


def test_what_is_still_offloaded_counts_as_time_without_reuse(find):
    """Each start is set against plain's of the same prompts."""
    rows = rows_of(find(all_cells()))
    ratio = rows["without reuse, throughput over plain's", "tiered"]
    assert ratio.starts == (pytest.approx(1 / 1.25), pytest.approx(1 / 1.3))
    rate = rows["without reuse, throughput", "tiered"]
    assert rate.starts == (pytest.approx(100 / 1.25), pytest.approx(100 / 1.3))
    assert ("without reuse, throughput over plain's", "plain") not in rows


def test_moved_bytes_are_told(find, parts, tmp_path):
    """Of all starts, with the longest drain; others cannot tell."""
    cells = [*all_cells(), stream_cell("hicache", 0, 1.0)]
    found = find(cells)
    assert found.moved == {
        "plain": {},
        "tiered": {"device->host": 10_000_000, "drain_s": 0.1},
        "hicache": {},
    }
    text = parts.page.page(header_of(parts, tmp_path / "model"), found, {})
    assert "| tiered | device->host 10.0 MB | 0.100 s (dry run) |" in text
    assert "| hicache | not told | cannot be seen |" in text


def test_runs_of_a_load_show_their_range(find):
    """The value is the median of the starts'; low and high are of all runs."""
    rows = rows_of(find(all_cells()))
    rate = rows["shared-prefix, answer tokens/s", "tiered"]
    assert rate.starts == (50.5, 60.5)
    assert (rate.value, rate.low, rate.high) == (55.5, 50.0, 61.0)
    load = rows["shared-prefix, TTFT p50", "tiered"]
    assert load.value == pytest.approx(300.0)
    assert load.source == "device 20%, host 40%, computed 40%"
    assert load.identical == pytest.approx(0.5)
    # Plain's later runs against its first one.
    assert rows["shared-prefix, TTFT p50", "plain"].identical == 1.0


def test_a_hit_that_came_from_elsewhere_is_left_out(find, parts, tmp_path):
    """What was computed, or found on the device, says nothing of the host."""
    cells = [ttft_cell("plain", 2.0), ttft_cell("tiered", 0.5)]
    hits = [one for one in cells[1]["requests"] if one["state"] == "host"]
    hits[0]["cached_by_tier"] = {"host": 60, "device": 4}
    hits[1]["cached_by_tier"] = {"device": 64}
    hits[2]["cached_by_tier"] = {}
    row = rows_of(find(cells))["TTFT, 64 tokens, host", "tiered"]
    assert row.samples == 3
    assert row.value == pytest.approx(504.0)
    assert row.note == "not from host: 3 of 6 left out"
    assert row.source == "host 66%, device 18%, computed 17%"
    for one in hits:
        one["cached_by_tier"] = {"host": 60}
    found = find(cells)
    row = rows_of(found)["TTFT, 64 tokens, host", "tiered"]
    assert (row.value, row.samples) == (None, 0)
    text = parts.page.page(header_of(parts, tmp_path / "model"), found, {})
    (line,) = [one for one in text.splitlines() if "64 tokens, host | tiered" in one]
    assert "not from host: 6 of 6 left out" in line
    assert "| none |" in line


def test_what_a_disk_gave_counts_once(find):
    """Records of former runs tell it as storage too."""
    seen = [
        request("disk", n, 1.0, "disk")
        | {"cached_by_tier": {"disk": 64, "storage": 64}, "resident_share": 0.0}
        for n in range(4)
    ]
    cells = [cell("tiered-disk", "disk", 0, TOKENS, requests=seen)]
    (row,) = find(cells, {"tiered-disk": "green"}).rows
    assert row.source == "disk 100%"
    assert row.samples == 4


def test_a_hit_on_a_disk_that_is_not_cold_is_left_out(find):
    """The share of the store that stayed in the page cache is told."""
    seen = [
        request("disk", n, 1.0, "disk") | {"resident_share": share}
        for n, share in enumerate((0.0, 0.01, 0.2))
    ]
    cells = [cell("tiered-disk", "disk", 0, TOKENS, requests=seen)]
    (row,) = find(cells, {"tiered-disk": "green"}).rows
    assert row.samples == 2
    assert "not cold: 1 of 3 left out" in row.note
    assert "at most 20.0% of the store was in the page cache" in row.note


def test_rows_of_one_figure_stand_together(find):
    """In the order of the systems, and the figures in that of the page."""
    found = find(all_cells()[::-1])
    figures = [row.figure for row in found.rows]
    firsts = list(dict.fromkeys(figures))
    assert figures == sorted(figures, key=firsts.index)
    assert firsts[0].endswith("computed")
    pair = [row.system for row in found.rows if row.figure.endswith("device")]
    assert pair == ["plain", "tiered"]


@pytest.mark.parametrize("gate", ["red", "not judged: it passed", None])
def test_only_a_green_gate_lets_figures_be_told(find, parts, tmp_path, gate):
    """Red, or nobody looked: withheld in the table, the JSON and the last line."""
    gates = {"plain": "the reference"} | ({} if gate is None else {"tiered": gate})
    found = find(all_cells(), gates)
    rows = [row for row in found.rows if row.system == "tiered"]
    assert rows
    assert all((row.value, row.low, row.starts) == (None, None, ()) for row in rows)
    header = header_of(parts, tmp_path / "model")
    text = parts.page.page(header, found, {})
    lines = [one for one in text.splitlines() if "host | tiered" in one]
    assert all("| withheld |" in one for one in lines)
    told = parts.page.last_line(header, found)
    assert told["model"] == "model"
    assert told["figures"]["dry_run: TTFT, 64 tokens, host (ms)"] == {"tiered": None}


def test_systems_that_did_not_get_the_same_are_a_problem(find):
    """Another pool, or another attention backend; the uncapped pool is meant."""
    other = {"memory": MEMORY | {"pool_tokens": 4000}}
    cells = [ttft_cell("plain", 2.0), ttft_cell("tiered", 0.5) | other]
    cells.append(load_cell("plain-uncapped", 0, 0, ["a", "b"]) | other)
    assert find(cells).problems == ["tiered has pool_tokens 4000, plain 4096"]


def test_measured_memory_stands_beside_what_was_given(find, parts, tmp_path):
    """The most that was seen after any cell."""
    cells = all_cells()
    cells[1]["memory"] = MEMORY | {"gpu_used_gib": 70.0, "processes_gib": 30.0}
    cells[3]["memory"] = MEMORY | {"gpu_used_gib": None, "processes_gib": 33.0}
    found = find(cells)
    assert found.memory["tiered"]["gpu_used_gib"] == 70.0
    assert found.memory["tiered"]["processes_gib"] == 33.0
    text = parts.page.page(header_of(parts, tmp_path / "model"), found, {})
    (line,) = [one for one in text.splitlines() if one.startswith("| tiered | 4,096")]
    assert "| 70.0 | 34 | 33.0 | unknown |" in line


def test_the_memory_of_a_process_and_its_children_is_measured(parts):
    """This one has some; one that is gone has none."""
    told = parts.memory.measured_memory([os.getpid()])
    assert told["processes_gib"] > 0.01
    assert told["host_used_gib"] > 0
    assert parts.memory.measured_memory([2**22 + 1])["processes_gib"] == 0.0


def test_what_failed_and_what_is_not_there_is_told(find, parts, tmp_path):
    """The one is a problem, the other is not; both are on the page."""
    broke = {"status": "failed", "why": "it broke", "failed": ["it broke"] * 3}
    cells = [
        cell("hicache", "ttft", 0, 64) | broke,
        cell("hicache", "gate") | broke,
        cell("lmcache", "gate") | {"status": "not there", "why": "absent"},
        cell("plain", "gate") | {"failed": ["at first"]},
    ]
    found = find(cells)
    assert found.problems == ["hicache: it broke"]
    header = header_of(parts, tmp_path / "model")
    left_out = {"32,768": "the context has 8,192"}
    text = parts.page.page(header, found, {"left_out": left_out})
    assert "- hicache.ttft.64.0, hicache.gate.0.0: it broke" in text
    assert "- lmcache.gate.0.0: absent" in text
    assert "- 32,768 tokens: the context has 8,192" in text
    assert "Nothing was measured." in text
    # Also of a cell that was measured in the end.
    assert "| plain.gate.0.0 | 1 | at first |" in text
    told = parts.page.last_line(header, found)["failed_attempts"]
    assert told == {"hicache.ttft.64.0": 3, "hicache.gate.0.0": 3, "plain.gate.0.0": 1}


def test_cells_of_different_days_are_dated(find, parts, tmp_path):
    """Each row says when; where all are of one day, the page does."""
    cells = all_cells()
    assert not any(row.note for row in find(cells).rows)
    cells[1]["date"] = "2026-01-09"
    found = find(cells)
    host = rows_of(found)["TTFT, 64 tokens, host", "tiered"]
    assert host.note == "2026-01-02, 2026-01-09"
    text = parts.page.page(header_of(parts, tmp_path / "model"), found, {})
    assert "measured on 2026-01-02, 2026-01-09 (UTC)" in text


def test_a_cell_that_lacks_something_loses_its_own_figures_only(find):
    """It is a problem, and all others are told, of its system too."""
    cells = all_cells()
    del cells[1]["requests"][5]["cached_by_tier"]
    del cells[3]["outputs"]
    cells.append(cell("tiered", "shared_prefix", 0, 7))
    found = find(cells)
    assert len(found.problems) == 3
    assert all("does not have what it should" in one for one in found.problems)
    rows = rows_of(found)
    assert rows["TTFT, 64 tokens, host", "tiered"].starts == (pytest.approx(512.5),)
    ratio = rows["without reuse, throughput over plain's", "tiered"]
    assert ratio.starts == (pytest.approx(1 / 1.3),)
    assert rows["shared-prefix, TTFT p50", "tiered"].value is not None
    assert rows["TTFT, 64 tokens, host", "tiered"].identical is not None


def test_every_figure_of_a_dry_run_says_so(find, parts, tmp_path):
    """At the top, in each cell with a figure, and in each name in the JSON."""
    found = find(all_cells())
    header = header_of(parts, tmp_path / "model")
    text = parts.page.page(header, found, {})
    assert "**A dry run**" in text.splitlines()[4]
    rows = [line for line in text.splitlines() if line.startswith(("| TTFT", "| sh"))]
    assert rows
    assert all(line.count("(dry run)") >= 3 for line in rows)
    line = parts.page.last_line(header, found)
    assert all(name.startswith("dry_run: ") for name in line["figures"])
    real = header | {"dry_run": False}
    assert "dry run" not in parts.page.page(real, found, {}).lower()
    assert str(tmp_path) not in json.dumps(parts.page.result(header, found, {}))


def test_the_page_says_what_makes_the_loads_and_what_hicaches_disk_is(
    find, parts, tmp_path
):
    """The limit of the pool, and the smallest backend."""
    header = header_of(parts, tmp_path / "model")
    text = parts.page.page(header, find(all_cells()), {"pool_tokens": 2000})
    assert "about 2,500 tokens again, 1.25 of the device pools" in text
    assert "the smallest of its backends" in text


def test_the_chart_is_drawn_from_the_same_figures(find, parts, tmp_path):
    """Also of nothing: equal cells give equal files."""
    pytest.importorskip("matplotlib")
    header = header_of(parts, tmp_path / "model")
    empty = parts.results.Findings()
    for name, findings in (("a", find(all_cells())), ("b", find(all_cells()))):
        parts.chart.draw(tmp_path / f"{name}.png", header, findings)
    parts.chart.draw(tmp_path / "c.png", header, empty)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_records_that_cannot_be_read_are_not_judged(parts, tmp_path):
    """A gate without records is said to have judged nothing."""
    spread = {"max_logprob": 0.1, "mean_logprob": 0.1, "max_gap": 0.1, "num_tokens": 1}
    cells = [
        cell("plain", "gate", records="plain.jsonl", spread=spread),
        cell("tiered", "gate", records="absent.jsonl"),
    ]
    record = RequestRecord("g", 0, (1,), 0.0, 0.0)
    write_records(tmp_path / "plain.jsonl", make_header("plain", {}), [record])
    found = parts.results.find(cells, tmp_path, PAGE)
    assert found.gates["tiered"].startswith("not judged: its records cannot be read")
    cells[0] = cell("plain", "gate", spread=None, why_no_spread="it passed")
    found = parts.results.find(cells, tmp_path, PAGE)
    # A wrong page passed: nobody's answers were judged, plain's own included.
    assert found.gates == dict.fromkeys(("plain", "tiered"), "not judged: it passed")
