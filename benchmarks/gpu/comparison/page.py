"""The table of a comparison, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from comparison.judging import GREEN, REFERENCE
from comparison.results import Findings, Row
from sgl_tiered_workloads.harness.page import Section, markdown

__all__ = ["DRY_WORDS", "last_line", "page", "result"]

DRY_WORDS = "dry run"
_DRY_SENTENCE = (
    "**A dry run**: a small model on a CPU, at tiny sizes. It shows that the program "
    "works; its figures say nothing of any system."
)
_FIGURES = (
    "Each system's server is started more than once, in one order and then in the "
    "opposite one. `median`: of the starts' medians, which stand beside it. `range`: "
    "the least and the most of what was repeated, starts or runs of a load. Hits of "
    "one start are no independent samples, so there is no interval. What comes first "
    "in a start does not count.",
    "TTFT: one request at a time; `computed` has nothing cached; `device`, `host`, "
    "`disk`: where the KV lay before the request (on disk: device and host emptied, "
    "page cache dropped). A hit counts if the answer says that 95 % of it came from "
    "there; `KV came from` has the others too.",
    "Without reuse: one stream of requests, so many at a time. Our offloads after "
    "the last token are in the time; other systems cannot be asked for theirs.",
    "`identical`: share of greedy answers that equal plain SGLang's to the same "
    "prompts; of plain's own rows, how often it agrees with itself (other batches "
    "and other lengths round otherwise). `gate`: answers and logprobs from below the "
    "device against plain's, where a wrong page was seen to be caught; without a "
    "green one, figures are withheld.",
    "`hicache-disk` is HiCache over its file backend, which writes a file per page "
    "from Python: the smallest of its backends, and no measure of the others.",
)


def page(
    header: Mapping[str, Any], findings: Findings, facts: Mapping[str, Any]
) -> str:
    """Return the page.

    Args:
        header: of the run.
        findings: of its cells.
        facts: what the first server told; empty where none came up.
    """
    is_dry = bool(header["dry_run"])
    begin = f"{_DRY_SENTENCE}\n\n" if is_dry else ""
    parts = [
        Section("Setting", begin + _bullets(_setting(header, findings))),
        _memory(findings.memory, is_dry),
        Section("Answers", _bullets(_answers(findings)) or "None were compared."),
        _figures(findings.rows, is_dry, _loads(header, facts)),
        _moved(findings, is_dry),
        _missing(findings, facts),
        _attempts(findings),
    ]
    if findings.problems:
        parts.append(Section("Problems", _bullets(map(_one_line, findings.problems))))
    title = f"{header['model']['path']} with KV below the device"
    return markdown(title, [part for part in parts if part.note or part.head], ())


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _setting(header: Mapping[str, Any], findings: Findings) -> list[str]:
    machine, shared, model = header["machine"], header["shared"], header["model"]
    cards = [one["name"] for one in machine["accelerators"]] or ["no accelerator"]
    commit = header["commit"][:12] or "no commit"
    dirty = ", with changes" if header["dirty"] else ""
    versions = ", ".join(
        f"{name} {version}" for name, version in header["versions"].items()
    )
    fraction = shared["mem_fraction"]
    return [
        f"{', '.join(cards)}; {machine['processor']}, {machine['cores']} cores",
        f"commit {commit}{dirty}, source {header['source']}; {versions}",
        f"model: {model['weights_bytes'] / 2**30:.2f} GiB of weights, "
        f"{model['token_bytes'] / 1024:g} KiB of KV per token",
        f"shared by all: pages of {shared['page_size']} tokens, at most "
        f"{shared['pool_tokens']:,} tokens of device pool, memory fraction "
        f"{'none' if fraction is None else fraction}, attention backend "
        f"{shared['attention_backend'] or 'that of plain SGLang'}, further flags: "
        f"{' '.join(shared['server_flags']) or 'none'}",
        f"measured on {', '.join(findings.dates) or 'no day'} (UTC)",
    ]


def _loads(header: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Say what makes the loads larger than the device."""
    pools = header["sizes"]["load_pools"]
    tokens = int(pools * facts.get("pool_tokens", header["shared"]["pool_tokens"]))
    return (
        f"The loads use about {tokens:,} tokens again, {pools:g} of the device pools "
        "that all systems are held to. `plain-uncapped` has no such limit: what it "
        "does better than `plain` is what the limit, and not a missing tier, costs."
    )


def _answers(findings: Findings) -> list[str]:
    return [
        f"{name}: {_one_line(findings.compared.get(name, gate))}"
        for name, gate in findings.gates.items()
    ]


def _memory(memory: Mapping[str, Mapping[str, Any]], is_dry: bool) -> Section:
    """Return what each system was given, and what was measured."""
    if not memory:
        return Section("Memory", "No system came up.")
    head = (
        "system",
        "device pool",
        "weights GiB",
        "graphs GiB",
        "GPU used GiB",
        "host given GB",
        "processes GiB",
        "host used GiB",
        "disk",
        "attention",
        "start s",
    )
    rows = [
        (
            name,
            f"{one['pool_tokens']:,} tokens, {one['pool_gib']} GiB",
            _text(one["weights_gib"]),
            _text(one["graphs_gib"]),
            _text(one.get("gpu_used_gib")),
            _text(one["host_gb"]),
            _text(one.get("processes_gib")),
            _text(one.get("host_used_gib")),
            one["disk"] or "none",
            one["attention_backend"],
            f"{one['start_s']:g} s{_mark(is_dry)}",
        )
        for name, one in memory.items()
    ]
    note = (
        "What a server was given and says, and the most that was measured after a "
        "cell: of the GPU by nvidia-smi, of the server's processes (a page that "
        "several share counts once; what the driver allocates is not seen), and of "
        "the whole machine."
    )
    return Section("Memory", note, head, tuple(rows))


def _text(value: object) -> str:
    return "unknown" if value is None else str(value)


def _figures(rows: Sequence[Row], is_dry: bool, loads: str) -> Section:
    if not rows:
        return Section("Figures", "Nothing was measured.")
    head = (
        "figure",
        "system",
        "median",
        "by start",
        "range",
        "samples",
        "KV came from",
        "identical",
        "gate",
        "notes",
    )
    cells = tuple(_cells(row, is_dry) for row in rows)
    return Section("Figures", _bullets((*_FIGURES, loads)), head, cells)


def _cells(row: Row, is_dry: bool) -> tuple[str, ...]:
    mark = _mark(is_dry)
    value = "none" if row.gate in (GREEN, REFERENCE) else "withheld"
    if row.value is not None:
        unit = "" if row.unit == "ratio" else f" {row.unit}"
        value = f"{_number(row.value, row.unit)}{unit}{mark}"
    starts = ", ".join(_number(one, row.unit) for one in row.starts)
    spread = ""
    if row.low is not None and row.high is not None:
        spread = f"{_number(row.low, row.unit)} to {_number(row.high, row.unit)}{mark}"
    share = "" if row.identical is None else f"{row.identical:.1%}{mark}"
    return (
        row.figure,
        row.system,
        value,
        f"{starts}{mark}" if starts else "",
        spread,
        str(row.samples),
        row.source,
        share,
        row.gate,
        row.note,
    )


def _mark(is_dry: bool) -> str:
    return f" ({DRY_WORDS})" if is_dry else ""


def _number(value: float, unit: str) -> str:
    digits = {"ratio": 4, "tokens/s": 1, "ms": 2}[unit]
    return f"{value:,.{digits}f}"


def _moved(findings: Findings, is_dry: bool) -> Section:
    """Return what the streams without reuse moved."""
    rows = []
    for name, moved in findings.moved.items():
        edges = [
            f"{edge} {num / 1e6:,.1f} MB"
            for edge, num in moved.items()
            if edge != "drain_s"
        ]
        drain = (
            f"{moved['drain_s']:.3f} s{_mark(is_dry)}" if moved else "cannot be seen"
        )
        rows.append((name, ", ".join(edges) or "not told", drain))
    if not rows:
        return Section("", "")
    note = "All starts together, and the longest time after the last token."
    head = ("system", "moved", "offloads after the last token")
    return Section("Moved without reuse", note, head, tuple(rows))


def _missing(findings: Findings, facts: Mapping[str, Any]) -> Section:
    missing: dict[str, list[str]] = {}
    for name, why in facts.get("left_out", {}).items():
        missing.setdefault(why, []).append(f"{name} tokens")
    for name, why in findings.missing.items():
        missing.setdefault(why, []).append(name)
    lines = (f"{', '.join(names)}: {_one_line(why)}" for why, names in missing.items())
    return Section("Not measured", _bullets(lines))


def _attempts(findings: Findings) -> Section:
    """Return what failed at least once, also where it was measured later."""
    if not findings.failed:
        return Section("", "")
    rows = tuple(
        (name, str(len(failed)), _one_line(failed[-1]))
        for name, failed in findings.failed.items()
    )
    head = ("cell", "attempts that failed", "the last one")
    return Section("Failed attempts", "", head, rows)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def result(
    header: Mapping[str, Any], findings: Findings, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the same as JSON."""
    told = asdict(findings)
    return {
        "header": dict(header),
        "dry_run": bool(header["dry_run"]),
        "facts": dict(facts),
        **told,
    }


def last_line(header: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the object that a run ends with: figures by name, then system."""
    prefix = "dry_run: " if header["dry_run"] else ""
    figures: dict[str, dict[str, float | None]] = {}
    for row in findings.rows:
        value = None if row.value is None else round(row.value, 4)
        figures.setdefault(f"{prefix}{row.figure} ({row.unit})", {})[row.system] = value
    return {
        "dry_run": bool(header["dry_run"]),
        "model": header["model"]["path"],
        "figures": figures,
        "gates": findings.gates,
        "not_measured": findings.missing,
        "failed_attempts": {name: len(all_) for name, all_ in findings.failed.items()},
        "problems": [_one_line(problem)[:400] for problem in findings.problems],
    }
