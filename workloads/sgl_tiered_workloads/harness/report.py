"""The report of a comparison: tables from records, as Markdown and as one HTML page."""

from __future__ import annotations

from pathlib import Path

from sgl_tiered_workloads.harness.compare import Pairing, pair
from sgl_tiered_workloads.harness.errors import RecordsError
from sgl_tiered_workloads.harness.metrics import PERCENTILES, Distribution
from sgl_tiered_workloads.harness.page import Section, html_page, markdown
from sgl_tiered_workloads.harness.plots import draw_all
from sgl_tiered_workloads.harness.results import Results, SystemResult, load_results

__all__ = ["sections", "write_report"]

_MS = 1e3
_HEADLINE = "TTFT p50"
_FIGURES = (_HEADLINE, "TTFT p99", "E2E p50", "cached share mean")
"""With intervals; ``bench compare`` has all of them."""
_LATE_SHARE = 0.05
"""Client lag beyond this share of the median TTFT is said beside the figures."""


def write_report(out: Path) -> list[Path]:
    """Write ``report.md``, its pictures and ``report.html`` into a run's folder.

    Raises:
        GateRedError: the gate is red, or nobody looked.
        RecordsError: the records give no figures.
    """
    results = load_results(out)
    title = f"Benchmark {results.spec['name']}"
    parts = sections(results)
    pictures = draw_all(results)
    paths = []
    for name, data in pictures.items():
        paths.append(out / f"{name}.png")
        paths[-1].write_bytes(data)
    text = markdown(title, parts, [path.name for path in paths])
    page = html_page(title, parts, pictures)
    for name, content in (("report.md", text), ("report.html", page)):
        (out / name).write_text(content, encoding="utf-8")
        paths.append(out / name)
    return paths


def sections(results: Results) -> list[Section]:
    """Return everything that the report says."""
    pairings = _pairings(results)
    return [
        _headline(results, pairings),
        _gate(results),
        *_emulated(results),
        _latency(results),
        *_differences(pairings),
        _throughput(results),
        _hits(results),
        _lag(results),
        _setting(results),
    ]


def _pairings(results: Results) -> list[Pairing]:
    """Return each system beside the first one; none where nothing pairs."""
    first, *others = results.systems
    found = []
    for system in others:
        try:
            base, other = ((side.header, side.records) for side in (first, system))
            found.append(pair(base, other, figures=_FIGURES))
        except RecordsError:  # nothing was answered on both sides: the tables say so
            continue
    return found


def _headline(results: Results, pairings: list[Pairing]) -> Section:
    """Say first what came out, and of what kind it is."""
    sentences = []
    for pairing in pairings:
        name, base = pairing.other.system, pairing.base.system
        ttft = next(d for d in pairing.differences if d.name == _HEADLINE)
        change, unit = ttft.change, ttft.unit
        held = f"95 % interval {change.low:+,.1f} to {change.high:+,.1f} {unit}"
        if ttft.shown and ttft.base:
            word = "shorter" if change.value < 0 else "longer"
            said = (
                f"{name}'s median time to the first token is "
                f"{abs(change.value) / ttft.base:.1%} {word} than {base}'s "
                f"({ttft.base:,.1f} -> {ttft.other:,.1f} {unit}; {held})"
            )
        else:
            said = (
                f"no difference between {name} and {base} is shown in the median time "
                f"to the first token ({held})"
            )
        emulated = any(
            header.facts.get("server", {}).get("emulated")
            for header in (pairing.base, pairing.other)
        )
        if emulated:
            said = (
                "with tiers that were slowed down or made to fail on purpose, " + said
            )
        sentences.append(f"**{said[0].upper()}{said[1:]}.**")
    if not sentences:
        sentences = ["One system, or no request that two of them answered."]
    if results.gate.kind == "off":
        sentences.append("The answers were not compared.")
    else:
        sentences.append("Their answers were compared first and are equal.")
    return Section("Result", " ".join(sentences))


def _differences(pairings: list[Pairing]) -> list[Section]:
    """Show what differs, request by request, with its interval."""
    rows = [
        (
            f"{pairing.other.system} - {pairing.base.system}",
            f"{item.name} {item.unit}",
            f"{item.base:,.1f}",
            f"{item.other:,.1f}",
            f"{item.change.value:+,.1f}",
            f"{item.change.low:+,.1f} to {item.change.high:+,.1f}",
            "yes" if item.shown else "no",
        )
        for pairing in pairings
        for item in pairing.differences
    ]
    if not rows:
        return []
    note = (
        "The same requests on both sides, paired; a bootstrap over repeats and pairs. "
        "What is not shown may be chance."
    )
    if any(pairing.num_repeats == 1 for pairing in pairings):
        note += " One repeat: intervals cannot hold what changes between repeats."
    head = ("pair", "figure", "first", "other", "change", "95 % interval", "shown")
    return [Section("Differences", note, head, tuple(rows))]


def _gate(results: Results) -> Section:
    gate = results.gate
    if gate.kind == "off":
        note = f"**The answers were not compared**: {gate.because}."
    else:
        note = (
            "The answers were compared before anything was timed. Negative control: a "
            f"wrong page is caught ({gate.control})."
        )
    rows = []
    for system in results.systems:
        verdict = gate.verdicts.get(system.name)
        words = "driven only" if verdict is None else verdict.summary.splitlines()[0]
        rows.append((system.name, gate.status(system.name), words))
    return Section(
        "Gate", note, ("system", "verdict", "what was compared"), tuple(rows)
    )


def _emulated(results: Results) -> list[Section]:
    """Say first whose figures are not those of real media."""
    rows = [
        (system.name, system.header.facts["server"]["emulated"])
        for system in results.systems
        if system.header.facts.get("server", {}).get("emulated")
    ]
    if not rows:
        return []
    note = (
        "**Tiers of these systems were slowed down or made to fail on purpose: no "
        "figure of theirs below is that of real hardware.**"
    )
    return [Section("Emulated", note, ("system", "what"), tuple(rows))]


def _latency(results: Results) -> Section:
    head = ["system", "requests", "failed"]
    names = ("TTFT", "TPOT", "ITL", "E2E")
    head += [f"{name} p{p} ms" for name in names for p in PERCENTILES]
    rows = []
    for system in results.systems:
        found = system.metrics
        row = [system.name, str(found.num_requests), str(found.num_errors)]
        for item in (found.ttft_s, found.tpot_s, found.itl_s, found.e2e_s):
            row += _percentiles(item)
        rows.append(tuple(row))
    repeats, window = results.spec["repeats"], results.window
    note = (
        f"From the actual start of each request. {repeats} repeats; steady state from "
        f"{window.warmup_s:g} s after the start of each to {window.cooldown_s:g} s "
        "before its last targeted start. TPOT of an answer of one token counts as 0."
    )
    return Section("Latency", note, tuple(head), tuple(rows))


def _throughput(results: Results) -> Section:
    given = results.slos.given()
    head = ["system", "requests/s", "prompt tok/s", "output tok/s"]
    if given:
        head += ["goodput/s", "all SLOs met", *(f"{name} met" for name in given)]
    rows = []
    for system in results.systems:
        found = system.metrics
        row = [
            system.name,
            f"{found.requests_per_s:.3f}",
            f"{found.prompt_tokens_per_s:,.1f}",
            f"{found.output_tokens_per_s:,.1f}",
        ]
        if found.goodput_per_s is not None and found.attainment is not None:
            row += [f"{found.goodput_per_s:.3f}", f"{found.attainment:.1%}"]
            row += [f"{found.attainment_by_slo[name]:.1%}" for name in given]
        rows.append(tuple(row))
    limits = ", ".join(f"{name} {limit * _MS:g} ms" for name, limit in given.items())
    note = "What arrived within the steady state, per second of it. " + (
        f"Goodput: requests that met every SLO ({limits}); a failed request meets none."
        if given
        else "No SLO was given, so there is no goodput."
    )
    return Section("Throughput and goodput", note, tuple(head), tuple(rows))


def _hits(results: Results) -> Section:
    tiers: list[str] = []
    for system in results.systems:
        tiers += [t for t in system.metrics.tokens_by_tier if t not in tiers]
    rows = []
    for system in results.systems:
        found = system.metrics
        shares = [f"{found.hit_rate_by_tier.get(tier, 0.0):.1%}" for tier in tiers]
        row = (
            system.name,
            f"{found.prompt_tokens:,}",
            *shares,
            f"{found.hit_rate:.1%}",
        )
        rows.append(row)
    note = (
        "Share of prompt tokens by the tier that their KV came from, as the servers "
        "tell it; `unattributed` where a server tells no tier."
    )
    head = ("system", "prompt tokens", *tiers, "all hits")
    return Section("Hits per tier", note, head, tuple(rows))


def _lag(results: Results) -> Section:
    rows, late = [], []
    for system in results.systems:
        lag, ttft = system.metrics.lag_s, system.metrics.ttft_s
        rows.append((system.name, *_percentiles(lag)))
        if lag.p99 > _LATE_SHARE * ttft.p50:
            late.append(system.name)
    note = (
        "Actual start less targeted start: what the client made users wait, which no "
        "latency above includes."
    )
    if late:
        note += (
            f" **The client was late for {', '.join(late)}**: its p99 is above "
            f"{_LATE_SHARE:.0%} of the median TTFT, so the load was lighter than asked."
        )
    head = ("system", *(f"p{p} ms" for p in PERCENTILES))
    return Section("Client lag", note, head, tuple(rows))


def _setting(results: Results) -> Section:
    header = results.systems[0].header
    machine = header.machine
    gpus = ", ".join(item["name"] for item in machine.get("accelerators", ()))
    spec, work = results.spec, results.spec["workload"]
    rows = [
        ("spec hash", header.spec_hash),
        ("seed", str(header.seed)),
        ("commit", header.commit + (" (with changes)" if header.dirty else "")),
        ("versions", ", ".join(f"{n} {v}" for n, v in header.versions.items())),
        ("processor", f"{machine['processor']}, {machine['cores']} cores"),
        ("memory", f"{machine['memory_bytes'] / 1e9:.1f} GB"),
        ("accelerators", gpus or "none"),
        ("workload", f"{work['name']} {_pairs(work['params'])}"),
        ("device pool", f"{spec['pool_tokens']:,} tokens, {spec['page_size']} a page"),
        *((f"{system.name}", _how(system)) for system in results.systems),
    ]
    return Section("Setting", "What ran, and on what.", ("fact", "value"), tuple(rows))


def _how(system: SystemResult) -> str:
    facts = system.header.facts["system"]
    version = system.header.facts.get("server", {}).get("version", "")
    where = "external server" if facts["url"] else "started here"
    words = [where, facts["api"], version, *facts["flags"]]
    return " ".join(word for word in words if word)


def _pairs(params: dict[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items())


def _percentiles(item: Distribution) -> list[str]:
    if not item.count:
        return ["-"] * len(PERCENTILES)
    return [f"{value * _MS:,.1f}" for value in (item.p50, item.p90, item.p99)]
