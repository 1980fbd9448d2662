"""Tables and pictures, derived from records and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from sgl_tiered_workloads.lineage import page_keys
from sgl_tiered_workloads.records import RequestRecord

__all__ = ["Summary", "draw_demo", "format_table", "summarise", "tokens_by_source"]

_SOURCES = ("device", "host", "cxl", "disk", "storage", "recomputed", "new")
_COLOURS = {
    "device": "#2a6f97",
    "host": "#61a5c2",
    "cxl": "#89c2d9",
    "disk": "#a9d6e5",
    "storage": "#a9d6e5",
    "recomputed": "#e07a5f",
    "new": "#dddddd",
}
_SYSTEM_COLOURS = ("#e07a5f", "#2a6f97", "#9a9a9a", "#81b29a", "#b08968")


@dataclass(frozen=True, slots=True)
class Summary:
    """One system's figures over one run.

    Attributes:
        title: of the system.
        num_requests: answered in full.
        num_errors: not answered in full.
        ttft_p50_s: median time to first token over all requests.
        ttft_p99_s: its 99th percentile.
        later_ttft_p50_s: median over the requests that had a past (second turns
            and later); all requests if none had.
        tpot_p50_s: median time per output token.
        output_tokens_per_s: over the run's wall time.
        sources: prompt tokens by where their KV came from.
    """

    title: str
    num_requests: int
    num_errors: int
    ttft_p50_s: float
    ttft_p99_s: float
    later_ttft_p50_s: float
    tpot_p50_s: float
    output_tokens_per_s: float
    sources: Mapping[str, int]


def tokens_by_source(
    records: Sequence[RequestRecord], page_size: int
) -> dict[str, int]:
    """Return prompt tokens by the tier that their KV came from.

    ``new`` tokens were never seen before in this run, whatever the cache; those
    that were, and yet were computed again, are ``recomputed``. Hits that no tier
    claims count under ``device``, as SGLang itself reports them.

    Args:
        records: of one run, which started with empty caches.
        page_size: tokens per page; a prefix is seen in whole pages.
    """
    counted: Counter[str] = Counter()
    seen: set[bytes] = set()
    for record in sorted(records, key=lambda record: record.order):
        keys = page_keys(record, page_size)
        tiers = {t: n for t, n in record.cached_by_tier.items() if n > 0}
        counted.update(tiers)
        counted["device"] += record.cached_tokens - sum(tiers.values())
        known = sum(1 for _ in takewhile(seen.__contains__, keys)) * page_size
        # At least one token of a prompt is always computed.
        known = max(record.cached_tokens, min(known, len(record.prompt) - 1))
        counted["recomputed"] += known - record.cached_tokens
        counted["new"] += len(record.prompt) - known
        seen.update(keys)
    return {source: counted[source] for source in _SOURCES if counted[source] > 0}


def summarise(title: str, records: Sequence[RequestRecord], page_size: int) -> Summary:
    """Summarise one run of a system that started with empty caches.

    Raises:
        ValueError: no request was answered.
    """
    answered = [record for record in records if record.error is None]
    if not answered:
        raise ValueError(f"{title}: no request was answered")
    ttft_s = np.array([record.ttft_s for record in answered])
    later_s = [record.ttft_s for record in answered if _has_past(record)]
    begin_s = min(record.started_s for record in answered)
    end_s = max(record.token_times_s[-1] for record in answered)
    return Summary(
        title=title,
        num_requests=len(answered),
        num_errors=len(records) - len(answered),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        later_ttft_p50_s=float(np.percentile(later_s or ttft_s, 50)),
        tpot_p50_s=float(np.percentile([r.tpot_s for r in answered], 50)),
        output_tokens_per_s=sum(len(r.output) for r in answered) / (end_s - begin_s),
        sources=tokens_by_source(answered, page_size),
    )


def _has_past(record: RequestRecord) -> bool:
    """Whether it is a second or later turn, by its key (``s3.t1``)."""
    _, _, turn = record.key.rpartition(".t")
    return turn.isdigit() and int(turn) > 0


def format_table(summaries: Sequence[Summary]) -> str:
    """Return a table of several systems, one line each."""
    used = [s for s in _SOURCES if any(s in summary.sources for summary in summaries)]
    head = [
        "system",
        "TTFT p50 ms",
        "p99 ms",
        "later turns p50 ms",
        "TPOT ms",
        "out tok/s",
        *(f"{source} tok" for source in used),
    ]
    rows = [head]
    for item in summaries:
        title = item.title
        if item.num_errors:
            title += f" ({item.num_errors} errors)"
        rows.append(
            [
                title,
                f"{item.ttft_p50_s * 1e3:.0f}",
                f"{item.ttft_p99_s * 1e3:.0f}",
                f"{item.later_ttft_p50_s * 1e3:.0f}",
                f"{item.tpot_p50_s * 1e3:.0f}",
                f"{item.output_tokens_per_s:.1f}",
                *(f"{item.sources.get(source, 0):,}" for source in used),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def draw_demo(
    path: Path,
    runs: Mapping[str, Sequence[RequestRecord]],
    page_size: int,
    subtitle: str,
) -> None:
    """Draw TTFT of every request and tokens by source, one row per system.

    Args:
        path: of the PNG.
        runs: records by the system's title, drawn from top to bottom.
        page_size: tokens per page.
        subtitle: says what was run and where.
    """
    # The canvas is made directly: pyplot would keep global state and may look
    # for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    times, sources = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    figure.suptitle(
        "Time to first token, and where the prompt's KV came from",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    figure.supxlabel(subtitle, x=0.01, ha="left", fontsize=8.5, color="#555555")
    _draw_times(times, runs)
    _draw_sources(sources, runs, page_size)
    titles = list(runs)
    times.set_yticks(range(len(titles)), titles, fontsize=10)
    times.set_ylim(len(titles) - 0.45, -0.55)
    for axes in (times, sources):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_times(axes: Any, runs: Mapping[str, Sequence[RequestRecord]]) -> None:
    # Jitter only spreads dots that would hide each other; it carries no data.
    generator = np.random.default_rng(0)
    for row, records in enumerate(runs.values()):
        colour = _SYSTEM_COLOURS[row % len(_SYSTEM_COLOURS)]
        for later in (False, True):
            times_s = [
                r.ttft_s for r in records if r.error is None and _has_past(r) is later
            ]
            if not times_s:
                continue
            height = row + generator.uniform(-0.22, 0.22, len(times_s))
            axes.scatter(
                np.array(times_s) * 1e3,
                height,
                s=20,
                color=colour if later else "none",
                edgecolors=colour,
                linewidths=0.9,
                alpha=0.75,
            )
            if later:
                median_ms = float(np.median(times_s)) * 1e3
                axes.plot([median_ms] * 2, [row - 0.33, row + 0.33], color="#222222")
                axes.annotate(
                    f"{median_ms:.0f} ms",
                    (median_ms, row - 0.34),
                    ha="center",
                    va="bottom",
                    fontsize=9,
                )
    axes.set_xscale("log")
    for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatter(_plain_number)
    axes.set_xlabel(
        "TTFT of each request, ms (log)\nopen: first turns, always cold; "
        "filled: later turns, line: their median",
        fontsize=9,
    )
    axes.grid(axis="x", which="both", color="#eeeeee")
    axes.set_axisbelow(True)


def _plain_number(value: float, _: int) -> str:
    """Label 1, 2 and 5 of each decade, as plain numbers."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _draw_sources(
    axes: Any, runs: Mapping[str, Sequence[RequestRecord]], page_size: int
) -> None:
    bars: dict[str, Any] = {}
    for row, records in enumerate(runs.values()):
        left = 0.0
        answered = [record for record in records if record.error is None]
        for source, tokens in tokens_by_source(answered, page_size).items():
            bars[source] = axes.barh(
                row,
                tokens / 1e3,
                left=left,
                height=0.5,
                color=_COLOURS[source],
                edgecolor="white",
            )
            left += tokens / 1e3
    axes.set_xlabel("prompt tokens, thousands", fontsize=9)
    names = [source for source in _SOURCES if source in bars]
    axes.legend(
        [bars[name] for name in names],
        names,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(names),
        frameon=False,
        fontsize=9,
        columnspacing=1.2,
        handlelength=1.2,
    )
