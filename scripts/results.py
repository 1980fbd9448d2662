"""Figures of README and docs, made from committed records: ``make results``.

Between ``<!-- results: NAME -->`` and ``<!-- /results -->`` stands what
``BLOCKS[NAME]`` makes of the records, and the pictures are drawn from them. Nothing
there is typed.

Each figure says when it was measured, at which commit and by which command. Of a kind
of record, the one whose source is today's is taken; where there is none, the newest,
and its figures say that the source is an earlier one. ``--check`` changes nothing and
fails where a figure is not what its record says.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import pictures
import tables
from kinds import BENCHES, KINDS, MICROS, PRINTS, RECORDS, Kind
from sgl_tiered_workloads.harness.machine import source_hash
from sgl_tiered_workloads.report import Summary, format_table

__all__ = ["BLOCKS", "CHANGED", "KINDS", "Kind", "filled", "main", "pages", "written"]

ROOT = Path(__file__).resolve().parents[1]

DATES = ROOT / RECORDS / "dates.json"
"""When records that do not say it themselves were made."""
MOST_UNEVEN = 1.25
"""How far equal work may differ between two servers whose speeds are compared."""
CHANGED = ", of an earlier source"
_BLOCK = re.compile(
    r"(<!-- results: ([a-z_-]+) -->\n).*?(<!-- /results -->)", re.S | re.M
)
_STAMP = re.compile(r"(\d{4})(\d{2})(\d{2})T(\d{2})(\d{2})(\d{2})Z")
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The records of a kind that count: one, or several on one source.

    Attributes:
        kind: of them.
        records: what is in them, oldest first.
        date, commit: of the newest.
        is_current: whether their source is today's.
        folder: of the newest.
    """

    kind: Kind
    records: tuple[Record, ...]
    date: str
    commit: str
    is_current: bool
    folder: str = ""

    @property
    def last(self) -> Record:
        """The newest record."""
        return self.records[-1]

    @property
    def when(self) -> str:
        """When and on what it was measured."""
        return f"{self.date}, {self.commit[:7]}{'' if self.is_current else CHANGED}"


def _read(path: Path) -> Record:
    """Return what is in a record.

    Of a file of lines that is what its first line says of the run, and the figures of
    its last one; nothing if the run was ended before that.
    """
    text = path.read_text()
    if path.suffix == ".json":
        return dict(json.loads(text))
    lines = text[: text.rfind("\n") + 1].splitlines() or ["{}"]
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    return {**first, "figures": last["figures"]} if "figures" in last else {}


def dated(path: Path) -> tuple[str, str]:
    """Return date and commit of a record, from itself or from ``dates.json``.

    Raises:
        SystemExit: a record without them has not been committed yet.
    """
    record = _read(path)
    known = json.loads(DATES.read_text()) if DATES.exists() else {}
    name = path.relative_to(ROOT).as_posix()
    said = known.get(name, {})
    stamp = _STAMP.search(path.name)
    date = record.get("date") or ("-".join(stamp.groups()[:3]) if stamp else "")
    date, commit = date or said.get("date"), record.get("commit") or said.get("commit")
    if not (date and commit):
        raise SystemExit(f"results: {name} says no date or commit; commit it first")
    return str(date), str(commit)


def _in_order(paths: Iterable[Path]) -> list[Path]:
    """Return records, oldest first; of one day and source by their numbers."""

    def key(path: Path) -> tuple[str, str, int, str]:
        stamp = _STAMP.search(path.name)
        time = _read(path).get("time", "")
        time = time or (":".join(stamp.groups()[3:]) if stamp else "")
        return dated(path)[0], time, len(path.name), path.name

    return sorted(paths, key=key)


def _files(name: str) -> list[Path]:
    """Return the records of a kind, without runs that came to nothing."""
    pattern = KINDS[name].pattern
    kept = ROOT.glob(f"{RECORDS}/{name}-*{Path(pattern).suffix}")
    return sorted(path for path in {*ROOT.glob(pattern), *kept} if _read(path))


@cache
def found(name: str) -> Found | None:
    """Return the records of a kind that count; None where there are none."""
    kind, paths = KINDS[name], _files(name)
    if not paths:
        return None
    told = {path: _read(path) for path in paths}
    now = source_hash(ROOT, kind.folders, kind.without)
    wanted = now
    if all(record["source"] != now for record in told.values()):
        wanted = told[_in_order(paths)[-1]]["source"]
    chosen = _in_order(path for path in paths if told[path]["source"] == wanted)
    date, commit = dated(chosen[-1])
    records = tuple(told[path] for path in chosen)
    folder = chosen[-1].parent.relative_to(ROOT).as_posix()
    return Found(kind, records, date, commit, wanted == now, folder)


def pages() -> list[Path]:
    """Return the documents that may hold blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return a document with its blocks made anew.

    Raises:
        KeyError: nobody makes a block of that name.
    """

    def make(block: re.Match[str]) -> str:
        return block[1] + BLOCKS[block[2]]() + "\n" + block[3]

    return _BLOCK.sub(make, text)


# --- what is written -----------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _times_lower(record: Record) -> float:
    plain, tiered = (record["summaries"][name] for name in ("plain", "tiered"))
    return float(plain["later_ttft_p50_s"] / tiered["later_ttft_p50_s"])


def _on(record: Record) -> str:
    machine = record["machine"]
    gpus = machine["accelerators"]
    what = ", ".join(gpu["name"] for gpu in gpus) if gpus else "no GPU"
    return f"{machine['cores']} CPU cores, {what}"


def _beside(record: Record) -> str:
    """Say where others computed on the machine as well when a run began."""
    load = float(record["load_before"])
    return f"; other work on the machine, load {load:.1f}" if load >= 0.5 else ""


def _missing(name: str) -> str:
    return f"*No record yet: `{KINDS[name].command}` makes it.*"


def first_turns_ratio(record: Record) -> float:
    """Return plain's median first turn over the tiered one: the same work in both."""
    medians = []
    for name in ("plain", "tiered"):
        times_s = record["ttft_s"][name].items()
        medians.append(median(time_s for key, time_s in times_s if key.endswith(".t0")))
    return medians[0] / medians[1]


def is_even(record: Record) -> bool:
    """Whether the machine was the same for both, so that a speed may be claimed."""
    return 1 / MOST_UNEVEN <= first_turns_ratio(record) <= MOST_UNEVEN


def demo_line() -> str:
    """Say the demo's result in one paragraph.

    Where the same work took one server longer than the other, the machine was busy in
    one of the two, and no speed is claimed.
    """
    demo = found("demo")
    if demo is None:
        return _missing("demo")
    record = demo.last
    if not is_even(record):
        ratio = first_turns_ratio(record)
        return (
            f"**{record['equal']} of {record['answers']} answers equal** to plain "
            f"SGLang's. No speed is claimed of this run: first turns, which are the "
            f"same work, took {ratio:.1f} times as long without tiers as with them, so "
            f"the machine was not the same for both (`{demo.kind.command}`; "
            f"{demo.when})."
        )
    plain, tiered = (record["summaries"][name] for name in ("plain", "tiered"))
    return (
        f"**{_times_lower(record):.1f} times lower** time to the first token of later "
        f"turns (median {plain['later_ttft_p50_s'] * 1e3:.0f} ms without tiers, "
        f"{tiered['later_ttft_p50_s'] * 1e3:.0f} ms with them), and "
        f"**{record['equal']} of {record['answers']} answers equal** to plain "
        f"SGLang's. {_on(record)}, a small model that we trained, "
        f"{record['shape']['num_sessions']} chats one request at a time, "
        f"{record['working_set_tokens'] / record['pool_tokens']:.1f} times as much KV "
        f"as the device pool holds (`{demo.kind.command}`; {demo.when}"
        f"{_beside(record)})."
    )


def demo_block() -> str:
    """Print the demo's end as a terminal shows it."""
    demo = found("demo")
    if demo is None:
        return _missing("demo")
    record = demo.last
    if not is_even(record):
        return "*Shown once there is a record of a machine that was even.*"
    summaries = [Summary(**each) for each in record["summaries"].values()]
    titles = {name: each["title"] for name, each in record["summaries"].items()}
    right = ", ".join(f"{titles[n]} {count}" for n, count in record["right"].items())
    plain, tiered = summaries[0], summaries[1]
    lines = [
        "negative control: wrong pages are caught",
        f"equality gate GREEN: {record['bit_for_bit']} of {record['answers']} answers "
        "compared bit for bit ...",
        "",
        format_table(summaries),
        f"right answers of {record['answers']}: {right}",
        f"TTFT of later turns, median: {plain.later_ttft_p50_s * 1e3:.0f} ms without "
        f"tiers, {tiered.later_ttft_p50_s * 1e3:.0f} ms with them: "
        f"{_times_lower(record):.1f} times lower",
    ]
    shown = "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())
    return f"```text\n{shown}\n```\n\n({demo.when}; {_on(record)}{_beside(record)})"


@dataclass(frozen=True, slots=True)
class Answers:
    """What equality runs on one source come to.

    Attributes:
        sums: counts over all worlds.
        tiers: compared answers, and those of them equal bit for bit, by tier.
        pairs: of features that ran.
        refused: pairs that the product refuses.
        faults: kinds of fault that struck.
    """

    sums: Mapping[str, int]
    tiers: Mapping[str, tuple[int, int]]
    pairs: int
    refused: int
    faults: int


def answers(records: Iterable[Record]) -> Answers:
    """Add up the worlds of equality runs."""
    worlds = [world for record in records for world in record["worlds"]]
    run = [world for world in worlds if not world.get("refused")]
    names = ("judged", "compared", "exact", "wrong", "errors", "kills")
    planted = ("planted", "planted_caught")
    by_tier, exact = Counter[str](), Counter[str]()
    for world in run:
        by_tier.update(world["by_tier"])
        exact.update(world["exact_by_tier"])
    return Answers(
        {name: sum(int(world[name]) for world in run) for name in (*names, *planted)},
        {tier: (count, exact[tier]) for tier, count in by_tier.items()},
        len({world["pair"] for world in run}),
        len({world["pair"] for world in worlds if world.get("refused")}),
        len({fault for world in run for fault in world["struck"]}),
    )


def equality_table() -> str:
    """Tell what the comparison of answers found."""
    runs = found("equality")
    if runs is None:
        return _missing("equality")
    told = answers(runs.records)
    sums = told.sums
    order = [tier for tier in pictures.TIERS if tier in told.tiers]
    lines = [
        f"{_number(sums['judged'])} answers of {told.pairs} pairs of features, of "
        f"which {_number(sums['compared'])} had pages from below the device: "
        f"{sums['wrong']} wrong, {sums['errors']} failed. {sums['kills']} servers were "
        f"killed, {told.faults} kinds of fault struck, and {sums['planted_caught']} of "
        f"{sums['planted']} planted faults were caught. {told.refused} pairs are "
        f"refused by the product (`{runs.kind.command}`, {len(runs.records)} runs; "
        f"{runs.when}; {_on(runs.last)}).",
        "",
        "| tier | answers with pages from there | equal bit for bit | "
        "within plain SGLang's own spread |",
        "|---|---|---|---|",
    ]
    for tier in order:
        count, exact = told.tiers[tier]
        row = (tier, _number(count), _number(exact), _number(count - exact))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def soak_line() -> str:
    """Tell what 45 minutes of load left behind."""
    run = found("soak")
    if run is None:
        return _missing("soak")
    record = run.last
    sent = sum(record["sent"].values())
    left = record["flows"] + record["pins"] + record["empty_namespaces"]
    return (
        f"{_number(sent)} requests in {record['minutes']:.0f} minutes, some of them "
        f"aborted, a tier failing or slow in {record['fault_rounds']} of "
        f"{record['rounds']} rounds: {record['wrong']} wrong answers, "
        f"{record['errors']} errors, {left} requests, pins or names left over. Memory "
        f"grew by {record['rss_mb_per_hour']:+.1f} MB/h more than plain SGLang's (half "
        f"width {record['rss_half_width']:.1f}); a planted leak of "
        f"{record['planted']['bytes_per_request']} bytes a request was "
        f"{'caught' if record['planted']['caught'] else 'missed'} "
        f"(`{run.kind.command}`; {run.when}; {_on(record)})."
    )


def fuzz_line() -> str:
    """Tell what odd inputs found."""
    run = found("fuzz")
    if run is None:
        return _missing("fuzz")
    record = run.last
    return (
        f"{_number(record['inputs'])} odd inputs at {record['targets']} entry points: "
        f"{record['crashes']} crashes, {record['wrong']} wrong, and "
        f"{record['planted_found']} of {record['planted']} planted faults found "
        f"(`{run.kind.command}`; {run.when})."
    )


def restart_line() -> str:
    """Tell how a server starts on a full disk."""
    run = found("restart")
    if run is None:
        return _missing("restart")
    record = run.last
    full, empty = record["starts_s"]["full"], record["starts_s"]["empty"]
    return (
        f"On a disk with {_number(record['pages'])} pages a server is ready after "
        f"{min(full):.1f} to {max(full):.1f} s, on an empty one after {min(empty):.1f} "
        f"to {max(empty):.1f}; when idle it has taken over all of them "
        f"{record['adopt_s_idle']:.0f} s after it opened the folder "
        f"({record['state_bytes_per_page']} bytes of memory a page). Under load it "
        f"serves {record['throughput_while_adopting']:.0%} of the tokens per second "
        f"that it serves afterwards, and takes over {_adopted(record)} ("
        f"`{run.kind.command}`; {run.when}; {_on(record)})."
    )


def _adopted(record: Record) -> str:
    """Tell how many pages were taken over under load."""
    if "adopted_in_the_windows" not in record:
        # Of a record whose windows began with the scan.
        ends = [window["adopted_when_the_window_ended"] for window in record["busy"]]
        return f"{_number(min(ends))} to {_number(max(ends))} pages in the first minute"
    adopted = record["adopted_in_the_windows"]
    seconds = statistics.median(each["adopting"]["seconds"] for each in record["busy"])
    scanning = record["throughput_while_scanning"]
    while_scanning = (
        ""
        if scanning is None
        else (f"; while it still reads the records it serves {scanning:.0%}")
    )
    return (
        f"{_number(min(adopted))} to {_number(max(adopted))} pages in {seconds:.0f} s"
        f"{while_scanning}"
    )


def _interval(record: Record, key: str) -> str:
    """Return a share and its interval in per cent."""
    low, high = record[f"{key}_interval"]
    return f"{record[key]:.1%} ({low:.1%} to {high:.1%})"


def no_reuse_line() -> str:
    """Tell what tiers cost where nothing comes again."""
    run = found("no-reuse")
    if run is None:
        return _missing("no-reuse")
    record = run.last
    if not record["outputs_identical"]:
        return "*The answers of the last run differ: no speed is claimed.*"
    rate = "no_reuse_throughput_vs_plain"
    return (
        f"Of plain SGLang's throughput on prompts that never come again, "
        f"{_interval(record, rate)} is left with host memory and "
        f"{_interval(record, rate + '_disk')} with a disk too, for "
        f"{_interval(record, 'cpu_per_prompt_vs_plain')} of its CPU seconds a prompt; "
        f"in the first minutes, before the write policy has learned that nothing comes "
        f"again, {record[rate + '_first_minutes']:.1%} and "
        f"{record[rate + '_disk_first_minutes']:.1%}. A second plain SGLang has "
        f"{_interval(record, 'plain_vs_plain')} of the first one's throughput "
        f"({record['blocks']} blocks of windows in turns, 95 % intervals; "
        f"`{run.kind.command}`; {run.when}; {_on(record)}{_beside(record)})."
    )


def reuse_line() -> str:
    """Tell how near hits below the device come to the device's; medians of the runs."""
    run = found("reuse")
    if run is None:
        return _missing("reuse")
    if not all(record["outputs_identical"] for record in run.records):
        return "*The answers of a run differ: no speed is claimed.*"

    def middle(key: str) -> float:
        # None where a peer was not slower than the device, so that there is no ratio.
        return median(record.get(key) or float("inf") for record in run.records)

    count = len(run.records)
    return (
        f"A hit of 6,000 tokens in host memory gives "
        f"{middle('ttft_speedup_of_bound'):.0%} of the best possible speed-up over "
        f"recomputing, which is a device hit's. The time that it takes beyond a device "
        f"hit is {middle('host_hit_penalty_vs_hicache'):.2f} times HiCache's (the "
        f"better of two forms), on disk with a cold page cache "
        f"{middle('disk_hit_penalty_vs_hicache_file'):.2f} times that of HiCache's "
        f"file backend. On working sets of several device pools the median time to "
        f"the first token is {middle('ttft_p50_speedup_vs_plain'):.1f} times lower "
        f"than plain SGLang's or better (`{run.kind.command}`, "
        f"{count} run{'s' if count > 1 else ''}; {run.when}; {_on(run.last)})."
    )


def _engines(record: Record) -> str:
    """Say on what existing engines were compared with, and what is not as wanted."""
    told = record["figures"]
    beside = "" if told["alone"] else ", beside other work"
    wanted = ", ".join(f"`{name}`" for name in told["targets_missed"])
    return f"{_on(record)}{beside}). Targets missed: {wanted or 'none'}."


def router_line() -> str:
    """Tell how our router compares with others where memory is short."""
    run = found("router")
    if run is None:
        return _missing("router")
    told = run.last["figures"]
    if told["wrong"] or not told["evictions"]:
        return "*An answer was wrong, or nothing was evicted: no speed is claimed.*"
    ratios = {
        "that of routing by session": "router_p99_vs_session",
        "that of the better of sglang-router's two policies": (
            "router_p99_vs_sglang_router"
        ),
    }
    said = [
        f"{_interval(told, key)} of {what}"
        for what, key in ratios.items()
        if key in told
    ]
    counts = ", ".join(f"{n} at {cell}" for cell, n in told["repeats"].items())
    return (
        f"P99 of the time to the first token behind our router is "
        f"{' and '.join(said) or 'not known yet'} (the median of two rates, 95 % "
        f"intervals), on chats, documents and ReAct whose working set is four times "
        f"the devices' memory, with a server killed and one added in each run. "
        f"{told['lost']} requests of all routers were lost (`{run.kind.command}`; "
        f"{told['runs']} runs, whole repeats: {counts or 'none'}; {run.when}; "
        f"{_engines(run.last)}"
    )


def store_line() -> str:
    """Tell what a prefix from another server takes, from our pool and from others."""
    run = found("store")
    if run is None:
        return _missing("store")
    told = run.last["figures"]
    if told["wrong"]:
        return "*An answer was wrong: no speed is claimed.*"
    ratios = {
        "what computing it takes": "ttft_vs_recompute",
        "what HiCache with Mooncake Store takes": "ttft_vs_mooncake_store",
        "the latter, with host tiers as small as Mooncake's segment": (
            "ttft_quarter_vs_mooncake_store"
        ),
    }
    said = [
        f"{_interval(told, key)} of {what}"
        for what, key in ratios.items()
        if key in told
    ]
    return (
        f"To the first token of a prompt whose prefix another server has computed, our "
        f"pool takes {'; '.join(said) or 'a time not known yet'} (means, 95 % "
        f"intervals). {told['lost']} requests were lost (`{run.kind.command}`; "
        f"{told['blocks']} repeats; {run.when}; {_engines(run.last)}"
    )


def results_table() -> str:
    """Return README's rows; those of reuse once there are records."""
    rows = [
        ("Time to the first token, and the answers", demo_line()),
        ("Same answers, with faults and kills", equality_table().split("\n")[0]),
        ("Restart", restart_line()),
    ]
    more = {
        "reuse": ("Hits beside HiCache's", reuse_line),
        "no-reuse": ("Cost without reuse", no_reuse_line),
    }
    rows += [(what, line()) for name, (what, line) in more.items() if found(name)]
    head = ["| what | seen |", "|---|---|"]
    return "\n".join(head + [f"| {what} | {seen} |" for what, seen in rows])


def measured_table() -> str:
    """Return what was measured, on what, when and by which command."""
    titles = {
        "demo": "chats with and without tiers",
        "equality": "answers against plain SGLang's",
        "soak": "45 minutes of load",
        "fuzz": "odd inputs",
        "restart": "a start on a full disk",
        "reuse": "hits beside HiCache's",
        "no-reuse": "prompts that never come again",
        "router": "routers where memory is short",
        "store": "a prefix from another server",
    }
    lines = [
        "| what | command | when, commit | on | records |",
        "|---|---|---|---|---|",
    ]
    for name, title in titles.items():
        run, kind = found(name), KINDS[name]
        folder = run.folder if run else kind.pattern.rpartition("/")[0]
        on = (run.when, _on(run.last)) if run else ("not recorded yet", "")
        lines.append(f"| {title} | `{kind.command}` | {on[0]} | {on[1]} | `{folder}` |")
    return "\n".join(lines)


def bench_line(name: str) -> str:
    """Return what the last line of a bench says, and of which run it is."""
    run = found(name)
    if run is None:
        return _missing(name)
    record, bench = run.last, BENCHES[name]
    told = tables.key_line(record["figures"], bench.keys)
    if not told and bench.keys:
        told = f"*it ended with status {record['exit_code']} and no figure*"
    asked = record["command"].partition(f" {bench.program} ")[2]
    # Of a module that Python runs, make gives all.
    words = f' ARGS="{asked}"' if asked and bench.program != "-m" else ""
    return (
        f"{told or 'kept whole in the record'} (`{run.kind.command}{words}`; "
        f"{run.when}; {_on(record)})."
    )


def bench_table() -> str:
    """Return the benches whose last lines are kept, a line each."""
    lines = ["| what | seen |", "|---|---|"]
    lines += [f"| {one.title} | {bench_line(name)} |" for name, one in BENCHES.items()]
    return "\n".join(lines)


def micro_table(names: Iterable[str] = MICROS) -> str:
    """Return medians and 99th percentiles of micro benchmarks, a line for each run."""
    lines = ["| program | takes | when |", "|---|---|---|"]
    for name in names:
        run = found(f"micro-{name}")
        if run is None:
            lines.append(f"| `{name}.py` | {_missing(f'micro-{name}')} | |")
            continue
        for command, record in tables.by_command(run.records).items():
            told = tables.times(record["figures"])
            lines.append(f"| `{command}` | {told} | {run.when}; {_on(record)} |")
    return "\n".join(lines)


def fidelity_table() -> str:
    """Return the simulator's figures beside a real server's."""
    run = found("fidelity")
    if run is None:
        return _missing("fidelity")
    return f"{bench_line('fidelity')}\n\n{tables.seen_and_predicted(run.last)}"


EVENTS_PER_PAGE = 4
"""A stored page is written to host memory as well, and given up in both places."""
PAGES_HELD = 9_000 + 40_000
"""By an instance of the plan: on the device, and in 512 GB of host memory."""


def plan_table() -> str:
    """Return what a router of a fleet would need: simulated work by measured costs."""
    fleets, costs = found("sim-cluster_plan"), found("micro-routing")
    if fleets is None or costs is None:
        return _missing("micro-routing" if fleets else "sim-cluster_plan")
    by_size = {one["figures"]["instances"]: one["figures"] for one in costs.records}
    lines = [
        "| instances | index | events/s | of a core | decisions, of a core |",
        "|---|---|---|---|---|",
    ]
    for fleet in fleets.last["figures"]:
        num = fleet["instances"]
        if num not in by_size:
            continue
        cost = by_size[num]
        index_gb = num * PAGES_HELD * cost["bytes_per_claim"] / 1e9
        events = num * EVENTS_PER_PAGE * fleet["stored_pages_per_s_each"]
        per_s = fleet["requests_per_s"]
        decisions = per_s * cost["decision, all of it"]["p50_us"] / 1e6
        lines.append(
            f"| {num:,} | {index_gb:.1f} GB | {_number(events)} | "
            f"{events / cost['block_events_per_s']:.0%} | {_number(per_s)}/s, "
            f"{decisions:.0%} |"
        )
    return "\n".join(lines)


def printed(name: str) -> str:
    """Return what a program of the simulator printed."""
    run = found(f"sim-{name}")
    if run is None:
        return _missing(f"sim-{name}")
    return f"Simulated; {run.when}.\n\n{tables.printed(run.records)}"


def printed_table() -> str:
    """Return which pages are a program's print, and of when."""
    lines = ["| page | program | printed |", "|---|---|---|"]
    for name, (page, _) in sorted(PRINTS.items(), key=lambda each: each[1]):
        run = found(f"sim-{name}")
        path = ROOT / f"docs/benchmarks/simulator/{page}.md"
        title = path.read_text().partition("\n")[0].lstrip("# ")
        when = run.when if run else _missing(f"sim-{name}")
        lines.append(f"| [{title}](simulator/{page}.md) | `{name}.py` | {when} |")
    return "\n".join(lines)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "demo-line": demo_line,
    "demo-block": demo_block,
    "equality-table": equality_table,
    "soak-line": soak_line,
    "fuzz-line": fuzz_line,
    "restart-line": restart_line,
    "reuse-line": reuse_line,
    "no-reuse-line": no_reuse_line,
    "router-line": router_line,
    "store-line": store_line,
    "results-table": results_table,
    "measured-table": measured_table,
    "bench-table": bench_table,
    "micro-table": micro_table,
    "routing-table": partial(micro_table, ("routing",)),
    "fidelity-table": fidelity_table,
    "plan-table": plan_table,
    "printed-table": printed_table,
    **{f"{name}-line": partial(bench_line, name) for name in BENCHES},
    **{f"sim-{name}": partial(printed, name) for name in PRINTS},
}


def drawn() -> dict[Path, str]:
    """Return the pictures by their files."""
    folder = ROOT / "docs/pictures"
    made = {folder / "tiers.svg": pictures.tiers()}
    demo, runs, soak = found("demo"), found("equality"), found("soak")
    if demo is not None:
        even = is_even(demo.last)
        made[folder / "demo.svg"] = pictures.demo(demo.last, demo.when, even)
    if runs is not None:
        told = answers(runs.records)
        made[folder / "answers.svg"] = pictures.answers(
            told.tiers, told.sums["wrong"], runs.when
        )
    if soak is not None:
        made[folder / "memory.svg"] = pictures.memory(soak.last["series"], soak.when)
    return made


def written() -> dict[Path, str]:
    """Return what every file that we make is to hold."""
    texts = {page: filled(page.read_text()) for page in pages()}
    return {**texts, **drawn()}


def note_dates() -> None:
    """Ask git once when a record that does not say so was committed."""
    known = json.loads(DATES.read_text()) if DATES.exists() else {}
    paths = {path for kind in KINDS for path in _files(kind)}
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    known = {name: said for name, said in known.items() if name in names}
    for name, path in names.items():
        record = _read(path)
        has_date = "date" in record or _STAMP.search(path.name)
        if name in known or (has_date and "commit" in record):
            continue
        asked = ("git", "log", "--diff-filter=A", "--format=%cs %h", "--", name)
        told = subprocess.run(
            asked, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        if told:
            known[name] = {"date": told[-2], "commit": told[-1]}
    DATES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Write, or check; 0 where nothing differed or everything was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(arguments).check
    if not check:
        note_dates()
    changed = []
    for path, text in written().items():
        if path.exists() and path.read_text() == text:
            continue
        changed.append(path.relative_to(ROOT).as_posix())
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    stale = [name for name in KINDS if (run := found(name)) and not run.is_current]
    missing = [name for name in KINDS if found(name) is None]
    print(json.dumps({"changed": changed, "earlier": stale, "missing": missing}))
    return 1 if check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
