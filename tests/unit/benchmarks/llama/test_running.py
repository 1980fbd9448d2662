"""The run on played systems, and the program."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import pytest

from tests.unit.benchmarks.llama.llama_support import (
    MEMORY,
    POOL,
    TOKENS,
    PlayedServer,
    folder_of_model,
    shared,
    small_sizes,
)
from tests.unit.benchmarks.played import played_fleet


@pytest.fixture
def comparison(parts, measured, tmp_path, monkeypatch):
    """Return a function that runs a comparison of played systems."""

    async def no_load(name, *rest):
        return {
            "groups": 1,
            "figures": {"output_throughput": 1.0},
            "ttfts": [0.1],
            "cache_report": {},
            "answers": ["a"],
        }

    given = MEMORY | {"pool_tokens": POOL}
    monkeypatch.setattr(parts.run, "given_memory", lambda *_: given)
    monkeypatch.setattr(parts.run, "measured_memory", lambda _: {"gpu_used_gib": 1.0})
    monkeypatch.setattr(parts.measure, "run_load", no_load)
    model = parts.settings.Model.of(folder_of_model(tmp_path / "model"))
    said: list[str] = []

    def run(*systems: str, broken=(), make=None, lengths=(TOKENS,)):
        sizes = dataclasses.replace(small_sizes(parts), lengths=lengths)
        fleet = played_fleet(make or (lambda spec: PlayedServer(spec.name)), broken)
        monkeypatch.setattr(parts.run, "Fleet", fleet)
        store = parts.store.Store(tmp_path / "out")
        header = parts.settings.header(
            model, shared(parts), sizes, systems, dry_run=True
        )
        header = store.begin(header)
        one = parts.run.Comparison(
            model, shared(parts), sizes, systems, store, None, header, said.append
        )
        asyncio.run(one.run())
        line, text = one.finish()
        cells = {path.stem for path in (tmp_path / "out/cells").iterdir()}
        return SimpleNamespace(
            line=line, text=text, said=said, started=fleet.started, cells=cells
        )

    return run


def test_a_comparison_runs_to_its_page_and_goes_on_where_it_stopped(
    comparison, tmp_path
):
    """Each system once more only where something is left to measure."""
    ran = comparison("plain", "tiered", "tiered-disk")
    assert not ran.line["problems"]
    there = ["plain", "tiered", "tiered-disk"]
    assert ran.started == [*there, *there[::-1]]
    assert ran.line["gates"]["tiered"] == "green"
    names = set(ran.line["figures"])
    assert "dry_run: TTFT, 64 tokens, host (ms)" in names
    assert "dry_run: TTFT, 64 tokens, disk (ms)" in names
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {
        "cells",
        "chart.png",
        "facts.json",
        "header.json",
        "records",
        "result.json",
        "table.md",
    }
    again = comparison("plain", "tiered", "tiered-disk")
    assert again.started == []
    assert again.text == ran.text
    (out / "cells/tiered.ttft.64.1.json").unlink()
    assert comparison("plain", "tiered", "tiered-disk").started == ["tiered"]


def test_a_system_that_does_not_start_stops_no_other(comparison):
    """It is tried once, told with its reason, and the others are measured."""
    ran = comparison("plain", "tiered", "hicache", "lmcache", broken=["tiered"])
    assert ran.started.count("tiered") == 1
    told = "unrecognized arguments: --odd"
    assert all(told in why for why in ran.line["problems"])
    assert ran.line["gates"]["hicache"] == "green"
    assert any(
        name.startswith("lmcache.") and "needs CUDA" in why
        for name, why in ran.line["not_measured"].items()
    )
    assert set(ran.line["failed_attempts"].values()) == {1}


class Fragile(PlayedServer):
    """Fails at hits of a length, and may end with it."""

    ends = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_gone = False

    def exit_code(self):
        return -9 if self.is_gone else None

    def answer(self, request, order, wishes=None):
        if request.key == "p1" and self.spec.name == "tiered":
            self.is_gone = self.ends
            raise KeyError("no field of this name")
        return super().answer(request, order, wishes)


def test_whatever_a_cell_ends_with_the_others_are_measured(comparison):
    """Also what nobody thought of; the server goes on if it answers."""

    class Odd(Fragile):
        ends = False

    ran = comparison("plain", "tiered", make=lambda spec: Odd(spec.name))
    assert ran.started == ["plain", "tiered", "tiered", "plain"]
    missing = ran.line["not_measured"]
    assert set(missing) == {"tiered.ttft.64.0", "tiered.ttft.64.1"}
    assert "KeyError: 'no field of this name'" in missing["tiered.ttft.64.0"]
    assert "dry_run: shared-prefix, TTFT p50 (ms)" in ran.line["figures"]


def test_a_server_that_ends_is_started_once_more(comparison):
    """For the cells behind the one that it ended with, which is not tried again."""
    ran = comparison("plain", "tiered", make=lambda spec: Fragile(spec.name))
    assert ran.started == ["plain", "tiered", "tiered", "tiered", "tiered", "plain"]
    missing = ran.line["not_measured"]
    assert set(missing) == {"tiered.ttft.64.0", "tiered.ttft.64.1"}
    assert "the server ended with code -9" in missing["tiered.ttft.64.0"]
    assert set(ran.line["failed_attempts"].values()) == {1}
    again = comparison("plain", "tiered")
    assert not again.line["not_measured"]
    assert set(again.line["failed_attempts"].values()) == {1}
    assert "| tiered.ttft.64.0 | 1 |" in again.text


def test_a_server_that_ends_twice_is_given_up(comparison):
    """What is left of its start says why, and the other systems are measured."""

    class Mortal(Fragile):
        def answer(self, request, order, wishes=None):
            if self.spec.name == "hicache":
                self.is_gone = True
                raise ConnectionResetError("gone")
            return super().answer(request, order, wishes)

    systems = ("plain", "hicache", "tiered-disk")
    ran = comparison(*systems, make=lambda spec: Mortal(spec.name))
    assert ran.started.count("hicache") == 4
    missing = ran.line["not_measured"]
    lost = [why for why in missing.values() if why.startswith("its server was lost 2")]
    assert lost
    assert all(name.startswith("hicache") for name in missing)
    assert ran.line["gates"]["tiered-disk"] == "green"


def test_lengths_that_do_not_fit_are_not_given_up_with_the_others(comparison):
    """The first server says what fits, and may be lost then."""

    class Mortal(Fragile):
        def answer(self, request, order, wishes=None):
            self.is_gone = True
            raise ConnectionResetError("gone")

    ran = comparison("plain", make=lambda spec: Mortal(spec.name), lengths=(64, 512))
    assert "plain.ttft.64.0" in ran.cells
    assert not [name for name in ran.cells if ".512." in name]
    assert "512 tokens: the device pool has 160 tokens" in ran.text


def test_a_server_that_answers_no_more_counts_as_one_that_ended(comparison):
    """Each further cell would wait for its time-out."""

    class Deaf(Fragile):
        ends = False

        def flush_cache(self, timeout_s=0.0):
            if timeout_s and self.spec.name == "tiered":
                raise TimeoutError("timed out")
            super().flush_cache()

    ran = comparison("plain", "tiered", make=lambda spec: Deaf(spec.name))
    assert ran.started.count("tiered") == 4
    told = ran.line["not_measured"]["tiered.ttft.64.0"]
    assert "the server answers no more" in told


def test_without_plain_others_are_measured_and_their_figures_withheld(comparison):
    """There is nothing to compare their answers with; the cells are kept."""
    ran = comparison("plain", "tiered", broken=["plain"])
    assert "plain SGLang has no answers" in ran.line["gates"]["tiered"]
    figures = ran.line["figures"]["dry_run: TTFT, 64 tokens, host (ms)"]
    assert figures == {"tiered": None}
    assert "tiered.ttft.64.0" in ran.cells


def test_a_pool_without_a_limit_does_not_size_what_is_measured(
    comparison, parts, monkeypatch
):
    """Where plain does not start, another one with the limit says how large it is."""
    monkeypatch.setattr(parts.run, "absent", lambda *_, **__: "")
    ran = comparison("plain", "plain-uncapped", "tiered", broken=["plain"])
    assert ran.started[:2] == ["plain", "tiered"]


def test_nothing_that_starts_is_a_page_too(comparison):
    """With the reason of each."""
    ran = comparison("plain", "tiered", broken=["plain", "tiered"])
    assert ran.line["figures"] == {}
    assert len(ran.line["problems"]) == 2
    assert all("--odd" in problem for problem in ran.line["problems"])
    assert len(ran.line["not_measured"]) > 2
    assert "No system came up." in ran.text


def test_a_chart_that_breaks_leaves_the_table(comparison, parts, monkeypatch, tmp_path):
    """It is written before anything is drawn."""
    written = []

    def draw(path, header, findings):
        written.append((tmp_path / "out/table.md").read_text())
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(parts.run, "draw", draw)
    ran = comparison("plain", "tiered")
    assert "## Figures" in written[0]
    assert any("there is no chart" in one for one in ran.line["problems"])
    assert "there is no chart" in (tmp_path / "out/table.md").read_text()


def test_wrong_arguments_are_one_sentence_and_exit_status_2(
    load, parts, tmp_path, capsys, monkeypatch
):
    """Nothing is started."""
    program = load("llama")
    monkeypatch.setattr(program, "make_model", lambda *_: pytest.fail("a model"))
    absent = str(tmp_path / "absent")
    file = tmp_path / "file"
    file.write_text("x")
    for arguments in (
        ["--model", absent],
        ["--dry-run", "--model", absent],
        ["--dry-run", "--systems", "plain", "odd"],
        ["--dry-run", "--lengths", "100"],
    ):
        assert program.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("llama.py: --")
        assert captured.err.count("\n") == 1
        assert "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()
    model = folder_of_model(tmp_path / "model")
    monkeypatch.setattr(program, "make_model", lambda *_: model)
    assert program.main(["--dry-run", "--out", str(file)]) == 2
    assert "is a file" in capsys.readouterr().err


def test_without_a_model_a_run_is_refused(load, parts, tmp_path, capsys):
    """A dry run makes its own one."""
    program = load("llama")
    assert program.main(["--out", str(tmp_path / "out")]) == 2
    assert "--model: name the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "status"),
    [(KeyboardInterrupt(), 130), (SystemExit(1), 130), (ValueError("odd"), None)],
)
def test_a_run_that_ends_before_its_time_makes_its_table(
    load, parts, tmp_path, capsys, monkeypatch, problem, status
):
    """Stopped, or by a fault of its own, whose traceback follows."""
    program = load("llama")

    class Ending:
        async def run(self):
            raise problem

        def finish(self):
            return {"problems": [], "figures": {}}, "# the table"

    monkeypatch.setattr(program, "_prepare", lambda *_: Ending())
    monkeypatch.setattr(program, "exit_on_signals", lambda: None)
    if status is None:
        with pytest.raises(ValueError, match="odd"):
            program.main([])
    else:
        assert program.main([]) == status
    lines = capsys.readouterr().out.splitlines()
    assert "# the table" in lines
    assert json.loads(lines[-1]).keys() == {"problems", "figures", "seconds"}
