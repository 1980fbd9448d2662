"""Pictures of README and docs, drawn from records as SVG by ``make results``.

Written by hand, so that equal records give equal bytes whatever is installed. Each has
a card of its own as background and follows the reader's light or dark setting; where
that is not known, the light card is legible on a dark page too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["TIERS", "answers", "demo", "memory", "tiers"]

TIERS = ("host", "cxl", "disk", "peer")
SOURCES = ("device", "host", "cxl", "disk", "recomputed", "new")
WIDTH = 880
_LIGHT = {
    "ink": "#1f2328",
    "soft": "#59636e",
    "card": "#ffffff",
    "line": "#d8dee4",
    "warm": "#c8552b",
    "cool": "#1d5f8a",
    "cool2": "#3f8fbf",
    "cool3": "#7ab6d9",
    "cool4": "#a9d0e6",
    "grey": "#818b98",
    "pale": "#d0d7de",
}
_DARK = {
    "ink": "#e6edf3",
    "soft": "#9ca7b3",
    "card": "#161b22",
    "line": "#30363d",
    "warm": "#f0885e",
    "cool": "#4ba3d8",
    "cool2": "#2f7fb5",
    "cool3": "#235f8a",
    "cool4": "#1c4866",
    "grey": "#8b949e",
    "pale": "#484f58",
}
_KINDS = {
    "plain": "warm",
    "tiered": "cool",
    "reference": "grey",
    "device": "cool",
    "host": "cool2",
    "cxl": "cool3",
    "disk": "cool4",
    "peer": "grey",
    "recomputed": "warm",
    "new": "pale",
    "exact": "cool",
    "near": "cool3",
}
"""Colour of what is drawn, by class."""
_FIXED = """text{font-family:system-ui,"Segoe UI","DejaVu Sans",sans-serif;
font-size:13px}.small{font-size:11.5px}.bold{font-weight:600}
.head{font-size:17px;font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}
.dot{fill-opacity:.75}.ring,.box,.curve{fill:none}.box{stroke-width:1.5}
.curve{stroke-width:2;stroke-linejoin:round}.mark{stroke-width:2}"""


def style(colours: Mapping[str, str] = _LIGHT) -> str:
    """Return the rules of one set of colours; no variables, which not all know."""
    rules = [
        "text{fill:@ink}",
        ".soft{fill:@soft}",
        ".card{fill:@card;stroke:@line}",
        ".grid{stroke:@line}",
        ".way{stroke:@soft}",
        ".tip{fill:@soft}",
        ".mark{stroke:@ink}",
    ]
    for kind, colour in _KINDS.items():
        rules.append(f".{kind}.dot,.{kind}.fill{{fill:@{colour}}}")
        rules.append(f".{kind}.ring,.{kind}.box,.{kind}.curve{{stroke:@{colour}}}")
    text = "\n".join(rules)
    for name in sorted(colours, key=len, reverse=True):
        text = text.replace(f"@{name}", colours[name])
    return text


def demo(record: Mapping[str, Any], when: str, is_even: bool) -> str:
    """Draw times to the first token, and where prompts' KV came from, by system.

    Args:
        record: of the demo.
        when: of the run.
        is_even: the machine was the same for all, so that a speed may be claimed.
    """
    names = ("plain", "tiered", "reference")
    told = record["summaries"]
    times_ms = {
        name: {key: value * 1e3 for key, value in record["ttft_s"][name].items()}
        for name in names
    }
    every = [value for each in times_ms.values() for value in each.values()]
    low, high = min(every) / 1.15, max(every) * 1.15
    left, right, top, step = 150, 520, 104, 66
    bottom = top + step * len(names)

    def across(value_ms: float) -> float:
        share = math.log(value_ms / low) / math.log(high / low)
        return left + share * (right - left)

    speed = told["plain"]["later_ttft_p50_s"] / told["tiered"]["later_ttft_p50_s"]
    equal = f"{record['equal']} of {record['answers']} answers equal"
    claim = f"{speed:.1f} times lower time to first token"
    if not is_even:
        claim = "Time to first token, on an uneven machine"
    parts = [
        _text(24, 34, f"{claim}, {equal}", "head"),
        _text(24, 56, "later turns of chats; median, log scale", "soft"),
    ]
    for tick in _ticks(low, high):
        x = across(tick)
        parts.append(_line(x, top - 12, x, bottom, "grid"))
        parts.append(_text(x, bottom + 17, f"{tick:g}", "soft small mid"))
    parts.append(_text(left, bottom + 35, "time to first token, ms", "soft small"))
    most = max(sum(told[name]["sources"].values()) for name in names)
    bars_left, bars_right = 548, WIDTH - 28
    for row, name in enumerate(names):
        y = top + step * row + step / 2
        parts.append(_text(24, y + 4, told[name]["title"], "bold small"))
        for number, (key, value) in enumerate(times_ms[name].items()):
            # Spread evenly, so that dots do not hide each other; it carries no data.
            height = y + (number * 7 % 11 - 5) * 2.4
            kind = "ring" if _is_first(key) else "dot"
            parts.append(
                f'<circle class="{name} {kind}" cx="{across(value):.1f}" '
                f'cy="{height:.1f}" r="3.6"/>'
            )
        median = told[name]["later_ttft_p50_s"] * 1e3
        x = across(median)
        parts.append(_line(x, y - 20, x, y + 18, "mark"))
        parts.append(_text(x, y - 24, f"{median:.0f} ms", "bold small mid"))
        sources = [s for s in SOURCES if told[name]["sources"].get(s)]
        shares = [(s, told[name]["sources"][s] / most) for s in sources]
        parts += _bar(bars_left, y - 11, bars_right - bars_left, 22, shares)
    used = [s for s in SOURCES if any(told[n]["sources"].get(s) for n in names)]
    parts.append(_text(bars_left, 56, "where the prompts' KV came from", "soft"))
    parts += _legend(bars_left, 78, used)
    parts.append(
        _text(
            bars_left, bottom + 17, f"{most:,} prompt tokens in each run", "soft small"
        )
    )
    model = f"Filled: later turns; open: first turns, always new. {when}; CPU"
    parts.append(_text(24, bottom + 58, model, "soft small"))
    return _svg(bottom + 76, "Time to first token with and without tiers", parts)


def answers(tiers: Mapping[str, tuple[int, int]], wrong: int, when: str) -> str:
    """Draw how many answers were compared with plain SGLang's, by tier.

    Args:
        tiers: compared answers, and those of them equal bit for bit.
        wrong: answers that were neither equal nor within plain's own spread.
        when: of the runs.
    """
    rows = [tier for tier in TIERS if tier in tiers]
    most = max(count for count, _ in tiers.values())
    left, right, top, step = 110, WIDTH - 120, 92, 40
    head = f"Answers with KV from below the device: {wrong} wrong"
    note = "compared with plain SGLang's, under faults and kills"
    parts = [_text(24, 34, head, "head"), _text(24, 56, note, "soft")]
    labels = {"exact": "equal bit for bit", "near": "within plain's own spread"}
    parts += _legend(left, 78, list(labels), labels)
    for row, tier in enumerate(rows):
        count, exact = tiers[tier]
        y = top + step * row
        parts.append(_text(left - 14, y + 17, tier, "bold end"))
        shares = [("exact", exact / most), ("near", (count - exact) / most)]
        parts += _bar(left, y, right - left, 24, shares)
        x = left + count / most * (right - left)
        parts.append(_text(x + 8, y + 17, f"{count:,}", "small"))
    bottom = top + step * len(rows)
    parts.append(_text(24, bottom + 22, f"{when}; CPU", "soft small"))
    return _svg(bottom + 40, "Answers compared with plain SGLang's, by tier", parts)


def memory(series: Sequence[Mapping[str, Any]], when: str) -> str:
    """Draw resident memory of a plain and a tiered server under load."""
    curves = {
        name: [
            (each["at_s"] / 60, sum(each["rss"][name].values()) / 1e9)
            for each in series
        ]
        for name in ("plain", "tiered")
    }
    points = [value for curve in curves.values() for _, value in curve]
    low, high = math.floor(min(points) * 10) / 10, math.ceil(max(points) * 10) / 10
    end = max(at for at, _ in curves["plain"])
    left, right, top, bottom = 70, WIDTH - 150, 84, 284

    def place(at: float, value: float) -> tuple[float, float]:
        x = left + at / end * (right - left)
        return x, bottom - (value - low) / (high - low) * (bottom - top)

    title = f"Resident memory under {end:.0f} minutes of load"
    note = "all processes of a server, GB; in every other round a tier fails or is slow"
    parts = [_text(24, 34, title, "head"), _text(24, 56, note, "soft")]
    steps = round((high - low) * 10)
    for number in range(0, steps + 1, max(1, steps // 5)):
        value = low + number / 10
        y = place(0, value)[1]
        parts.append(_line(left, y, right, y, "grid"))
        parts.append(_text(left - 8, y + 4, f"{value:.1f}", "soft small end"))
    for minute in range(0, int(end) + 1, 10):
        x = place(minute, low)[0]
        parts.append(_text(x, bottom + 18, f"{minute} min", "soft small mid"))
    names = {"plain": "plain SGLang", "tiered": "SGLang + tiers"}
    for name, curve in curves.items():
        spots = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in (place(*each) for each in curve)
        )
        parts.append(f'<polyline class="{name} curve" points="{spots}"/>')
        x, y = place(*curve[-1])
        parts.append(f'<circle class="{name} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>')
        parts.append(_text(x + 10, y + 4, names[name], "small bold"))
    parts.append(_text(24, bottom + 44, f"{when}; CPU", "soft small"))
    return _svg(bottom + 62, title, parts)


def tiers() -> str:
    """Draw the chain of tiers, and the words for what moves between them."""
    left, width, top, step, height = 250, 330, 66, 84, 50
    rows = (
        ("device", "device", "the GPU's pool and radix tree: SGLang's own"),
        ("host", "host", "main memory, pinned where there is CUDA"),
        ("cxl", "cxl", "CXL memory: NUMA nodes or device-DAX"),
        ("disk", "disk", "slab files with checksums, kept over a restart"),
    )
    parts = [_text(24, 34, "Where a page of KV can be", "head")]
    for row, (kind, name, what) in enumerate(rows):
        y = top + step * row
        parts += _box(left, y, width, height, kind, name, what)
        if row:
            down, up = left + 60, left + width - 60
            parts += _arrow(down, y - step + height, down, y)
            parts += _arrow(up, y, up, y - step + height)
            words = ("offload", "load") if row == 1 else ("demote", "promote")
            middle = y - (step - height) / 2 + 4
            parts.append(_text(down - 10, middle, words[0], "soft small end"))
            parts.append(_text(up + 10, middle, words[1], "soft small"))
    host_y = top + step
    peer_x = left + width + 90
    what = "other servers of a pool"
    parts += _box(peer_x, host_y, 170, height, "peer", "peer", what)
    parts += _arrow(peer_x, host_y + height / 2, left + width, host_y + height / 2)
    middle = host_y + height / 2 - 8
    parts.append(_text(peer_x - 45, middle, "pull", "soft small mid"))
    chosen = "load or compute,"
    parts.append(_text(24, top + 22, chosen, "small bold"))
    parts.append(_text(24, top + 39, "by measured costs", "small bold"))
    parts += _arrow(150, top + height / 2, left, top + height / 2)
    bottom = top + step * (len(rows) - 1) + height
    return _svg(bottom + 28, "The chain of tiers", parts)


def _box(
    x: float, y: float, width: float, height: float, kind: str, name: str, what: str
) -> list[str]:
    return [
        f'<rect class="{kind} box" x="{x:g}" y="{y:g}" width="{width:g}" '
        f'height="{height:g}" rx="6"/>',
        _text(x + 14, y + 21, name, "bold"),
        _text(x + 14, y + 38, what, "soft small"),
    ]


def _arrow(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    """Draw an upright or a level arrow that ends short of its aim."""
    right, down = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    x1, y1, x2, y2 = x1 + 3 * right, y1 + 3 * down, x2 - 3 * right, y2 - 3 * down
    back_x, back_y = x2 - 7 * right, y2 - 7 * down
    corners = (
        (x2, y2),
        (back_x + 4 * down, back_y + 4 * right),
        (back_x - 4 * down, back_y - 4 * right),
    )
    points = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return [
        _line(x1, y1, back_x, back_y, "way"),
        f'<polygon class="tip" points="{points}"/>',
    ]


def _is_first(key: str) -> bool:
    """Whether a request is a first turn, by its key (``s3.t0``)."""
    return key.endswith(".t0")


def _ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 of each decade within a range."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in every if low <= tick <= high]


def _bar(
    x: float, y: float, width: float, height: float, shares: Iterable[tuple[str, float]]
) -> list[str]:
    parts = []
    for kind, share in shares:
        wide = share * width
        if wide > 0:
            # A gap of one unit keeps neighbours apart in any colours.
            parts.append(
                f'<rect class="{kind} fill" x="{x:.1f}" y="{y:.1f}" '
                f'width="{max(wide - 1, 0.5):.1f}" height="{height:g}"/>'
            )
        x += wide
    return parts


def _legend(
    x: float, y: float, kinds: Sequence[str], labels: Mapping[str, str] | None = None
) -> list[str]:
    parts = []
    for kind in kinds:
        label = (labels or {}).get(kind, kind)
        parts.append(
            f'<rect class="{kind} fill" x="{x:.1f}" y="{y - 10:g}" width="11" '
            'height="11"/>'
        )
        parts.append(_text(x + 16, y, label, "small"))
        x += 26 + 6.9 * len(label)
    return parts


def _text(x: float, y: float, words: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return (
        f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" '
        f'x2="{x2:.1f}" y2="{y2:.1f}"/>'
    )


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{_FIXED}\n{style()}\n"
        f"@media (prefers-color-scheme: dark){{{style(_DARK)}}}</style>\n"
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" '
        f'height="{height - 1:g}" rx="8"/>\n{inner}\n</svg>\n'
    )
