"""``sgl-tiered bench gpu-report DIR``: a page of a GPU session.

Every figure is set beside its roof (the link, one plain copy, a product of the same
sizes, the longer of two times) and, where there are some, beside HiCache's kernels. A
section whose stage or records are missing says so in a sentence; the others are made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sgl_tiered.cli.gpu_copies import DIRECTIONS, HICACHE, PLAIN, Case, cases, widest
from sgl_tiered.cli.gpu_session import (
    LackError,
    Session,
    number,
    numbers,
    read_session,
    text,
)

__all__ = ["Page", "make_page", "write_page"]

_PAGE = "report.md"
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Of one PCIe lane and direction, by generation, after line coding."""
_KIB = 1 << 10
_MS = 1e3
_MATMUL = "8192^3 product"
_WORDS = {"up": "host to device", "down": "device to host"}

Record = Mapping[str, Any]
Rows = list[tuple[object, ...]]


@dataclass(slots=True)
class Part:
    """One section of the page.

    Attributes:
        title: its heading.
        lines: its text and tables.
        gaps: sentences with numbers, for the section of that name.
        notes: what is missing in it.
        shares: figures as shares of their roofs, for the picture.
    """

    title: str
    lines: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Page:
    """The page, and what its pictures show.

    Attributes:
        text: Markdown.
        copies: cases, for the picture of copies.
        link_gb_per_s: of the PCIe link; None if unknown.
        shares: figures as shares of their roofs.
        is_dry_run: whether all of it is of a dry run.
        num_stages: of the session.
    """

    text: str
    copies: list[Case]
    link_gb_per_s: float | None
    shares: dict[str, float]
    is_dry_run: bool
    num_stages: int


def write_page(folder: Path) -> tuple[list[Path], Page]:
    """Write the page, and pictures where matplotlib is there, into the folder.

    Raises:
        ConfigError: there is no such folder.
        OSError: it cannot be written.
    """
    session = read_session(folder)
    page = make_page(session, ())
    paths = []
    note = ""
    try:
        from sgl_tiered.cli.gpu_charts import draw
    except ModuleNotFoundError as absent:
        note = f"There are no charts: the Python module {absent.name} is not installed."
    else:
        for name, png in draw(page).items():
            path = folder / f"{name}.png"
            path.write_bytes(png)
            paths.append(path)
    page = make_page(session, [path.name for path in paths], note)
    target = folder / _PAGE
    target.write_text(page.text, encoding="utf-8")
    return [target, *paths], page


def make_page(session: Session, pictures: Sequence[str], note: str = "") -> Page:
    """Return the page of a session.

    Args:
        session: as it was read.
        pictures: names of files beside the page.
        note: what is to be said of them.
    """
    problems: list[str] = []
    copy_stage = session.stages.get("copies")
    copies: list[Case] = []
    if copy_stage is not None and not copy_stage.is_wrong:
        copies = cases(copy_stage.records, problems)
    link = _link(session)
    makers: list[tuple[str, str, Callable[..., None], dict[str, Any]]] = [
        ("Roofs", "facts", _roofs, {"copies": copies}),
        *(
            (
                f"Copies, {_WORDS[direction]}",
                "copies",
                _copies,
                {"copies": copies, "direction": direction, "link": link},
            )
            for direction in DIRECTIONS
        ),
        ("Mini-engine", "mini_engine", _engine, {}),
        ("Rebuild of K and V", "kv_gen", _kv_gen, {}),
        ("Loads under a forward", "overlap", _overlap, {"copies": copies}),
        ("Layer-wise KV", "layerkv", _layers, {"copies": copies}),
        ("Servers", "servers", _servers, {}),
        ("Tests on the GPU", "gpu_tests", _tests, {}),
        ("Sanitizer", "sanitizer", _sanitizer, {}),
        ("FlashInfer", "flashinfer", _flashinfer, {}),
    ]
    parts = [
        _part(title, stage, session, partial(make, session=session, **more))
        for title, stage, make, more in makers
    ]
    # Records of copies are read once for both directions.
    parts[1].notes += problems
    mark = " (dry run)" if session.is_dry_run else ""
    lines = ["# GPU session", ""]
    if session.is_dry_run:
        lines += [
            "**This is a dry run**: on a CPU, at tiny sizes. Its figures show that the "
            "programs work, and say nothing of a GPU.",
            "",
        ]
    elif not session.header:
        lines += ["**It is not known whether this was a dry run.**", ""]
    lines += [f"- {problem}" for problem in session.problems]
    lines += [""] if session.problems else []
    lines += ["## Facts", "", *_facts(session), ""]
    lines += ["## Stages", "", *_stages(session), ""]
    lines += [f"## Gaps to the roofs, and to HiCache{mark}", "", *_gaps(parts, mark)]
    lines.append("")
    for name in pictures:
        lines += [f"![{name.removesuffix('.png')}{mark}]({name})", ""]
    lines += [note, ""] if note else []
    for part in parts:
        lines += [f"## {part.title}{mark}", ""]
        lines += [f"- {each}" for each in part.notes] + ([""] if part.notes else [])
        lines += [*part.lines, ""]
    shares = {name: share for part in parts for name, share in part.shares.items()}
    return Page(
        "\n".join(lines).rstrip() + "\n",
        copies,
        link,
        shares,
        session.is_dry_run,
        len(session.stages),
    )


def _part(
    title: str, stage: str, session: Session, make: Callable[[Part], None]
) -> Part:
    """Make a section, or say why it cannot be made."""
    part = Part(title)
    found = session.stages.get(stage)
    if found is None:
        part.notes.append(f"The session has no stage `{stage}`.")
    elif found.status != "ok":
        part.notes.append(f"The stage `{stage}`: {found.status}{_because(found.why)}")
    if found is not None and found.is_wrong:
        part.notes.append("What it measured is withheld: something was found wrong.")
        return part
    if found is not None and not found.records and found.status != "not there":
        part.notes.append(f"The stage `{stage}` left no record.")
    try:
        make(part)
    except (ArithmeticError, LookupError, TypeError, ValueError) as problem:
        part.lines.clear()
        part.gaps.clear()
        part.notes.append(f"This section cannot be made: {problem}.")
    return part


def _because(why: str) -> str:
    if not why:
        return "."
    return f", {why}" if why.endswith((".", "!", "?")) else f", {why}."


def _rows(
    part: Part, records: Iterable[Record], make: Callable[[Record], tuple[object, ...]]
) -> Rows:
    """Return a row per record; one that lacks something is told of once."""
    rows = []
    for record in records:
        try:
            rows.append(make(record))
        except (LackError, ZeroDivisionError) as lack:
            sentence = f"A row is left out: {lack}."
            if sentence not in part.notes:
                part.notes.append(sentence)
    return rows


def _median(record: Record, name: str) -> float:
    return statistics.median(numbers(record, name))


def _facts(session: Session) -> list[str]:
    """Return what ran and where."""
    header = session.header
    lines = []
    commit = text(header, "commit")[:12]
    if header:
        dirty = ", with changes" if header.get("dirty") else ""
        lines.append(
            f"commit {commit or 'not told'}{dirty}, source "
            f"{text(header, 'source') or 'not told'}, begun "
            f"{text(header, 'began') or 'not told'}"
        )
    versions = header.get("versions")
    if isinstance(versions, dict):
        named = [f"{name} {version}" for name, version in versions.items()]
        lines.append(", ".join(named))
    machine = header.get("machine")
    if isinstance(machine, dict):
        lines.append(_machine(machine))
    for record in session.records("facts", "device")[:1]:
        memory = record.get("total_bytes")
        size = f", {memory / 2**30:.1f} GiB" if isinstance(memory, int) else ""
        lines.append(
            f"device: {text(record, 'name')}{size}, capability "
            f"{record.get('capability')}, CUDA of the driver "
            f"{record.get('driver_cuda_version')}"
        )
    lines += [
        f"Python {record.get('python')}, torch {record.get('torch')}, triton "
        f"{record.get('triton')}; batched copies: {record.get('batched_copies')}"
        for record in session.records("facts", "software")[:1]
    ]
    if not lines:
        return ["Nothing is known of the machine."]
    return [f"- {line}" for line in lines]


def _machine(machine: Record) -> str:
    told = f"{machine.get('processor')}, {machine.get('cores')} cores"
    memory = machine.get("memory_bytes")
    if isinstance(memory, int):
        told += f", {memory / 2**30:.0f} GiB of memory"
    cards = machine.get("accelerators")
    if isinstance(cards, list) and cards:
        names = [one.get("name", "?") for one in cards if isinstance(one, dict)]
        return f"{told}; {', '.join(names)}"
    return f"{told}; no accelerator"


def _stages(session: Session) -> list[str]:
    if not session.stages:
        return ["There is none."]
    rows: Rows = [
        (
            stage.name,
            stage.status,
            "" if stage.seconds is None else f"{stage.seconds:.1f}",
            "" if stage.limit_s is None else f"{stage.limit_s:.0f}",
            stage.why,
        )
        for stage in session.stages.values()
    ]
    return _table(("stage", "status", "seconds", "limit s", "why"), rows)


def _gaps(parts: Sequence[Part], mark: str) -> list[str]:
    gaps = [f"- {gap}{mark}." for part in parts for gap in part.gaps]
    return gaps or ["There is nothing to compare."]


def _link(session: Session) -> float | None:
    """Return the GB/s of the PCIe link in one direction; None if unknown."""
    for record in session.records("facts", "link"):
        generation, lanes = record.get("generation"), record.get("lanes")
        if isinstance(generation, int) and isinstance(lanes, int):
            per_lane = _LANE_GB_PER_S.get(generation)
            if per_lane is not None:
                return per_lane * lanes
    return None


def _plain(copies: Sequence[Case], direction: str) -> float | None:
    """Return the best GB/s of one plain copy in a direction."""
    rates = [
        case.roof
        for case in copies
        if case.direction == direction and case.roof is not None
    ]
    return max(rates, default=None)


def _matmul(session: Session) -> float | None:
    """Return the TFLOP/s of a large product; None if it was not measured."""
    for record in session.records("facts", "matmul"):
        return number(record, "flop") / _median(record, "seconds") / 1e12
    return None


def _roofs(part: Part, session: Session, copies: Sequence[Case]) -> None:
    rows: Rows = []
    link = _link(session)
    for record in session.records("facts", "link")[:1]:
        generation, lanes = record.get("generation"), record.get("lanes")
        told = f"PCIe generation {generation}, {lanes} lanes"
        rows.append((told, "unknown" if link is None else f"{link:.1f} GB/s"))
    if not rows:
        part.notes.append("The link is not told: facts has no record of it.")
    for direction in DIRECTIONS:
        best = _plain(copies, direction)
        if best is not None:
            share = "" if link is None else f", {best / link:.0%} of the link"
            name = f"one plain copy, {_WORDS[direction]}"
            rows.append((name, f"{_figure(best)} GB/s{share}"))
    product = _matmul(session)
    if product is not None:
        rows.append((_MATMUL, f"{product:.1f} TFLOP/s"))
    fresh = [
        record
        for record in session.records("facts", "pinning")
        if record.get("is_fresh") is True and "seconds" in record
    ]
    pins = _rows(
        part,
        fresh,
        lambda one: (
            f"pinning fresh memory, {one.get('threads')} threads",
            f"{number(one, 'num_bytes') / 2**30 / number(one, 'seconds'):.2f} GiB/s",
        ),
    )
    part.lines += _table(("roof, or cost", "measured"), rows + pins)


def _copies(
    part: Part,
    session: Session,
    copies: Sequence[Case],
    direction: str,
    link: float | None,
) -> None:
    """Tell of one direction: all ways of the largest cases, then the best by number."""
    every = widest(copies, direction, is_product=False)
    product = widest(copies, direction, is_product=True)
    for record in session.records("copies", "ways")[:1]:
        for way in ("batch", HICACHE):
            told = text(record, way)
            if told and told != "there":
                part.notes.append(f"{way}: {told}.")
    if not every and not product:
        part.notes.append("No copy was measured.")
        return
    part.lines.append(
        f"GB/s of {_WORDS[direction]}, by the size of a piece; the case of most pieces."
    )
    part.lines += ["", *_ways_table(every, link)]
    if len({(case.piece_bytes, case.pieces) for case in copies}) > len(every):
        part.lines += ["", "GB/s of our best way, by the number of pieces:", ""]
        part.lines += _counts_table(copies, direction)
    if product:
        part.lines += [
            "",
            "By the product's own pool:",
            "",
            *_ways_table(product, link),
        ]
    _ways_gap(part, every, direction)
    beside = {case.piece_bytes: case.hicache for case in every}
    for case in product:
        _product_gap(part, case, beside.get(case.piece_bytes))


def _ways_gap(part: Part, every: Sequence[Case], direction: str) -> None:
    """Say between which bounds our best way lies over all sizes."""
    roofs: tuple[tuple[str, Callable[[Case], float | None]], ...] = (
        ("one plain copy", lambda case: case.roof),
        ("HiCache's kernel", lambda case: case.hicache),
    )
    for name, roof_of in roofs:
        shares = [
            (ours[1] / roof, f"{_size(case.piece_bytes)}, {ours[0]}")
            for case in every
            if (ours := case.ours()) is not None and (roof := roof_of(case))
        ]
        if not shares:
            continue
        (low, least), (high, most) = min(shares), max(shares)
        told = f"{low:.1%} ({least})"
        if least != most:
            told += f" to {high:.1%} ({most})"
        part.gaps.append(f"{_WORDS[direction]}: our best way has {told} of {name}")


def _ways_table(chosen: Sequence[Case], link: float | None) -> list[str]:
    ways = list(dict.fromkeys(way for case in chosen for way in case.rates))
    middle = [way for way in ways if way not in (PLAIN, HICACHE)]
    has_hicache = HICACHE in ways
    head = ["piece", "pieces", "plain (roof)", *middle]
    head += [HICACHE] if has_hicache else []
    head += ["best of ours", "of the roof"]
    head += ["of the link"] if link is not None else []
    head += ["over HiCache's"] if has_hicache else []
    rows: Rows = []
    for case in chosen:
        ours = case.ours()
        row: list[object] = [_size(case.piece_bytes), case.pieces]
        row += [_rate(case.roof), *(_rate(case.rates.get(way)) for way in middle)]
        row += [_rate(case.hicache)] if has_hicache else []
        row.append("" if ours is None else ours[0])
        row.append(_share(ours, case.roof))
        row += [_share(ours, link)] if link is not None else []
        row += [_times(ours, case.hicache)] if has_hicache else []
        rows.append(tuple(row))
    return _table(head, rows)


def _counts_table(copies: Sequence[Case], direction: str) -> list[str]:
    chosen = [c for c in copies if c.direction == direction and not c.is_product]
    counts = sorted({case.pieces for case in chosen})
    sizes = sorted({case.piece_bytes for case in chosen})
    by_case = {(case.piece_bytes, case.pieces): case for case in chosen}
    rows: Rows = []
    for size in sizes:
        row: list[object] = [_size(size)]
        for count in counts:
            case = by_case.get((size, count))
            ours = None if case is None else case.ours()
            row.append("" if ours is None else f"{_figure(ours[1])} ({ours[0]})")
        rows.append(tuple(row))
    return _table(("piece", *(f"{count} pieces" for count in counts)), rows)


def _product_gap(part: Part, case: Case, hicache: float | None) -> None:
    """Say how far the product's own pool is from the roof, and from HiCache."""
    ours = case.ours()
    if ours is None or not case.roof:
        return
    size = _size(case.piece_bytes)
    gap = (
        f"{_WORDS[case.direction]}, {case.pieces} pieces of {size}: the product's pool "
        f"({ours[0]}) has {_figure(ours[1])} GB/s, {_less(ours[1], case.roof)} one "
        f"plain copy ({_figure(case.roof)})"
    )
    if hicache:
        gap += f", {_less(ours[1], hicache)} HiCache's kernel ({_figure(hicache)})"
    part.gaps.append(gap)
    part.shares[f"{case.direction}, {size}, {ours[0]}"] = ours[1] / case.roof


def _less(value: float, roof: float) -> str:
    """Say how far a value is from another one."""
    share = value / roof - 1.0
    if abs(share) < 0.0005:
        return "as much as"
    if share > 1.0:
        return f"{value / roof:.1f} times"
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'} than"


def _figure(value: float) -> str:
    """Return a rate with two decimals, a very small one with three digits."""
    return f"{value:.2f}" if value >= 0.1 or value == 0.0 else f"{value:.3g}"


def _engine(part: Part, session: Session) -> None:
    """Tell of the mini-engine: answers, waits, first tokens, controls."""
    rows = _rows(
        part,
        session.records("mini_engine", "random"),
        lambda one: (
            _by(one),
            int(number(one, "requests")),
            int(number(one, "wrong")),
            int(number(one, "loads")),
            int(number(one, "offloads")),
            f"{number(one, 'idle_share'):.1%}",
            f"{number(one, 'blocked_share'):.1%}",
            "not counted" if one.get("host_waits") is None else one["host_waits"],
        ),
    )
    if rows:
        head = ("loads by", "requests", "wrong", "loads", "offloads")
        more = ("device idle", "scheduler blocked", "waits for the device")
        part.lines += [*_table((*head, *more), rows), ""]
    firsts: Rows = []
    for record in session.records("mini_engine", "first_token"):
        firsts += _first_rows(part, session, record)
    if firsts:
        part.lines += ["First token of one prompt; beside, the link's time for its KV:"]
        times = ("computed ms", "host ms", "device ms", "link ms")
        part.lines += ["", *_table(("loads by", "prompt", *times), firsts), ""]
    controls: Rows = _rows(
        part,
        session.records("mini_engine", "control"),
        lambda one: (
            text(one, "control"),
            "caught" if number(one, "wrong") else "not caught",
            int(number(one, "wrong")),
            int(number(one, "requests")),
        ),
    )
    if controls:
        columns = ("left out", "control", "wrong answers", "requests")
        part.lines += _table(columns, controls)
    wrong = sum(int(row[2]) for row in rows if isinstance(row[2], int))
    if rows:
        part.gaps.append(
            f"mini-engine: {wrong} wrong answers of "
            f"{sum(int(row[1]) for row in rows if isinstance(row[1], int))}"
        )


def _by(record: Record) -> str:
    if record.get("is_played") is True:
        return "played"
    way = str(record.get("way", "engines"))
    lag = record.get("lag_s")
    return f"{way}, held up" if isinstance(lag, int | float) and lag > 0 else way


def _first_rows(part: Part, session: Session, record: Record) -> Rows:
    """Return a row per length of a record of first tokens."""
    seconds = record.get("seconds")
    if not isinstance(seconds, dict):
        part.notes.append("A record of first tokens has no seconds.")
        return []
    link = _link(session)
    times = {"kind": record.get("kind"), **seconds}
    token_bytes = record.get("kv_token_bytes")
    lengths = [
        name.removeprefix("computed_")
        for name in seconds
        if isinstance(name, str) and name.startswith("computed_")
    ]

    def row(length: str) -> tuple[object, ...]:
        computed, host, device = (
            _MS * _median(times, f"{way}_{length}")
            for way in ("computed", "host", "device")
        )
        roof = ""
        if isinstance(token_bytes, int) and link is not None and length.isdigit():
            roof_ms = _MS * int(length) * token_bytes / link / 1e9
            roof = f"{roof_ms:.3f}"
            part.gaps.append(
                f"mini-engine, {length} tokens, loads by {_by(record)}: the first "
                f"token comes {host - device:.3f} ms after that of a device hit; the "
                f"link alone takes {roof_ms:.3f} ms"
            )
        cells = (f"{computed:.3f}", f"{host:.3f}", f"{device:.3f}")
        return (_by(record), length, *cells, roof)

    rows: Rows = []
    for length in lengths:
        try:
            rows.append(row(length))
        except LackError as lack:
            part.notes.append(f"A row is left out: {lack}.")
    return rows


def _kv_gen(part: Part, session: Session) -> None:
    product = _matmul(session)

    def row(one: Record) -> tuple[object, ...]:
        flop = number(one, "flop")
        ours = flop / _median(one, "seconds") / 1e12
        roof = flop / _median(one, "product_s") / 1e12
        name = f"{text(one, 'model')}, {one.get('tokens')} tokens"
        told = f"{ours / roof:.1%}"
        of_all = "" if product is None else f"{ours / product:.1%}"
        gap = (
            f"rebuild, {name}: {_figure(ours)} TFLOP/s, {_less(ours, roof)} the "
            f"product of its sizes ({_figure(roof)})"
        )
        if product is not None:
            gap += f", {ours / product:.1%} of the {_MATMUL} ({product:.1f})"
        part.gaps.append(gap)
        part.shares[f"rebuild, {name}"] = ours / roof
        rates = (_figure(ours), _figure(roof))
        return (text(one, "model"), one.get("tokens"), *rates, told, of_all)

    rows = _rows(part, session.records("kv_gen", "kv_gen"), row)
    head = ("model", "tokens", "TFLOP/s", "product (roof)", "of the roof")
    part.lines += _table((*head, f"of {_MATMUL}"), rows) if rows else []


def _overlap(part: Part, session: Session, copies: Sequence[Case]) -> None:
    roof = _plain(copies, "up")

    def row(one: Record) -> tuple[object, ...]:
        times = {
            name: _MS * _median(one, f"{name}_s")
            for name in ("forward", "load", "both", "one_after_the_other")
        }
        first = _MS * _median(one, "first_layer_s")
        beside = _MS * _median(one, "forward_beside_offload_s")
        ideal = max(times["forward"], times["load"]) + first
        loaded = number(one, "load_bytes") / times["load"] / 1e6
        way = f"{text(one, 'way')}, {one.get('cached_tokens')} tokens"
        gap = (
            f"load under a forward, {way}: {times['both']:.3f} ms, "
            f"{_less(times['both'], ideal)} the longer one and a first layer "
            f"({ideal:.3f} ms)"
        )
        if roof:
            gap += (
                f"; the load alone has {_figure(loaded)} GB/s, {_less(loaded, roof)} "
                "one plain copy"
            )
        part.gaps.append(gap)
        part.shares[f"overlap, {way}"] = ideal / times["both"]
        return (
            way,
            *(f"{value:.3f}" for value in times.values()),
            f"{times['both'] / ideal:.4f}",
            _figure(loaded),
            f"{beside / times['forward']:.4f}",
        )

    rows = _rows(part, session.records("overlap", "overlap"), row)
    head = ("way", "forward ms", "load ms", "both ms", "in turn ms")
    more = ("both over ideal", "load GB/s", "forward beside an offload, over alone")
    part.lines += _table((*head, *more), rows) if rows else []


def _layers(part: Part, session: Session, copies: Sequence[Case]) -> None:
    up, down = _plain(copies, "up"), _plain(copies, "down")

    def layer(one: Record) -> tuple[object, ...]:
        forward, link, both = (
            _MS * _median(one, f"{name}_s") for name in ("forward", "link", "both")
        )
        ideal = max(forward, link)
        num_bytes = number(one, "stream_bytes")
        rates = [
            num_bytes / value / 1e6 for value in (link, _MS * _median(one, "down_s"))
        ]
        way = text(one, "way")
        gap = (
            f"streamed layers, {way} memory: {both:.3f} ms, {_less(both, ideal)} the "
            f"longer of forward and copies ({ideal:.3f} ms)"
        )
        for name, value, roof in (("up", rates[0], up), ("down", rates[1], down)):
            if roof:
                gap += f"; {name} {_figure(value)} GB/s, {_less(value, roof)} "
                gap += "one plain copy"
        part.gaps.append(gap)
        part.shares[f"streamed layers, {way}"] = ideal / both
        times = (f"{forward:.3f}", f"{link:.3f}", f"{both:.3f}", f"{both / ideal:.4f}")
        return (way, *times, *(_figure(value) for value in rates))

    rows = _rows(part, session.records("layerkv", "layers"), layer)
    head = ("host memory", "forward ms", "copies ms", "both ms", "both over the longer")
    if rows:
        part.lines += _table((*head, "up GB/s", "down GB/s"), rows)

    def acts(one: Record) -> tuple[object, ...]:
        rebuilds = number(one, "num_layers") * _MS * _median(one, "kv_gen_s")
        loads, both = _MS * _median(one, "loads_s"), _MS * _median(one, "both_s")
        ideal = max(rebuilds, loads)
        part.gaps.append(
            f"activations rebuilt beside loads: {both:.3f} ms, {_less(both, ideal)} "
            f"the longer of both ({ideal:.3f} ms)"
        )
        part.shares["activations beside loads"] = ideal / both
        times = (f"{rebuilds:.3f}", f"{loads:.3f}", f"{both:.3f}")
        return (text(one, "way"), *times, f"{both / ideal:.4f}")

    rows = _rows(part, session.records("layerkv", "acts"), acts)
    if rows:
        head = ("way", "rebuilds ms", "loads ms", "both ms", "both over the longer")
        part.lines += ["", *_table(head, rows)]


def _servers(part: Part, session: Session) -> None:
    def row(one: Record) -> tuple[object, ...]:
        ratios = []
        for name in ("mean_ttft_s", "total_s"):
            ours, theirs = (
                statistics.median(number(run, name) for run in _runs(one, way))
                for way in ("layered", "plain")
            )
            ratios.append(f"{ours / theirs:.4f}")
        exact = number(one, "exact_fraction")
        part.gaps.append(
            f"layer-wise KV on servers: mean TTFT {ratios[0]}, time in all {ratios[1]} "
            f"of plain SGLang's with the same small pool; {exact:.1%} of the answers "
            "compared bit for bit"
        )
        return (text(one, "way"), f"{exact:.1%}", *ratios)

    rows = _rows(part, session.records("servers", "servers"), row)
    head = ("way", "compared bit for bit", "mean TTFT / plain", "time in all / plain")
    part.lines += _table(head, rows) if rows else []


def _tests(part: Part, session: Session) -> None:
    """Tell of the tests by file; a dry run only collects them."""
    for record in session.records("gpu_tests", "collected"):
        part.lines.append(f"{int(number(record, 'collected'))} tests were collected.")
    rows = _rows(
        part,
        session.records("gpu_tests", "file"),
        lambda one: (
            text(one, "file"),
            *(int(number(one, name)) for name in ("passed", "failed", "skipped")),
            text(one, "why"),
        ),
    )
    head = ("file", "passed", "failed", "skipped", "why")
    part.lines += _table(head, rows) if rows else []


def _sanitizer(part: Part, session: Session) -> None:
    records = session.records("sanitizer", "sanitizer")
    records += session.records("sanitizer", "interpreted")
    rows = _rows(
        part,
        records,
        lambda one: (
            text(one, "tool") or "interpreted, without a sanitizer",
            int(number(one, "exit_status")),
        ),
    )
    part.lines += _table(("tool", "exit status"), rows) if rows else []


def _flashinfer(part: Part, session: Session) -> None:
    rows = _rows(
        part,
        session.records("flashinfer", "layers"),
        lambda one: (
            text(one, "backend"),
            text(one, "form"),
            f"{number(one, 'worst'):.5f}",
            f"{number(one, 'without_indices'):.3f}",
        ),
    )
    head = ("backend", "form", "off", "off with the plan's own indices (control)")
    part.lines += _table(head, rows) if rows else []


def _runs(record: Record, name: str) -> list[Record]:
    runs = record.get(name)
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise LackError(f"a record of kind 'servers' has no runs of {name}")
    if not runs:
        raise LackError(f"a record of kind 'servers' has no run of {name}")
    return runs


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 20 and num_bytes % (1 << 20) == 0:
        return f"{num_bytes >> 20} MiB"
    return f"{num_bytes / _KIB:g} KiB"


def _rate(value: float | None) -> str:
    return "" if value is None else _figure(value)


def _share(ours: tuple[str, float] | None, roof: float | None) -> str:
    return "" if ours is None or not roof else f"{ours[1] / roof:.1%}"


def _times(ours: tuple[str, float] | None, theirs: float | None) -> str:
    return "" if ours is None or not theirs else f"{ours[1] / theirs:.2f}"


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines]


def _cell(value: object) -> str:
    """Return one line without what would end a cell."""
    return " ".join(str(value).split()).replace("|", "/")[:300]
