"""The table of a comparison, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from comparison.results import Findings, Row

__all__ = ["DRY_WORDS", "last_line", "markdown", "memory_lines", "result"]

DRY_WORDS = "dry run"
_DRY_SENTENCE = (
    "**A dry run**: a small model on a CPU, at tiny sizes. It shows that the program "
    "works; its figures say nothing of any system."
)


def markdown(
    header: Mapping[str, Any], findings: Findings, left_out: Mapping[str, str]
) -> str:
    """Return the page.

    Args:
        header: of the run.
        findings: of its cells.
        left_out: lengths that were not measured, and why.
    """
    is_dry = bool(header["dry_run"])
    lines = [f"# {header['model']['path']} with KV below the device", ""]
    if is_dry:
        lines += [_DRY_SENTENCE, ""]
    lines += [*_facts(header), ""]
    lines += ["## Memory", "", *memory_lines(findings.memory, is_dry), ""]
    lines += ["## Answers", "", *_answers(findings), ""]
    lines += ["## Figures", "", *_figures(findings.rows, is_dry), ""]
    lines += _NOTES
    missing: dict[str, list[str]] = {}
    for name, why in left_out.items():
        missing.setdefault(why, []).append(f"{name} tokens")
    for name, why in findings.missing.items():
        missing.setdefault(why, []).append(name)
    if missing:
        lines += ["", "## Not measured", ""]
        lines += [f"- {', '.join(names)}: {why}" for why, names in missing.items()]
    if findings.problems:
        lines += ["", "## Problems", ""]
        lines += [f"- {_one_line(problem)}" for problem in findings.problems]
    return "\n".join(lines) + "\n"


_NOTES = [
    "- TTFT: one request at a time; `computed` has nothing cached; `device`, `host`, "
    "`disk`: where the KV lay before the request (on disk: device and host emptied, "
    "page cache dropped). `KV came from`: what the answers said of the hit's length.",
    "- `identical`: share of greedy answers that equal plain SGLang's to the same "
    "prompts; of plain's own rows, how often it agrees with itself (other batches and "
    "other lengths round otherwise). "
    "`gate`: answers and logprobs from below the device against plain's, where a wrong "
    "page was seen to be caught; figures of a red system are withheld.",
]


def _answers(findings: Findings) -> list[str]:
    if not findings.gates:
        return ["None were compared."]
    return [
        f"- {name}: {_one_line(findings.compared.get(name, gate))}"
        for name, gate in findings.gates.items()
    ]


def _facts(header: Mapping[str, Any]) -> list[str]:
    machine, shared, model = header["machine"], header["shared"], header["model"]
    cards = [one["name"] for one in machine["accelerators"]] or ["no accelerator"]
    commit = header["commit"][:12] or "no commit"
    dirty = ", with changes" if header["dirty"] else ""
    versions = ", ".join(
        f"{name} {version}" for name, version in header["versions"].items()
    )
    fraction = shared["mem_fraction"]
    told = [
        f"{', '.join(cards)}; {machine['processor']}, {machine['cores']} cores",
        f"commit {commit}{dirty}, source {header['source']}; {versions}",
        f"model: {model['weights_bytes'] / 2**30:.2f} GiB of weights, "
        f"{model['token_bytes'] / 1024:g} KiB of KV per token",
        f"shared by all: pages of {shared['page_size']} tokens, at most "
        f"{shared['pool_tokens']:,} tokens of device pool, memory fraction "
        f"{'none' if fraction is None else fraction}, attention backend "
        f"{shared['attention_backend'] or 'that of plain SGLang'}, further flags: "
        f"{' '.join(shared['server_flags']) or 'none'}",
    ]
    return [f"- {line}" for line in told]


def memory_lines(
    memory: Mapping[str, Mapping[str, Any]], is_dry: bool = False
) -> list[str]:
    """Return the table of what each system had."""
    head = (
        "system",
        "device pool",
        "weights GiB",
        "graphs GiB",
        "host GB",
        "disk",
        "attention",
        "start s",
    )
    rows = [
        (
            name,
            f"{one['pool_tokens']:,} tokens, {one['pool_gib']} GiB",
            one["weights_gib"],
            one["graphs_gib"],
            one["host_gb"],
            one["disk"] or "none",
            one["attention_backend"],
            _number(one["start_s"], "s", is_dry),
        )
        for name, one in memory.items()
    ]
    return _table(head, rows) if rows else ["No system came up."]


def _figures(rows: Sequence[Row], is_dry: bool) -> list[str]:
    if not rows:
        return ["Nothing was measured."]
    head = (
        "figure",
        "system",
        "median",
        "95 % interval",
        "samples",
        "KV came from",
        "identical",
        "gate",
    )
    return _table(head, [_cells(row, is_dry) for row in rows])


def _cells(row: Row, is_dry: bool) -> tuple[str, ...]:
    value = "withheld" if row.gate == "red" else "none"
    if row.value is not None:
        value = _number(row.value, row.unit, is_dry)
    interval = ""
    mark = _mark(is_dry)
    if row.low is not None and row.high is not None:
        low, high = _plain(row.low, row.unit), _plain(row.high, row.unit)
        interval = f"{low} to {high}{mark}"
    share = "" if row.identical is None else f"{row.identical:.1%}{mark}"
    return (
        row.figure,
        row.system,
        value,
        interval,
        str(row.samples),
        row.source,
        share,
        row.gate,
    )


def _number(value: float, unit: str, is_dry: bool) -> str:
    return f"{_plain(value, unit)}{_mark(is_dry)}"


def _mark(is_dry: bool) -> str:
    return f" ({DRY_WORDS})" if is_dry else ""


def _plain(value: float, unit: str) -> str:
    if unit == "ratio":
        return f"{value:.4f}"
    if unit == "tokens/s":
        return f"{value:,.1f} tokens/s"
    if unit == "ms":
        return f"{value:,.2f} ms"
    return f"{value:g} {unit}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_one_line(c) for c in line) + " |" for line in lines]


def _one_line(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "/")


def result(
    header: Mapping[str, Any], findings: Findings, left_out: Mapping[str, str]
) -> dict[str, Any]:
    """Return the same as JSON."""
    return {
        "header": dict(header),
        "dry_run": bool(header["dry_run"]),
        "rows": [asdict(row) for row in findings.rows],
        "gates": findings.gates,
        "compared": findings.compared,
        "memory": findings.memory,
        "lengths_left_out": dict(left_out),
        "not_measured": findings.missing,
        "no_reuse_ratios": findings.samples,
        "problems": findings.problems,
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
        "figures": figures,
        "gates": findings.gates,
        "not_measured": findings.missing,
        "problems": [_one_line(problem)[:400] for problem in findings.problems],
    }
