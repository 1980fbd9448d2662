"""A report follows from records, and from nothing that was not judged."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.harness.clients import emulated
from sgl_tiered_workloads.harness.errors import GateRedError, RecordsError
from sgl_tiered_workloads.harness.gating import Gate, Verdict, write_gate
from sgl_tiered_workloads.harness.report import write_report
from sgl_tiered_workloads.harness.spec import Spec, parse_spec
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records

from tests.unit.workloads.harness.harness_support import record

SPEC: dict[str, Any] = {
    "name": "<tiny>",
    "seed": 7,
    "model": {"preset": "demo"},
    "workload": {"name": "tiny"},
    "slo": {"ttft_s": 0.2},
    "systems": {"plain": {}, "tiered": {}},
}
GREEN = Verdict(True, "equality gate GREEN: all of it", 1.0)
RED = Verdict(False, "equality gate RED: s0.t1 token 0: a became b")


def leave(
    out: Path,
    gate: Gate,
    ttft_s: dict[str, float],
    spec: Spec | None = None,
    lag_s: float = 0.0,
    server: dict[str, str] | None = None,
) -> None:
    """Write what a run would have left."""
    spec = spec or parse_spec(SPEC)
    write_gate(out / "gate.json", gate)
    for name, delay_s in ttft_s.items():
        chosen = next(s for s in spec.public()["systems"] if s["name"] == name)
        facts = {"spec": spec.public(), "system": chosen, "gate": gate.status(name)}
        facts["server"] = server or {}
        header = make_header(name, facts, spec.hash, spec.seed)
        records: Sequence[RequestRecord] = [
            record(
                f"s{i}",
                float(i),
                [i + lag_s + delay_s, i + lag_s + delay_s + 0.01],
                cached={"host": 25},
                lag_s=lag_s,
            )
            for i in range(10)
        ]
        write_records(out / "records" / f"{name}.jsonl", header, records)


def green() -> Gate:
    """Return a gate that both systems passed."""
    return Gate("equality", "", "token 1 became 2", {"plain": GREEN, "tiered": GREEN})


def test_a_green_run_is_reported_in_full(tmp_path: Path) -> None:
    """Latency, goodput, hits, lag, gate and setting, in both formats."""
    leave(tmp_path, green(), {"plain": 0.3, "tiered": 0.1})
    paths = write_report(tmp_path)
    assert {path.suffix for path in paths} == {".png", ".md", ".html"}
    text = (tmp_path / "report.md").read_text()
    plain, tiered = re.findall(r"^\| (?:plain|tiered) \| 9 \| 0 \| .*$", text, re.M)
    assert "| 300.0 | 300.0 | 300.0 |" in plain
    assert "| 100.0 | 100.0 | 100.0 |" in tiered
    assert re.search(r"^\| plain \| .* 0\.000 \| 0\.0% \| 0\.0% \|$", text, re.M)
    assert re.search(r"^\| tiered \| .* 100\.0% \| 100\.0% \|$", text, re.M)
    assert "| tiered | 900 | 25.0% | 25.0% |" in text
    assert "all of it" in text
    assert parse_spec(SPEC).hash in text
    assert "client was late" not in text


def test_the_report_begins_with_what_came_out(tmp_path: Path) -> None:
    """The change of the median TTFT with its interval, and that answers are equal."""
    leave(tmp_path, green(), {"plain": 0.3, "tiered": 0.1})
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    title, heading, sentence = [line for line in text.splitlines() if line][:3]
    assert (title, heading) == ("# Benchmark <tiny>", "## Result")
    assert sentence.startswith(
        "**Tiered's median time to the first token is 66.7% shorter than plain's "
        "(300.0 -> 100.0 ms; 95 % interval -200.0 to -200.0 ms).**"
    )
    assert sentence.endswith("Their answers were compared first and are equal.")
    assert "| tiered - plain | TTFT p50 ms | 300.0 | 100.0 | -200.0 |" in text
    assert "One repeat" in text


def test_a_difference_that_is_not_shown_is_not_claimed(tmp_path: Path) -> None:
    """Nor is one system compared with itself."""
    leave(tmp_path, green(), {"plain": 0.3, "tiered": 0.3})
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**No difference between tiered and plain is shown" in text
    (tmp_path / "records/plain.jsonl").unlink()
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "One system, or no request that two of them answered." in text
    assert "## Differences" not in text


def test_the_page_stands_alone(tmp_path: Path) -> None:
    """It loads nothing, its pictures are inside, and names cannot break it."""
    leave(tmp_path, green(), {"plain": 0.3, "tiered": 0.1})
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "http" not in page
    assert "&lt;tiny&gt;" in page
    assert "<tiny>" not in page
    pictures = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert len(pictures) == 3
    for text in pictures:
        assert base64.b64decode(text).startswith(b"\x89PNG")


def test_equal_records_give_an_equal_report(tmp_path: Path) -> None:
    """The report holds no clock and no chance."""
    leave(tmp_path, green(), {"plain": 0.3, "tiered": 0.1})
    write_report(tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def test_a_red_gate_is_not_reported(tmp_path: Path) -> None:
    """However good the figures are, and an older report is not made again."""
    gate = Gate("equality", "", "x", {"plain": GREEN, "tiered": RED})
    leave(tmp_path, gate, {"plain": 0.3, "tiered": 0.1})
    with pytest.raises(GateRedError, match=r"red for tiered.*a became b"):
        write_report(tmp_path)
    assert not list(tmp_path.glob("report.*"))


def test_no_gate_is_not_green(tmp_path: Path) -> None:
    """Records without the gate's file were never judged."""
    leave(tmp_path, green(), {"plain": 0.3})
    (tmp_path / "gate.json").unlink()
    with pytest.raises(GateRedError, match="nobody compared"):
        write_report(tmp_path)


def test_a_system_that_was_never_judged_is_not_reported(tmp_path: Path) -> None:
    """A verdict on another system is none on this one."""
    gate = Gate("equality", "", "x", {"plain": GREEN})
    leave(tmp_path, gate, {"plain": 0.3, "tiered": 0.1})
    with pytest.raises(GateRedError, match="never judged tiered"):
        write_report(tmp_path)


def test_records_of_two_specifications_are_not_mixed(tmp_path: Path) -> None:
    """Two experiments in one table would be no comparison."""
    leave(tmp_path, green(), {"plain": 0.3})
    leave(tmp_path, green(), {"tiered": 0.1}, parse_spec({**SPEC, "seed": 8}))
    with pytest.raises(RecordsError, match="2 specifications"):
        write_report(tmp_path)


def test_what_is_emulated_comes_before_every_figure(tmp_path: Path) -> None:
    """Figures of tiers that were slowed down are marked as such, and no others."""
    leave(tmp_path, green(), {"tiered": 0.3}, server={"emulated": "host: delay=1"})
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| tiered | host: delay=1 |" in text
    assert text.index("## Emulated") < text.index("## Latency")
    leave(tmp_path, green(), {"plain": 0.3, "tiered": 0.1}, server={"emulated": "host"})
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**With tiers that were slowed down or made to fail on purpose, t" in text
    (tmp_path / "records/plain.jsonl").unlink()
    leave(tmp_path, green(), {"tiered": 0.3})
    write_report(tmp_path)
    assert "Emulated" not in (tmp_path / "report.md").read_text()


def test_statistics_tell_what_is_emulated() -> None:
    """The flag's words, or what stands in for a medium; nothing for real tiers."""
    media = {
        "host": {"emulated": True, "emulation": "host:delay=1", "detail": ""},
        "cxl": {"emulated": True, "emulation": "", "detail": "plain memory"},
        "disk": {"emulated": False, "emulation": "", "detail": "O_DIRECT"},
    }
    assert emulated({"media": media}) == "host: host:delay=1; cxl: plain memory"
    assert emulated({"media": {"disk": media["disk"]}}) == ""


def test_a_late_client_is_said(tmp_path: Path) -> None:
    """A client that sends late makes the load lighter than asked."""
    leave(tmp_path, green(), {"plain": 0.3}, lag_s=0.05)
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "**The client was late for plain**" in text
    assert "| plain | 50.0 | 50.0 | 50.0 |" in text


def test_a_file_that_is_no_record_file_is_named(tmp_path: Path) -> None:
    """The sentence says which file it is."""
    leave(tmp_path, green(), {"plain": 0.3})
    (tmp_path / "records/alien.jsonl").write_text("{}\n")
    with pytest.raises(RecordsError, match=r"alien\.jsonl is no record file"):
        write_report(tmp_path)
