"""What a comparison left behind, read back and checked before anything is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_tiered_workloads.harness.errors import GateRedError, RecordsError
from sgl_tiered_workloads.harness.gating import Gate, read_gate
from sgl_tiered_workloads.harness.metrics import Metrics, Slos, Window, measure
from sgl_tiered_workloads.records import RequestRecord, RunHeader, read_records

__all__ = ["GATE_FILE", "Results", "SystemResult", "load_results", "read_side"]

GATE_FILE = "gate.json"


@dataclass(frozen=True, slots=True)
class SystemResult:
    """One system: its records and the figures that follow from them."""

    header: RunHeader
    records: tuple[RequestRecord, ...]
    metrics: Metrics

    @property
    def name(self) -> str:
        """The system's name."""
        return self.header.system


@dataclass(frozen=True, slots=True)
class Results:
    """A comparison that may be reported.

    Attributes:
        spec: as its records tell it.
        window, slos: of that specification.
        gate: not red.
        systems: in the specification's order.
    """

    spec: Mapping[str, Any]
    window: Window
    slos: Slos
    gate: Gate
    systems: tuple[SystemResult, ...]


def read_side(path: Path) -> tuple[RunHeader, list[RequestRecord]]:
    """Read one record file.

    Raises:
        RecordsError: it is none.
        OSError: it cannot be read.
    """
    try:
        return read_records(path)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordsError(
            f"{path.name} is no record file of this version ({error}); give a file "
            "that `bench run` wrote."
        ) from error


def load_results(out: Path) -> Results:
    """Read the folder of a comparison.

    Raises:
        GateRedError: the gate is red, or nobody looked.
        RecordsError: there are no records, or not of one specification.
    """
    if not out.is_dir():
        raise RecordsError(f"{out} is no folder; give the --out of a `bench run`.")
    gate = read_gate(out / GATE_FILE)
    gate.require_green()
    files = [read_side(path) for path in sorted((out / "records").glob("*.jsonl"))]
    if not files:
        raise RecordsError(f"{out.name} holds no records; run the comparison first.")
    hashes = {header.spec_hash for header, _ in files}
    if len(hashes) > 1:
        raise RecordsError(
            f"{out.name} holds records of {len(hashes)} specifications; remove the "
            "older ones or use another folder."
        )
    spec: Mapping[str, Any] = files[0][0].facts["spec"]
    window, slos = Window(**spec["window"]), Slos(**spec["slos"])
    found = {}
    for header, records in files:
        _require_judged(header, gate)
        metrics = measure(records, window, slos)
        found[header.system] = SystemResult(header, tuple(records), metrics)
    order = [system["name"] for system in spec["systems"] if system["name"] in found]
    return Results(spec, window, slos, gate, tuple(found[name] for name in order))


def _require_judged(header: RunHeader, gate: Gate) -> None:
    """Refuse a system that was started here and yet never compared."""
    external = bool(header.facts["system"]["url"])
    if gate.kind == "equality" and not external and header.system not in gate.verdicts:
        raise GateRedError(
            f"The gate never judged {header.system}, so its speed is not reported; run "
            "the comparison again."
        )
