"""README, docs and examples: links for the site, commands, figures, settings."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import docs_commands as commands
import docs_hooks
import kinds
import pytest
import results
import tables
from sgl_tiered_workloads.harness import keeping

from sgl_tiered.core.sizes import parse_size
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving import tier_sizes
from sgl_tiered.serving.option_reader import read_options

ROOT = Path(__file__).parents[3]
GB = 10**9
FIGURE = re.compile(
    r"\b\d[\d.,]*\s?(?:ms|us|s|%|times|x|tokens/s|requests/s|MB/s|GB/s|points)(?![\w/-])"
)
"""What a measurement looks like."""
ROW = re.compile(r"(?:\| *[-+]?[\d.,]+ *%? *){3}\|")
"""What a row of a typed table looks like."""
NOT_MEASURED = {
    "benchmarks/cluster/README.md": {"0.4 s", "1.5 times", "95 %"},
    "benchmarks/quality/README.md": {"15 %", "95 %"},
    "benchmarks/serving/reload/README.md": {"25 %", "95 %"},
    "docs/benchmarks/gpu.md": {"3 %", "95 %"},
    "docs/benchmarks/simulator/activations.md": {
        "1,008 GB/s",
        "2 %",
        "31.5 GB/s",
        "80 %",
        "90 %",
    },
    "docs/benchmarks/simulator/chain.md": {"2 points"},
    "docs/benchmarks/simulator/eviction.md": {"1 %", "8 times"},
    "docs/benchmarks/simulator/index.md": {
        "2x",
        "30 %",
        "55 %",
        "60 %",
        "64 GB/s",
        "7 GB/s",
        "80 %",
    },
    "docs/benchmarks/simulator/layerkv.md": {"0.2 s", "3 s", "55 %", "80 %"},
    "docs/benchmarks/simulator/memserve.md": {"2 us", "59 %"},
    "docs/benchmarks/simulator/orders.md": {"1 ms"},
    "docs/benchmarks/simulator/slo.md": {"200 ms", "3 s", "8 times"},
    "docs/design/negative-results.md": {"64 GB/s"},
    "docs/design/one-rank.md": {"1 ms", "2 ms"},
    "docs/guides/disk.md": {"5 s"},
    "docs/operate/troubleshooting.md": {"20 s", "5 s"},
    "docs/papers/index.md": {"90 %"},
    "docs/plan/capacity.md": {"5 %"},
    "docs/plan/simulate.md": {"3.x"},
    "sgl_tiered/cli/README.md": {"25 %", "45 s"},
    "sgl_tiered/engines/sglang/disagg/README.md": {"10 s", "5 s"},
    "sgl_tiered/layered/README.md": {"5 s"},
    "sgl_tiered/pipelines/README.md": {"20 ms", "50 ms"},
    "sgl_tiered/pool/README.md": {"0.1 s", "10 s", "3 s", "60 s"},
    "sgl_tiered/router/README.md": {"120 s", "20 s", "4 s", "75 s"},
    "sgl_tiered/testing/EMULATION.md": {"5 s"},
    "sgl_tiered/tiers/README.md": {"5 s"},
}
"""Settings, targets, data sheets and what papers say, by page."""


# --- links of the site ---------------------------------------------------------------


def rewritten(text: str) -> tuple[str, list[str]]:
    """Rewrite a page of the docs that lies in ``docs/guides``."""
    pages = {
        "docs/guides/disk.md": "guides/disk.md",
        "docs/plan/capacity.md": "plan/capacity.md",
        **docs_hooks.beside_the_code(),
    }
    return docs_hooks.rewrite_links(text, "guides/disk.md", pages)


@pytest.mark.parametrize(
    ("link", "wanted"),
    [
        ("[a](../plan/capacity.md#how)", "[a](../plan/capacity.md#how)"),
        (
            "[a](../../sgl_tiered/router/README.md)",
            "[a](../code/sgl_tiered/router/README.md)",
        ),
        ("[a](../../sgl_tiered/router)", "[a](../code/sgl_tiered/router/README.md)"),
        ("[`Makefile`](../../Makefile)", "`Makefile`"),
        ("[targets](../../Makefile)", "targets (`Makefile`)"),
        ("![a](../pictures/answers.svg)", "![a](../pictures/answers.svg)"),
        ("[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("[a](#here)", "[a](#here)"),
        ("```text\n[a](nothing.md)\n```", "```text\n[a](nothing.md)\n```"),
    ],
)
def test_links_are_turned_for_the_site(link: str, wanted: str) -> None:
    """Pages are linked as pages, other files are named, code is left alone."""
    assert rewritten(f"x {link}" if link[0] != "`" else link)[0].endswith(wanted)
    assert rewritten(link)[1] == []


def test_a_link_to_nothing_is_told() -> None:
    """The strict build fails on it."""
    assert rewritten("[a](../nothing.md)")[1] == ["../nothing.md"]


def test_the_first_sentence_is_of_the_text() -> None:
    """Headings, pictures and comments are none, and links are words."""
    text = "# Title\n\n![p](a.svg)\n\n<!-- x -->\n**See [this](b.md).** Then that."
    assert docs_hooks.first_sentence(text) == "See this."
    assert docs_hooks.first_sentence("```sh\nmake\n```\n\n- One: two.") == "One"


def test_every_page_has_its_place() -> None:
    """The navigation names each page of ``docs/`` once, and no other."""
    named = re.findall(r"\s(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    there = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(path.as_posix() for path in there)


# --- commands ------------------------------------------------------------------------


def test_every_command_says_how_it_is_run() -> None:
    """A comment before a block is one that the runner knows."""
    found = [block for page in commands.pages() for block in commands.blocks(page)]
    assert {block.how for block in found} == set(commands.HOWS)
    assert all(block.reason for block in found if block.how == "not on a CPU")


def test_a_wrong_comment_is_refused(tmp_path: Path) -> None:
    """A word that nobody knows does not turn a block off."""
    page = tmp_path / "page.md"
    page.write_text("<!-- docs: later -->\n```sh\ntrue\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2"):
        commands.blocks(page, tmp_path)


@pytest.mark.parametrize(("text", "failed"), [("true", 0), ("false\ntrue", 1)])
def test_a_block_fails_with_its_first_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, failed: int
) -> None:
    """The runner counts what failed, and its last line is one JSON object."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/README.md").write_text("")
    (tmp_path / "README.md").write_text(f"```sh\n{text}\n```\n")
    assert commands.main([], tmp_path) == failed
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["blocks"], told["run"], told["failed"]) == (1, 1, failed)


# --- figures -------------------------------------------------------------------------


def test_figures_are_what_the_records_say() -> None:
    """``make results`` would change nothing but the words on an earlier source."""
    for path, text in results.written().items():
        seen = path.read_text().replace(results.CHANGED, "")
        assert seen == text.replace(results.CHANGED, ""), path.name


@pytest.mark.parametrize(
    ("page", "block"),
    [
        ("index", "fuzz-line"),
        ("index", "bench-table"),
        ("simulator/activations", "sim-activations"),
        ("simulator/cluster", "plan-table"),
    ],
)
def test_a_typed_figure_does_not_last(page: str, block: str) -> None:
    """What stands in a block is made anew, whatever it was."""
    text = (ROOT / f"docs/benchmarks/{page}.md").read_text()
    old = rf"(<!-- results: {block} -->\n).*?(?=\n<!--)"
    typed = re.sub(old, r"\1 9 %", text, flags=re.S)
    assert typed != text
    assert results.filled(typed) == results.filled(text)


def typed(text: str, what: re.Pattern[str] = FIGURE) -> set[str]:
    """Return what looks like a measurement outside of blocks and commands."""
    blocks = r"<!-- results: .*?<!-- /results -->|```.*?```|<!--.*?-->"
    return set(what.findall(re.sub(blocks, "", text, flags=re.S)))


def test_no_page_has_a_figure_of_its_own() -> None:
    """But for settings, targets, data sheets and what papers say."""
    paths = [ROOT / "README.md"]
    for folder in ("docs", "benchmarks", "sgl_tiered"):
        paths += sorted((ROOT / folder).rglob("*.md"))
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    told = {name: typed(text) for name, text in found.items()}
    assert {name: these for name, these in told.items() if these} == NOT_MEASURED
    assert typed("TTFT falls from 12 ms") == {"12 ms"}
    # A plan, in lines of code.
    rows = {name for name, text in found.items() if typed(text, ROW)}
    assert rows == {"docs/design/one-rank.md"}
    assert typed("| lru | 0.043 | 0.044 | 0.05 |", ROW)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout with one kind of record; its source today is ``now``."""
    kind = results.Kind("records/*.json", "make it", ("sgl_tiered",))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "DATES", tmp_path / "dates.json")
    monkeypatch.setattr(results, "KINDS", {"it": kind})
    monkeypatch.setattr(results, "source_hash", lambda *_: "now")
    results.found.cache_clear()
    (tmp_path / "records").mkdir()
    yield tmp_path / "records"
    results.found.cache_clear()


def keep(folder: Path, name: str, source: str, date: str) -> None:
    """Write a record."""
    record = {"source": source, "date": date, "commit": f"{name}0000000"}
    (folder / f"{name}.json").write_text(json.dumps(record))


def test_a_record_of_todays_source_counts_before_newer_ones(records: Path) -> None:
    """And of several of them the last is named."""
    keep(records, "a", "now", "2026-01-01")
    keep(records, "b", "now", "2026-01-02")
    keep(records, "c", "other", "2026-01-03")
    found = results.found("it")
    assert len(found.records) == 2
    assert found.when == "2026-01-02, b000000"


def test_a_record_of_an_earlier_source_says_so(records: Path) -> None:
    """The newest is shown, and never as today's."""
    keep(records, "a", "old", "2026-01-01")
    keep(records, "b", "older", "2025-12-31")
    assert results.found("it").when == f"2026-01-01, a000000{results.CHANGED}"


def test_a_record_that_nobody_committed_is_refused(records: Path) -> None:
    """Unless it says itself when it was made, and of which commit."""
    (records / "a.json").write_text(json.dumps({"source": "now"}))
    with pytest.raises(SystemExit, match=r"records/a\.json .*; commit it first"):
        results.found("it")


def test_without_a_record_there_is_no_figure(records: Path) -> None:
    """The command that makes one is named instead."""
    assert results.found("it") is None


@pytest.mark.parametrize(("first_s", "claims"), [(1.1, True), (4.0, False)])
def test_no_speed_is_claimed_of_an_uneven_machine(
    monkeypatch: pytest.MonkeyPatch, first_s: float, claims: bool
) -> None:
    """Where equal work took one server longer, its other times say nothing."""
    first = {"tiered": 1.0, "plain": first_s}
    record = {
        "ttft_s": {name: {"s0.t0": it, "s0.t1": 9.0} for name, it in first.items()},
        "summaries": {
            name: {"later_ttft_p50_s": it} for name, it in (("plain", 8), ("tiered", 2))
        },
        "equal": 40,
        "answers": 40,
        "shape": {"num_sessions": 10},
        "machine": {"cores": 2, "accelerators": []},
        "working_set_tokens": 4,
        "pool_tokens": 1,
        "load_before": 0.1,
    }
    kind = results.KINDS["demo"]
    found = results.Found(kind, (record,), "2026-01-01", "abcdef0123", True)
    monkeypatch.setattr(results, "found", lambda name: found)
    told = results.demo_line()
    assert "40 of 40 answers equal" in told
    assert ("4.0 times lower" in told) is claims
    assert ("No speed is claimed" in told) is not claims


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            {"busy": [{"adopted_when_the_window_ended": n} for n in (0, 7)]},
            "0 to 7 pages in the first minute",
        ),
        (
            {
                "busy": [{"adopting": {"seconds": 60.2}}],
                "adopted_in_the_windows": [400_000, 300_000],
                "throughput_while_scanning": 0.92,
            },
            "300,000 to 400,000 pages in 60 s; while it still reads the records it "
            "serves 92%",
        ),
    ],
)
def test_pages_taken_over_under_load_are_told_of_old_and_new_records(
    record: dict[str, object], told: str
) -> None:
    """Windows of old ones began with the scan, and said when they ended."""
    assert results._adopted(record) == told


def test_kinds_of_records_hash_what_their_programs_hash() -> None:
    """Else no record would ever be today's."""
    programs = {
        "equality": ("tests/equality/tally.py", "SOURCES"),
        "soak": ("tests/soak/__main__.py", "SOURCES"),
        "fuzz": ("tests/fuzz/__main__.py", "SOURCES"),
        "demo": ("benchmarks/serving/demo.py", "SOURCES"),
        "restart": ("benchmarks/disk/bench_restart.py", "SOURCES"),
        "reuse": ("benchmarks/serving/bench_reuse.py", "SOURCES"),
        "no-reuse": ("benchmarks/serving/bench_no_reuse.py", "SOURCES"),
        "router": ("benchmarks/cluster/against/records.py", "PRODUCT"),
        "store": ("benchmarks/cluster/against/records.py", "PRODUCT"),
    }
    kept = {
        *kinds.BENCHES,
        *(f"micro-{name}" for name in kinds.MICROS),
        *(f"sim-{name}" for name in kinds.PRINTS),
    }
    assert programs.keys() | kept == results.KINDS.keys()
    for name, (path, word) in programs.items():
        text = (ROOT / path).read_text()
        said = re.search(rf"^{word} = \((.*?)\)$", text, re.M | re.S)
        folders = tuple(re.findall(r'"([^"]+)"', said[1]))
        assert results.KINDS[name].folders == folders, name
        assert all((ROOT / folder).exists() for folder in folders), name


def test_benches_are_kept_of_the_programs_that_make_runs() -> None:
    """Under the same name, by the command that a page names."""
    makefile = (ROOT / "Makefile").read_text()
    for name, bench in kinds.BENCHES.items():
        kind = results.KINDS[name]
        target = kind.command.removeprefix("make ")
        recipe = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", makefile, re.M)
        assert f"$(BENCH) {name} {bench.program} " in recipe[1], name
        assert all((ROOT / folder).exists() for folder in kind.folders), name
    assert all((ROOT / f"benchmarks/micro/{name}.py").exists() for name in kinds.MICROS)


def test_every_program_of_the_simulator_has_its_page() -> None:
    """What the script plays, a block shows; traces are wanted for the others."""
    script = (ROOT / "scripts/sims.sh").read_text()
    always, _, with_traces = script.partition("\nif ")
    played = [
        re.findall(r"^ *play (\w+)", each, re.M) for each in (always, with_traces)
    ]
    assert {*played[0], *played[1]} == kinds.PRINTS.keys()
    for name, (page, of_traces) in kinds.PRINTS.items():
        assert of_traces == (name in played[1]), name
        text = (ROOT / f"docs/benchmarks/simulator/{page}.md").read_text()
        assert f"<!-- results: sim-{name} -->" in text, name


def test_a_print_is_told_by_the_last_run_of_each_command() -> None:
    """Its headings come one level lower; a table has an empty line on both sides."""
    first = {"command": "python benchmarks/sim/a.py 8", "exit_code": 0}
    first["printed"] = ["old"]
    again = first | {"printed": ["", "## 8 ", "| x |", "|---|", "| 1 |", "so"]}
    other = {"command": "python benchmarks/sim/a.py 9", "exit_code": 1}
    other["printed"] = ["nine"]
    assert tables.printed([first, other, again]) == (
        "`a.py 8`:\n\n### 8\n\n| x |\n|---|\n| 1 |\n\nso\n\n"
        "`a.py 9` (exit status 1):\n\nnine"
    )


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"a": 0.98765, "b": {"x": 1200, "y": True}}, "`a` 0.988, `b` x 1,200, y yes"),
        ({"b": [], "targets_missed": ["a"]}, "`b` none, missed: `a`"),
        (
            {"a": 3, "problems": ["an answer differs"]},
            "no figure counts: an answer differs",
        ),
        ({"c": 1}, ""),
    ],
)
def test_a_last_line_is_told_by_its_keys(figures: dict[str, object], told: str) -> None:
    """Of a run with problems no figure is told."""
    assert tables.key_line(figures, ("a", "b")) == told


@pytest.mark.parametrize(
    ("figures", "args", "told"),
    [
        ({"read_vs_fio": 0.98}, "", "`read_vs_fio` 0.98 (`make bench-disk`; 2026"),
        ({"read_vs_fio": 0.5}, " --quick", '0.5 (`make bench-disk ARGS="--quick"`;'),
        ({}, "", "*it ended with status 1 and no figure* (`make"),
    ],
)
def test_a_bench_is_told_with_what_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, figures: dict[str, object], args: str, told: str
) -> None:
    """So that a smoke run is not taken for a whole one, nor a failure for a record."""
    record = {
        "command": f"python benchmarks/disk/bench_disk.py{args}",
        "figures": figures,
        "exit_code": 1,
        **MACHINE,
    }
    kind = results.KINDS["disk"]
    found = results.Found(kind, (record,), "2026-01-01", "abcdef0123", True)
    monkeypatch.setattr(results, "found", lambda _: found)
    assert told in results.bench_line("disk")


def test_times_are_told_with_their_unit() -> None:
    """What is no time and no number is left out."""
    figures = {"look": {"p50_us": 1.25, "p99_us": 3.0}, "pages": 10, "clock": "cpu"}
    assert tables.times(figures) == "look 1.25 us (p99 3 us); pages 10"


def test_a_fleet_is_planned_by_simulated_work_and_measured_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet whose router was not timed has no line."""
    fleet = {"instances": 10, "stored_pages_per_s_each": 100.0, "requests_per_s": 50.0}
    cost = {
        "instances": 10,
        "bytes_per_claim": 200.0,
        "block_events_per_s": 400_000,
        "decision, all of it": {"p50_us": 200.0, "p99_us": 900.0},
    }
    figures = {
        "sim-cluster_plan": [fleet, fleet | {"instances": 20}],
        "micro-routing": cost,
    }
    kind = results.KINDS["demo"]

    def found(name: str) -> results.Found:
        record = {"command": "python x.py", "figures": figures[name]}
        return results.Found(kind, (record,), "2026-01-01", "abcdef0123", True)

    monkeypatch.setattr(results, "found", found)
    assert results.plan_table().splitlines()[2:] == [
        "| 10 | 0.1 GB | 4,000 | 1% | 50/s, 1% |"
    ]


def test_a_record_is_dated_by_itself(records: Path) -> None:
    """As ``make ... RECORD=`` writes it, nobody need commit it before it is shown."""
    facts = keeping.run_facts("make it", ROOT, ["sgl_tiered/core"])
    keeping.keep_record(records, "it", facts | {"source": "now"})
    found = results.found("it")
    assert found.when == f"{facts['date']}, {facts['commit'][:7]}"
    assert found.folder == "records"


def test_of_equal_days_the_later_run_is_the_last(records: Path) -> None:
    """Its number says which it is, also where all were made on one day."""
    for value in range(11):
        record = {"source": "now", "date": "2026-01-01", "commit": "abcdef0"}
        keeping.keep_record(records, "it", record | {"value": value})
    told = [record["value"] for record in results.found("it").records]
    assert told == list(range(11))


def test_of_one_day_the_later_source_is_the_newest(records: Path) -> None:
    """By the time in the record or in its name, never by the commit's letters."""
    facts = {"source": "old", "date": "2026-01-01", "time": "08:00:00"}
    keeping.keep_record(records, "it", facts | {"commit": "ffffff0"})
    facts |= {"source": "older", "time": "07:00:00", "commit": "ffffff1"}
    keeping.keep_record(records, "it", facts)
    assert results.found("it").commit == "ffffff0"
    results.found.cache_clear()
    stamped = records / "x-20260101T090000Z.json"
    stamped.write_text(json.dumps({"source": "x", "commit": "aaaaaa0"}))
    assert results.found("it").commit == "aaaaaa0"


def test_records_of_any_kind_may_lie_together(records: Path) -> None:
    """``RECORD=benchmarks/results`` is good for all of them."""
    keep(records, "it-now", "now", "2026-01-01")
    together = records.parent / "benchmarks/results"
    together.mkdir(parents=True)
    keep(together, "it-now", "now", "2026-01-02")
    keep(together, "not-it-now", "now", "2026-01-03")
    found = results.found("it")
    assert [record["date"] for record in found.records] == ["2026-01-01", "2026-01-02"]
    assert found.folder == "benchmarks/results"


def test_a_call_is_told_by_its_first_and_its_last_line(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was ended before its last line has no figures and is no record."""
    kind = results.Kind("records/it-*.jsonl", "make it", ("sgl_tiered",))
    monkeypatch.setattr(results, "KINDS", {"it": kind})
    facts = {"kind": "call", "source": "now", "commit": "abcdef0"}
    block = json.dumps({"kind": "block"})
    ended = json.dumps(facts | {"date": "2026-01-02"})
    (records / "it-b.jsonl").write_text(f"{ended}\n{block}\n{{")
    (records / "it-c.jsonl").write_text("")
    assert results.found("it") is None
    results.found.cache_clear()
    whole = json.dumps(facts | {"date": "2026-01-01"})
    last = json.dumps({"kind": "summary", "figures": {"lost": 0}})
    (records / "it-a.jsonl").write_text(f"{whole}\n{block}\n{last}\n")
    found = results.found("it")
    assert found.when == "2026-01-01, abcdef0"
    assert found.last["figures"] == {"lost": 0}


NO_REUSE = {
    "outputs_identical": True,
    "blocks": 30,
    "machine": {"cores": 2, "accelerators": []},
    "load_before": 0.1,
    **{
        key + end: value
        for key, value in (
            ("no_reuse_throughput_vs_plain", 0.991),
            ("no_reuse_throughput_vs_plain_disk", 0.987),
            ("no_reuse_throughput_vs_plain_first_minutes", 0.953),
            ("no_reuse_throughput_vs_plain_disk_first_minutes", 0.942),
            ("cpu_per_prompt_vs_plain", 1.008),
            ("plain_vs_plain", 1.001),
        )
        for end, value in (("", value), ("_interval", [value - 0.003, value + 0.003]))
    },
}
REUSE = {
    "outputs_identical": True,
    "machine": {"cores": 2, "accelerators": []},
    "ttft_speedup_of_bound": 0.96,
    "host_hit_penalty_vs_hicache": 0.5,
    "disk_hit_penalty_vs_hicache_file": 0.1,
    "ttft_p50_speedup_vs_plain": 8.0,
}
MACHINE = {"machine": {"cores": 2, "accelerators": []}}
ROUTER = {
    "router_p99_vs_session": 0.55,
    "router_p99_vs_session_interval": [0.5, 0.6],
    "router_p99_vs_sglang_router": 0.9,
    "router_p99_vs_sglang_router_interval": [0.8, 1.1],
    "evictions": 64,
    "lost": 0,
    "wrong": 0,
    "runs": 51,
    "repeats": {"tiered 0.45": 5},
    "alone": True,
    "targets_missed": ["router_p99_vs_sglang_router", "complete"],
}
STORE = {
    "ttft_vs_recompute": 0.4,
    "ttft_vs_recompute_interval": [0.35, 0.45],
    "lost": 0,
    "wrong": 0,
    "blocks": 5,
    "alone": False,
    "targets_missed": [],
}
ROUTERS, STORES = ({**MACHINE, "figures": told} for told in (ROUTER, STORE))


@pytest.mark.parametrize(
    ("name", "records", "told"),
    [
        ("router", [ROUTERS], "is 55.0% (50.0% to 60.0%) of that of routing by"),
        ("router", [ROUTERS], "missed: `router_p99_vs_sglang_router`, `complete`."),
        ("router", [ROUTERS | {"figures": ROUTER | {"wrong": 1}}], "no speed"),
        (
            "store",
            [STORES],
            "takes 40.0% (35.0% to 45.0%) of what computing it takes (",
        ),
        ("store", [STORES], "no GPU, beside other work). Targets missed: none."),
        ("store", [STORES | {"figures": STORE | {"wrong": 1}}], "no speed"),
        ("no-reuse", [NO_REUSE], "99.1% (98.8% to 99.4%) is left with host memory"),
        ("no-reuse", [NO_REUSE], "first minutes, before the write policy"),
        ("no-reuse", [NO_REUSE | {"outputs_identical": False}], "no speed is claimed"),
        ("reuse", [REUSE], "is 0.50 times HiCache's"),
        ("reuse", [REUSE, REUSE | {"ttft_speedup_of_bound": 0.1}, REUSE], "gives 96%"),
        ("reuse", [REUSE, REUSE | {"outputs_identical": False}], "no speed is claimed"),
    ],
)
def test_lines_of_benches_come_from_records(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    records: list[dict[str, object]],
    told: str,
) -> None:
    """Several runs are told by their medians; of other answers no speed is told."""
    kind = results.KINDS[name]
    found = results.Found(kind, tuple(records), "2026-01-01", "abcdef0123", True)
    monkeypatch.setattr(results, "found", lambda _: found)
    assert told in results.BLOCKS[f"{name}-line"]()


# --- settings ------------------------------------------------------------------------


def test_an_unknown_key_would_be_refused(tmp_path: Path) -> None:
    """So the examples have none."""
    file = tmp_path / "odd.toml"
    file.write_text('host-sise = "1GB"\n')
    with pytest.raises(ConfigError, match="host_sise"):
        read_options({"config": str(file)})


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples/settings").glob("*.toml")), ids=lambda f: f.stem
)
def test_settings_are_what_the_server_takes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every example of a file is read by the server's own reader.

    The machine is one that has what the file asks for.
    """
    monkeypatch.setattr(tier_sizes, "available_memory_bytes", lambda: 2000 * GB)
    monkeypatch.setattr(tier_sizes, "largest_bytes", lambda source: 512 * GB)
    known = tomllib.loads(file.read_text())
    # Only where disks are mounted and which node is CXL is this machine's own.
    here = {"config": str(file)}
    if "disk-path" in known:
        num = len(known["disk-path"]) if isinstance(known["disk-path"], list) else 1
        here["disk_path"] = ",".join(str(tmp_path / str(each)) for each in range(num))
    if "cxl" in known:
        here["cxl"] = "emulate:memory"
    ranks = 8 if file.stem == "eight_gpus" else 1
    read = read_options(here, num_ranks=ranks).tiers
    assert read.host_bytes == parse_size("x", known["host-size"])
    assert read.disk_bytes == parse_size("x", known["disk-size"])
