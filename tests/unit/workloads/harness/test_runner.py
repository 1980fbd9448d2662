"""A comparison judges first, measures in turns, and writes records that explain it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import pytest
from sgl_tiered_workloads.gate import NegativeControlError
from sgl_tiered_workloads.harness import runner
from sgl_tiered_workloads.harness.errors import (
    GateRedError,
    HarnessError,
    RecordsError,
)
from sgl_tiered_workloads.harness.gating import read_gate
from sgl_tiered_workloads.harness.report import write_report
from sgl_tiered_workloads.harness.runner import (
    Comparison,
    records_path,
    server_specs,
)
from sgl_tiered_workloads.harness.spec import parse_spec
from sgl_tiered_workloads.records import read_records
from sgl_tiered_workloads.server import ServerSpec
from sgl_tiered_workloads.sessions import PlannedRequest

from tests.unit.workloads.harness.harness_support import (
    VOCAB,
    StandIn,
    tiny_workload,
)

SPEC: dict[str, Any] = {
    "name": "tiny",
    "seed": 7,
    "repeats": 2,
    "model": {"path": "some/model", "vocab_tokens": VOCAB},
    "device": {"page_size": 16, "pool_tokens": 1024},
    "workload": {"name": "tiny"},
    "slo": {"ttft_s": 5.0},
    "gate": {"requests": 6},
    "systems": {"plain": {}, "tiered": {"flags": ["--some-folder", "{store}"]}},
}


class FakeServer:
    """A running server, as far as the harness asks."""

    def __init__(self, spec: ServerSpec, url: str, log: list[str]) -> None:
        self.spec = spec
        self.url = url
        self._log = log

    def flush_cache(self) -> None:
        """Note that the caches were emptied."""
        self._log.append(f"flush {self.spec.name}")


class FakeFleet:
    """Stands for real servers; notes who runs.

    Class attributes, because the runner makes the fleet itself.
    """

    urls: ClassVar[Mapping[str, str]]
    log: ClassVar[list[str]]

    def __init__(self, specs: Mapping[str, ServerSpec], *_: object) -> None:
        self._specs = specs
        self.servers: dict[str, FakeServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.log.append("stop all")

    async def only(self, names: Iterable[str], warm_up: PlannedRequest) -> None:
        """Let exactly these run."""
        wanted = list(names)
        self.log.append("run " + " ".join(wanted))
        self.servers = {
            name: FakeServer(self._specs[name], self.urls[name], self.log)
            for name in wanted
        }


def play(
    spec: Mapping[str, Any],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    stand_ins: Mapping[str, StandIn] | None = None,
) -> list[str]:
    """Run a comparison against stand-ins; returns what the fleet was told."""
    log: list[str] = []

    async def quiet(*_: object) -> None:
        log.append("settle")

    async def run() -> None:
        async with AsyncExitStack() as stack:
            names = ["gate-reference", "gate-plain", *spec["systems"]]
            chosen = {name: StandIn() for name in names} | dict(stand_ins or {})
            urls = {}
            for name, stand_in in chosen.items():
                urls[name] = (await stack.enter_async_context(stand_in.serve())).url
            filled = copy.deepcopy(dict(spec))
            for name, system in filled["systems"].items():
                if system.get("url") == "filled in":
                    system["url"] = urls[name]
            monkeypatch.setattr(FakeFleet, "urls", urls, raising=False)
            monkeypatch.setattr(FakeFleet, "log", log, raising=False)
            monkeypatch.setattr(runner, "Fleet", FakeFleet)
            monkeypatch.setattr(runner, "settle", quiet)
            comparison = Comparison(
                parse_spec(filled),
                out,
                out / "models",
                say=lambda _: None,
                make=tiny_workload,
                quiet=True,
            )
            await comparison.run()

    asyncio.run(run())
    return log


def test_the_gate_comes_first_and_repeats_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server runs at a time, and who begins changes with the repeat."""
    log = play(SPEC, tmp_path, monkeypatch)
    turns = [line for line in log if line.startswith("run")]
    assert turns == [
        "run gate-reference",
        "run plain",
        "run tiered",
        "run tiered",
        "run plain",
        "run plain",
        "run tiered",
    ]
    assert log[-1] == "stop all"
    gate = read_gate(tmp_path / "gate.json")
    assert gate.red == []
    assert gate.verdicts["tiered"].exact_fraction == 1.0
    assert gate.control


def test_all_servers_may_run_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is stopped between repeats; caches are emptied all the same."""
    log = play({**SPEC, "together": True}, tmp_path, monkeypatch)
    after_gate = log[log.index("run plain tiered") :]
    assert {line for line in after_gate if line.startswith("run")} == {
        "run plain tiered"
    }
    emptied = [line for line in after_gate if line.startswith("flush")]
    assert emptied == ["flush tiered", "flush plain", "flush plain", "flush tiered"]


def test_an_older_runs_results_do_not_survive_a_red_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was reported before must not pass for the new run's report."""
    play(SPEC, tmp_path, monkeypatch)
    write_report(tmp_path)
    with pytest.raises(GateRedError):
        play(SPEC, tmp_path, monkeypatch, {"tiered": StandIn(wrong=True)})
    assert not (tmp_path / "report.md").exists()
    assert not (tmp_path / "records").exists()


def test_records_explain_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec hash, seed, gate and versions in the header; raw times in the lines."""
    play(SPEC, tmp_path, monkeypatch)
    header, records = read_records(records_path(tmp_path, "tiered"))
    assert header.spec_hash == parse_spec(SPEC).hash
    assert header.seed == 7
    assert header.facts["gate"] == "green"
    assert header.facts["server"] == {"version": "9.9"}
    assert header.versions["numpy"] != "absent"
    assert str(tmp_path) not in json.dumps([header.facts, header.machine])
    assert len(records) == 2 * 6
    assert {r.repeat for r in records} == {0, 1}
    assert all(len(r.token_times_s) == 4 for r in records)
    assert all(r.targeted_s <= r.started_s <= r.token_times_s[0] for r in records)


def test_systems_get_the_same_work_and_repeats_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts depend on the repeat's seed, never on the system."""
    play(SPEC, tmp_path, monkeypatch)
    work = {}
    for name in ("plain", "tiered"):
        _, records = read_records(records_path(tmp_path, name))
        work[name] = {(r.repeat, r.key): r.prompt for r in records}
    assert work["plain"] == work["tiered"]
    assert work["plain"][0, "s0.t0"] != work["plain"][1, "s0.t0"]
    # The second turn carries the model's own answer to the first.
    assert len(work["plain"][0, "s0.t1"]) == len(work["plain"][0, "s0.t0"]) + 4 + 40


def test_a_red_gate_stops_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No records, no report, and the gate's file says why."""
    with pytest.raises(GateRedError, match="red for tiered"):
        play(SPEC, tmp_path, monkeypatch, {"tiered": StandIn(wrong=True)})
    assert not (tmp_path / "records").exists()
    assert read_gate(tmp_path / "gate.json").red == ["tiered"]
    with pytest.raises(GateRedError, match="no speed is reported"):
        write_report(tmp_path)


def test_plain_is_not_judged_by_the_spread_that_it_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may recompute what the reference reuses, and others may move as far."""
    moved = {"cached": {"device": 16}, "shift": 0.1}
    stand_ins = {"plain": StandIn(**moved), "tiered": StandIn(**moved)}
    spec = copy.deepcopy(SPEC)
    spec["gate"]["min_exact_fraction"] = 0.0
    play(spec, tmp_path, monkeypatch, stand_ins)
    gate = read_gate(tmp_path / "gate.json")
    assert gate.red == []
    assert "0 under the near-tie rule" in gate.verdicts["plain"].summary
    assert "6 under the near-tie rule" in gate.verdicts["tiered"].summary
    stand_ins = {"plain": StandIn(**moved), "tiered": StandIn(**moved | {"shift": 0.2})}
    with pytest.raises(GateRedError, match="red for tiered"):
        play(spec, tmp_path, monkeypatch, stand_ins)


def test_a_plain_that_fails_in_the_gate_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no spread to judge others by then."""
    with pytest.raises(HarnessError, match="Plain SGLang failed"):
        play(SPEC, tmp_path, monkeypatch, {"plain": StandIn(status=503)})


def test_a_gate_that_notices_nothing_is_no_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers do not depend on the prompt, the negative control fails."""

    class Parrot(StandIn):
        def _ids(self, prompt: Any, num_tokens: int) -> list[int]:
            return list(range(7, 7 + num_tokens))

    names = ("gate-reference", "plain", "tiered")
    with pytest.raises(NegativeControlError):
        play(SPEC, tmp_path, monkeypatch, {name: Parrot() for name in names})


def test_a_tier_that_must_serve_and_does_not_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal answers of an idle tier prove nothing about it."""
    spec = copy.deepcopy(SPEC)
    spec["systems"]["tiered"]["must_cover"] = ["host"]
    with pytest.raises(GateRedError, match="no exact answer used the host tier"):
        play(spec, tmp_path, monkeypatch)


def test_a_foreign_server_is_driven_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither started nor emptied nor judged, and the report says so."""
    spec = copy.deepcopy(SPEC)
    spec["systems"] = {
        "peer": {"url": "filled in", "api": "openai-completions", "model": "llama"}
    }
    spec["gate"] = {"kind": "off", "because": "another engine"}
    peer = StandIn(cached={"x": 5})
    log = play(spec, tmp_path, monkeypatch, {"peer": peer})
    assert log == ["stop all"]
    assert len(peer.bodies) == 12
    header, _ = read_records(records_path(tmp_path, "peer"))
    assert header.facts["gate"] == "not judged"
    assert peer.url not in json.dumps(header.facts)
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**The answers were not compared**: another engine." in text
    assert "unattributed" in text


def test_sessions_need_the_ids_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat whose second turn lacks the answer would measure something else."""
    spec = copy.deepcopy(SPEC)
    spec["systems"] = {"peer": {"url": "filled in", "api": "openai-completions"}}
    spec["systems"]["peer"]["extensions"] = False
    spec["gate"] = {"kind": "off", "because": "another engine"}
    with pytest.raises(HarnessError, match="give the system a tokenizer"):
        play(spec, tmp_path, monkeypatch)


def test_failures_are_counted_and_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses all gives records of failures, and no figure."""
    spec = copy.deepcopy(SPEC)
    spec["systems"] = {"peer": {"url": "filled in"}}
    spec["gate"] = {"kind": "off", "because": "another engine"}
    play(spec, tmp_path, monkeypatch, {"peer": StandIn(status=503)})
    _, records = read_records(records_path(tmp_path, "peer"))
    assert len(records) == 2 * 3
    assert all(r.error is not None for r in records)
    with pytest.raises(RecordsError, match="answered"):
        write_report(tmp_path)


def test_servers_differ_in_their_own_flags_only(tmp_path: Path) -> None:
    """Each store has a folder of its own; the reference has the large pool."""
    spec = parse_spec({**SPEC, "device": {**SPEC["device"], "flags": ["--all"]}})
    specs = server_specs(spec, tmp_path / "model", tmp_path)
    plain, tiered = specs["plain"].flags, specs["tiered"].flags
    assert "--all" in plain
    assert tiered == (*plain, "--some-folder", str(tmp_path / "stores/tiered"))
    assert specs["gate-plain"].flags == plain
    reference = specs["gate-reference"].flags
    pool = reference.index("--max-total-tokens") + 1
    assert (plain[pool], reference[pool]) == ("1024", "65536")
