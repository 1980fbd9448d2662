"""``sgl-tiered bench gpu-report DIR``: a page of a GPU session.

Every figure is set beside its roof (the link, one plain copy, a product of the same
sizes, the longer of two times) and, where there are some, beside HiCache's kernels on
as many pieces and bytes. What the product does is the way that it takes, not the best
of all ways. A section whose stage or records are missing says so in a sentence; the
others are made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_tiered_workloads.harness.page import Section, markdown

from sgl_tiered.cli.gpu_copies import (
    DIRECTIONS,
    WORDS,
    Case,
    cases,
    copy_sections,
    plain_rate,
)
from sgl_tiered.cli.gpu_page import Page
from sgl_tiered.cli.gpu_sections import (
    Found,
    Rows,
    bullets,
    figure,
    less,
    ms,
    section,
)
from sgl_tiered.cli.gpu_session import Record, Session, read_session

__all__ = ["make_page", "write_page"]

_PAGE = "report.md"
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of one PCIe lane and direction, by generation, after line coding."""
_MS = 1e3
_MATMUL = "8192^3 product"
_BROKEN = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
"""What a section ends with whose records lack something."""


def write_page(folder: Path) -> tuple[list[Path], Page]:
    """Write the page, and pictures where matplotlib is there, into the folder.

    Raises:
        ConfigError: there is no such folder.
        OSError: it cannot be written.
    """
    session = read_session(folder)
    page = make_page(session)
    paths = []
    note = ""
    try:
        from sgl_tiered.cli.gpu_charts import draw

        for name, png in draw(page).items():
            path = folder / f"{name}.png"
            path.write_bytes(png)
            paths.append(path)
    except ModuleNotFoundError as absent:
        note = f"There are no charts: the Python module {absent.name} is not installed."
    page = make_page(session, [path.name for path in paths], note)
    target = folder / _PAGE
    target.write_text(page.text, encoding="utf-8")
    return [target, *paths], page


def make_page(
    session: Session, pictures: Sequence[str] = (), chart_note: str = ""
) -> Page:
    """Return the page of a session.

    Args:
        session: as it was read.
        pictures: names of files beside the page.
        chart_note: what is to be said of them.
    """
    found, parts = Found(), []
    link = _link(session)
    copies: list[Case] = []
    stage = session.stages.get("copies")
    if stage is not None and not stage.is_wrong:
        try:
            copies = cases(stage.records)
        except _BROKEN as problem:
            told = f"records of copies cannot be read: {_named(problem)}"
            session.problems.append(f"{told}.")
    for title, name, make in (
        ("Roofs", "facts", lambda into: _roofs(session, copies, link)),
        ("Copies", "copies", lambda into: copy_sections(session, copies, link, into)),
        ("Mini-engine", "mini_engine", lambda into: _engine(session, link, into)),
        ("Rebuild of K and V", "kv_gen", lambda into: _kv_gen(session, into)),
        (
            "Loads under a forward",
            "overlap",
            lambda into: _overlap(session, plain_rate(copies, "up"), into),
        ),
        ("Layer-wise KV", "layerkv", lambda into: _layers(session, copies, into)),
        ("Servers", "servers", lambda into: _servers(session, into)),
    ):
        parts += _part(title, name, session, make, found)
    mark = " (dry run)" if session.is_dry_run else ""
    gaps = [f"{gap}{mark}." for gap in found.gaps] or ["There is nothing to compare."]
    first = [
        Section("Facts", _told(session)),
        _stages(session),
        Section(f"Gaps to the roofs, and to HiCache{mark}", bullets(gaps)),
    ]
    marked = [
        Section(part.title + mark, part.note, part.head, part.rows) for part in parts
    ]
    charts = [Section("Charts", chart_note)] if chart_note else []
    text = markdown("GPU session", [*first, *marked, *charts], pictures)
    return Page(
        text.rstrip() + "\n",
        copies,
        link,
        found.shares,
        session.is_dry_run,
        len(session.stages),
    )


def _part(
    title: str,
    name: str,
    session: Session,
    make: Callable[[Found], list[Section]],
    found: Found,
) -> list[Section]:
    """Make the sections of a stage, or say why there are none."""
    stage = session.stages.get(name)
    if stage is None:
        return [Section(title, f"The session has no stage `{name}`.")]
    notes = []
    if stage.status != "ok":
        because = f", {stage.why}" if stage.why else ""
        notes.append(f"The stage `{name}`: {stage.status}{because}.")
    if stage.is_wrong:
        notes.append("What it measured is withheld: something was found wrong.")
        return [Section(title, " ".join(notes))]
    made, into = [], Found()
    try:
        made = make(into)
    except _BROKEN as problem:
        notes.append(f"This section cannot be made: {_named(problem)}.")
        into = Found()
    found.gaps += into.gaps
    found.shares |= into.shares
    if not made:
        return [Section(title, " ".join([*notes, "Nothing was measured."]))]
    head, *others = made
    note = "\n\n".join(filter(None, (" ".join(notes), head.note)))
    return [Section(head.title, note, head.head, head.rows), *others]


def _named(problem: Exception) -> str:
    return f"{type(problem).__name__}, {problem}"


def _told(session: Session) -> str:
    """Return what ran and where, and what is missing."""
    begin = ""
    if session.is_dry_run:
        begin = (
            "**This is a dry run**: on a CPU, at tiny sizes. Its figures show that the "
            "programs work, and say nothing of a GPU.\n\n"
        )
    elif not session.header:
        begin = "**It is not known whether this was a dry run.**\n\n"
    lines = list(session.problems)
    header = session.header
    if header:
        dirty = ", with changes" if header["dirty"] else ""
        versions = [f"{name} {one}" for name, one in header["versions"].items()]
        machine = header["machine"]
        cards = [one["name"] for one in machine["accelerators"]]
        lines += [
            f"commit {header['commit'][:12]}{dirty}, source {header['source']}, begun "
            f"{header['began']}",
            ", ".join(versions),
            f"{machine['processor']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory; "
            f"{', '.join(cards) or 'no accelerator'}",
        ]
    for record in session.records("facts", "device", "software"):
        told = [
            f"{name} {one}"
            for name, one in record.items()
            if name != "kind" and isinstance(one, str | int | float)
        ]
        lines.append(f"{record['kind']}: {', '.join(told)}")
    return begin + (bullets(lines) or "Nothing is known of the machine.")


def _stages(session: Session) -> Section:
    rows: Rows = [
        (
            stage.name,
            stage.status,
            "" if stage.seconds is None else f"{stage.seconds:.1f}",
            "" if stage.limit_s is None else f"{stage.limit_s:.0f}",
            stage.why[:300],
        )
        for stage in session.stages.values()
    ]
    if not rows:
        return Section("Stages", "There is none.")
    return section("Stages", ("stage", "status", "seconds", "limit s", "why"), rows)


def _link(session: Session) -> float | None:
    """Return the GB/s of the PCIe link in one direction; None if unknown."""
    for record in session.records("facts", "link"):
        per_lane = _LANE_GB_PER_S.get(record["generation"])
        if per_lane is not None and record["lanes"]:
            return float(per_lane * record["lanes"])
    return None


def _matmul(session: Session) -> float | None:
    """Return the TFLOP/s of a large product; None if it was not measured."""
    for record in session.records("facts", "matmul"):
        return float(record["flop"] / ms(record, "seconds") / 1e9)
    return None


def _roofs(
    session: Session, copies: Sequence[Case], link: float | None
) -> list[Section]:
    rows: Rows = []
    for record in session.records("facts", "link")[:1]:
        told = f"PCIe generation {record['generation']}, {record['lanes']} lanes"
        rows.append((told, "unknown" if link is None else f"{link:.1f} GB/s"))
    for direction in DIRECTIONS:
        best = plain_rate(copies, direction)
        if best is not None:
            share = "" if link is None else f", {best / link:.0%} of the link"
            name = f"one plain copy, {WORDS[direction]}"
            rows.append((name, f"{figure(best)} GB/s{share}"))
    product = _matmul(session)
    if product is not None:
        rows.append((_MATMUL, f"{product:.1f} TFLOP/s"))
    for record in session.records("facts", "pinning"):
        if record.get("is_fresh") and "seconds" in record:
            rate = record["num_bytes"] / 2**30 / record["seconds"]
            name = f"pinning fresh memory, {record['threads']} threads"
            if record.get("node") is not None:
                name += f", on NUMA node {record['node']}"
            rows.append((name, f"{rate:.2f} GiB/s"))
    return [section("Roofs", ("roof, or cost", "measured"), rows)] if rows else []


def _engine(session: Session, link: float | None, found: Found) -> list[Section]:
    """Tell of the mini-engine: answers, waits, first tokens, controls."""
    made = []
    randoms = session.records("mini_engine", "random")
    if randoms:
        head = ("loads by", "requests", "wrong", "loads", "offloads")
        more = ("device idle", "scheduler blocked", "waits for the device")
        rows: Rows = [
            (
                _by(one),
                *(str(one[name]) for name in head[1:]),
                f"{one['idle_share']:.1%}",
                f"{one['blocked_share']:.1%}",
                str(one.get("host_waits", "not counted")),
            )
            for one in randoms
        ]
        made.append(section("Mini-engine", (*head, *more), rows))
        wrong, every = (sum(one[name] for one in randoms) for name in head[2:0:-1])
        found.gaps.append(f"mini-engine: {wrong} wrong answers of {every}")
    rows = [
        row
        for record in session.records("mini_engine", "first_token")
        for row in _first_rows(record, link, found)
    ]
    if rows:
        head_ms = ("computed ms", "host ms", "device ms", "link ms")
        note = "Of one prompt; beside, the link's time for its KV."
        title = "Mini-engine: first token"
        made.append(section(title, ("loads by", "prompt", *head_ms), rows, note))
    rows = [
        (
            one["control"],
            "caught" if one["wrong"] else "not caught",
            str(one["wrong"]),
            str(one["requests"]),
        )
        for one in session.records("mini_engine", "control")
    ]
    if rows:
        columns = ("left out", "control", "wrong answers", "requests")
        made.append(section("Mini-engine: controls", columns, rows))
    return made


def _by(record: Record) -> str:
    if record.get("is_played"):
        return "played"
    way = str(record.get("way", "engines"))
    return f"{way}, held up" if record.get("lag_s") else way


def _first_rows(record: Record, link: float | None, found: Found) -> Rows:
    """Return a row per length of a record of first tokens."""
    rows: Rows = []
    seconds = record["seconds"]
    for name in seconds:
        way, _, length = name.partition("_")
        if way != "computed":
            continue
        computed, host, device = (
            ms(seconds, f"{one}_{length}") for one in ("computed", "host", "device")
        )
        roof = ""
        if link is not None:
            roof_ms = _MS * int(length) * record["kv_token_bytes"] / link / 1e9
            roof = f"{roof_ms:.3f}"
            found.gaps.append(
                f"mini-engine, {length} tokens, loads by {_by(record)}: the first "
                f"token comes {host - device:.3f} ms after that of a device hit; the "
                f"link alone takes {roof_ms:.3f} ms"
            )
        cells = (f"{computed:.3f}", f"{host:.3f}", f"{device:.3f}")
        rows.append((_by(record), length, *cells, roof))
    return rows


def _kv_gen(session: Session, found: Found) -> list[Section]:
    rows: Rows = []
    for one in session.records("kv_gen", "kv_gen"):
        ours = one["flop"] / ms(one, "seconds") / 1e9
        share = one["of_product"]
        name = f"{one['model']}, {one['tokens']} tokens"
        found.gaps.append(
            f"rebuild, {name}: {figure(ours)} TFLOP/s, {less(share, 1.0)} the "
            f"product of its sizes ({figure(ours / share)})"
        )
        found.shares[f"rebuild, {name}"] = share
        cells = (figure(ours), figure(ours / share), f"{share:.1%}")
        rows.append((one["model"], str(one["tokens"]), *cells))
    head = ("model", "tokens", "TFLOP/s", "product (roof)", "of the roof")
    return [section("Rebuild of K and V", head, rows)] if rows else []


def _overlap(session: Session, roof: float | None, found: Found) -> list[Section]:
    rows: Rows = []
    for one in session.records("overlap", "overlap"):
        names = ("forward_s", "load_s", "both_s", "one_after_the_other_s")
        times = [ms(one, name) for name in names]
        loaded = one["load_bytes"] / times[1] / 1e6
        way = f"{one['way']}, {one['cached_tokens']} tokens"
        gap = (
            f"load under a forward, {way}: {times[2]:.3f} ms, "
            f"{less(one['efficiency'], 1.0)} the longer one and a first layer"
        )
        if roof:
            gap += f"; the load alone has {figure(loaded)} GB/s, "
            gap += f"{less(loaded, roof)} one plain copy"
        found.gaps.append(gap)
        found.shares[f"overlap, {way}"] = 1.0 / one["efficiency"]
        cells = (f"{one['efficiency']:.4f}", figure(loaded))
        beside = f"{one['beside_offload']:.4f}"
        rows.append((way, *(f"{value:.3f}" for value in times), *cells, beside))
    head = ("way", "forward ms", "load ms", "both ms", "in turn ms")
    more = ("both over ideal", "load GB/s", "forward beside an offload, over alone")
    return [section("Loads under a forward", (*head, *more), rows)] if rows else []


def _layers(session: Session, copies: Sequence[Case], found: Found) -> list[Section]:
    made = []
    rows: Rows = []
    for one in session.records("layerkv", "layers"):
        names = ("forward_s", "link_s", "both_s", "down_s")
        times = [ms(one, name) for name in names]
        rates = [one["stream_bytes"] / times[place] / 1e6 for place in (1, 3)]
        gap = (
            f"streamed layers, {one['way']} memory: {times[2]:.3f} ms, "
            f"{less(one['efficiency'], 1.0)} the longer of forward and copies"
        )
        for direction, rate in zip(DIRECTIONS, rates, strict=True):
            if roof := plain_rate(copies, direction):
                gap += f"; {direction} {figure(rate)} GB/s, {less(rate, roof)} "
                gap += "one plain copy"
        found.gaps.append(gap)
        found.shares[f"streamed layers, {one['way']}"] = 1.0 / one["efficiency"]
        cells = [f"{value:.3f}" for value in times[:3]]
        cells += [f"{one['efficiency']:.4f}", *map(figure, rates)]
        rows.append((one["way"], *cells))
    if rows:
        head = ("host memory", "forward ms", "copies ms", "both ms")
        more = ("both over the longer", "up GB/s", "down GB/s")
        made.append(section("Layer-wise KV", (*head, *more), rows))
    rows = []
    for one in session.records("layerkv", "acts"):
        times = [ms(one, name) for name in ("kv_gen_s", "loads_s", "both_s")]
        times[0] *= one["num_layers"]
        found.gaps.append(
            f"activations rebuilt beside loads: {times[2]:.3f} ms, "
            f"{less(one['efficiency'], 1.0)} the longer of both"
        )
        found.shares["activations beside loads"] = 1.0 / one["efficiency"]
        cells = [f"{value:.3f}" for value in times]
        rows.append((one["way"], *cells, f"{one['efficiency']:.4f}"))
    if rows:
        head = ("way", "rebuilds ms", "loads ms", "both ms")
        title = "Layer-wise KV: activations beside loads"
        made.append(section(title, (*head, "both over the longer"), rows))
    return made


def _servers(session: Session, found: Found) -> list[Section]:
    rows: Rows = []
    for one in session.records("servers", "servers"):
        ratios = []
        for name in ("mean_ttft_s", "total_s"):
            ours, theirs = (
                statistics.median(run[name] for run in one[way])
                for way in ("layered", "plain")
            )
            ratios.append(f"{ours / theirs:.4f}")
        exact = f"{one['exact_fraction']:.1%}"
        found.gaps.append(
            f"layer-wise KV on servers: mean TTFT {ratios[0]}, time in all {ratios[1]} "
            f"of plain SGLang's with the same small pool; {exact} of the answers "
            "compared bit for bit"
        )
        rows.append((one["way"], exact, *ratios))
    head = ("way", "compared bit for bit", "mean TTFT / plain", "time in all / plain")
    return [section("Servers", head, rows)] if rows else []
