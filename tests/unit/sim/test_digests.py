"""The simulator's answers are those of before, case by case; see ``digests.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_model import Context
from cluster_model import COLOCATED, DECODE, PREFILL
from sgl_tiered_workloads.registry import WORKLOADS

from sgl_tiered.cache.config import DEMOTE_POLICIES, LOAD_POLICIES, WRITE_POLICIES
from sgl_tiered.policies.admission.registry import ADMISSIONS as SLO_ADMISSIONS
from sgl_tiered.policies.eviction.registry import EVICTION_POLICIES
from sgl_tiered.policies.layers.registry import TURNS
from sgl_tiered.policies.length.registry import LENGTH_PREDICTORS
from sgl_tiered.policies.order.registry import ORDERS
from sgl_tiered.policies.prefetch.registry import PREFETCH_POLICIES, PREFETCH_TARGETS
from sgl_tiered.policies.routing.registry import ROUTINGS
from sgl_tiered.policies.write_admission.registry import WRITE_ADMISSIONS
from sgl_tiered.sim.config import ADMISSIONS, LOAD_MODES
from sgl_tiered.sim.links import DISCIPLINES
from tests.unit.sim import digests
from tests.unit.sim.digest_cases import CASES, Run

NAMES = {
    "admission": ADMISSIONS,
    "arrivals": ("closed", "sessions"),
    "caching": ("0", "1", "2", "3"),
    "chunks": ("on", "off"),
    "context": tuple(context.name.lower() for context in Context),
    "demote_policy": DEMOTE_POLICIES,
    "device_eviction": EVICTION_POLICIES,
    "disk_admission": WRITE_ADMISSIONS,
    "eviction": EVICTION_POLICIES,
    "explain": ("on",),
    "instance": (COLOCATED, PREFILL, DECODE),
    "length_predictor": tuple(name.split(":")[0] for name in LENGTH_PREDICTORS),
    "link_discipline": DISCIPLINES,
    "load_mode": LOAD_MODES,
    "load_policy": LOAD_POLICIES,
    "order": ORDERS,
    "prefetch": PREFETCH_POLICIES,
    "prefetch_to": PREFETCH_TARGETS,
    "replay": ("bounds", "exclusive", "served"),
    "routing": ROUTINGS,
    "slo_admission": SLO_ADMISSIONS,
    "tier": ("host", "cxl", "disk"),
    "turns": TURNS,
    "workload": tuple(WORKLOADS),
    "write_policy": WRITE_POLICIES,
}
"""All that must take part somewhere. Sparsity is not simulated."""
KINDS = {
    "queued",
    "prefill",
    "token",
    "finished",
    "retracted",
    "aborted",
    "stage",
    "staged",
    "promoted",
    "offload",
    "offloaded",
    "offload_lost",
    "demoted",
}
"""Of the event log, by sim/README.md."""


@pytest.mark.parametrize("case", CASES)
def test_a_case_answers_as_before(case: str) -> None:
    """Events, records and figures are those in the file."""
    told = digests.differences(case, digests.compute(case), digests.kept())
    assert not told, "\n".join([*told, digests.HINT])


def test_the_file_has_these_cases() -> None:
    """Thirty, of which none is forgotten in the file and none left over."""
    assert {name.split("/")[0] for name in digests.kept()} == set(CASES)
    assert len(CASES) == 30


@pytest.mark.parametrize("what", NAMES)
def test_every_policy_takes_part_in_a_case(what: str) -> None:
    """A new one asks for a case, or for a place in one."""
    uses = {use for entry in digests.kept().values() for use in entry["uses"]}
    missing = [name for name in NAMES[what] if f"{what}:{name}" not in uses]
    assert not missing, f"no case of digest_cases.py uses {what} {', '.join(missing)}"


def test_every_kind_of_event_is_in_some_log() -> None:
    """Loads, losses and refusals too."""
    kinds = {kind for entry in digests.kept().values() for kind in entry["kinds"]}
    assert not KINDS - kinds


def test_a_renewal_names_a_fault() -> None:
    """Not one without, and of runs that the cases had."""
    renewed = json.loads(digests.FILE.read_text(encoding="utf-8"))["renewed"]
    for renewal in renewed:
        assert len(renewal["fault"].split()) > 3
        assert renewal["runs"]


ROWS = [(0.5 * number, "token", number, 1.0, 0.0) for number in range(200)]


@pytest.fixture
def run() -> Run:
    """A run of 200 rows."""
    return Run("", ROWS, {"end_s": 1.0}, {"records": [[1, 2.0]]}, {"order:fcfs"})


def test_one_moved_event_is_found(run: Run) -> None:
    """And between which rows it is."""
    entries = {"plain": digests.entry_of(run)}
    assert not digests.differences("plain", {"plain": run}, entries)
    moved = list(ROWS)
    moved[130] = (65.00000000000001, "token", 130, 1.0, 0.0)
    told = digests.differences("plain", {"plain": replace(run, rows=moved)}, entries)
    assert "other rows" in told[0]
    assert "one of 128 to 191" in told[-1]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": ROWS[:-1]},
        {"figures": {"end_s": 1.5}},
        {"details": {"records": [[1, 2.5]]}},
        {"uses": {"order:car"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_other_part_is_found(run: Run, change: dict[str, Any]) -> None:
    """Fewer rows, a figure, a record, a policy that no longer takes part."""
    entries = {"plain": digests.entry_of(run)}
    assert digests.differences("plain", {"plain": replace(run, **change)}, entries)


def test_runs_that_come_or_go_are_found(run: Run) -> None:
    """One that the file lacks, and one that it has too many."""
    entries = {"plain": digests.entry_of(run), "plain/two": digests.entry_of(run)}
    told = digests.differences("plain", {"plain": run, "plain/three": run}, entries)
    assert [line.split(":")[0] for line in told] == ["plain/two", "plain/three"]


def test_a_difference_is_not_renewed_without_a_fault(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one it is, and the file keeps the sentence."""
    monkeypatch.setattr(digests, "FILE", tmp_path / "digests.json")
    monkeypatch.setattr(digests, "compute", lambda case: {case: run})
    assert digests._write(["plain"], "") == 0
    assert digests._write(["plain"], "") == 0
    other = replace(run, rows=ROWS[:-1])
    monkeypatch.setattr(digests, "compute", lambda case: {case: other})
    before = digests.FILE.read_text()
    assert digests._write(["plain"], "") == 1
    assert digests.FILE.read_text() == before
    assert digests._write(["plain"], "the last token was counted twice") == 0
    content = json.loads(digests.FILE.read_text())
    assert content["renewed"] == [
        {"fault": "the last token was counted twice", "runs": ["plain"]}
    ]
    assert content["runs"]["plain"] == digests.entry_of(other)
