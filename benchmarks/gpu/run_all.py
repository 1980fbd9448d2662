"""All that has to be seen on a GPU: tests, copies, layers under a forward, servers.

    python benchmarks/gpu/run_all.py                  # about 10 minutes on one GPU
    python benchmarks/gpu/run_all.py --dry-run        # the same on a CPU, tiny

Writes ``records.jsonl`` (a header with commit and machine, then raw seconds) and prints
a table; the last line is one JSON object. Wrong bytes, wrong answers or a failed test
end it with status 1 before a speed is reported. Servers are started where SGLang and
FlashInfer are installed; what is missing is said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from movement.acts import measure_acts
from movement.copies import measure_copies
from movement.layers import measure_layers
from movement.overlap import measure_overlap
from movement.place import Place
from movement.servers import measure_servers, what_is_missing
from movement.stack import StackShape
from sgl_tiered_kernels import page_copy
from sgl_tiered_workloads.records import make_header
from sgl_tiered_workloads.server import ServerStartError, exit_on_signals

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/kernels",
    *(
        f"tests/unit/engines/test_{name}.py"
        for name in (
            "cuda_ops",
            "cuda_layers",
            "cuda_acts",
            "cuda_auto",
            "layered_indices",
            "collectives",
        )
    ),
)
SERVER_REPEATS = 3
PIECES = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 512 << 10, 2 << 20]
DRY_STACK = StackShape(num_layers=4, hidden=64, intermediate=128, num_heads=2)


def main(argv: list[str] | None = None) -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cached-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--servers",
        choices=("auto", "on", "off"),
        default="auto",
        help="auto: where SGLang and FlashInfer are installed, and not in a dry run",
    )
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run shows the plumbing")
    place = Place("cpu" if args.dry_run else "cuda")
    page_copy.prepare()
    if not args.dry_run and not _tests_pass():
        return 1
    records = []
    try:
        for record in _measure(place, args):
            records.append(record)
            print(_line(record), flush=True)
    except AssertionError as problem:
        print(f"WRONG BYTES, no figures: {problem}", file=sys.stderr)
        return 1
    try:
        for record in _serve(args):
            records.append(record)
            print(_line(record), flush=True)
    except (AssertionError, ServerStartError) as problem:
        # What was seen before stands: it is about copies, and was compared.
        print(f"SERVERS FAILED, no figures: {problem}", file=sys.stderr)
        return 1
    facts = {"dry_run": args.dry_run, "repeats": args.repeats, "torch_cuda": _cuda()}
    _write(args.out / "records.jsonl", facts, records)
    print(json.dumps(_summary(records) | {"dry_run": args.dry_run}))
    return 0


def _measure(place: Place, args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    dry = args.dry_run
    repeats = min(args.repeats, 2) if dry else args.repeats
    pieces = PIECES[:2] if dry else PIECES
    num_bytes = 64 << 10 if dry else 128 << 20
    yield from measure_copies(place, pieces, num_bytes, repeats)
    for measure in (measure_overlap, measure_layers):
        yield from measure(
            place,
            DRY_STACK if dry else StackShape(),
            page_tokens=args.page_tokens,
            cached_tokens=min(args.cached_tokens, 64) if dry else args.cached_tokens,
            new_tokens=min(args.new_tokens, 16) if dry else args.new_tokens,
            repeats=repeats,
        )
    yield from measure_acts(
        place,
        DRY_STACK if dry else StackShape(),
        page_tokens=args.page_tokens,
        cached_tokens=min(args.cached_tokens, 64) if dry else args.cached_tokens,
        repeats=repeats,
    )


def _serve(args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Compare servers where they can run; a record says why they were not."""
    is_cuda = not args.dry_run
    if args.servers == "off" or (args.servers == "auto" and args.dry_run):
        return
    missing = what_is_missing(is_cuda=is_cuda)
    if missing and args.servers == "auto":
        yield {"kind": "servers", "way": "not run", "missing": missing}
        return
    repeats = SERVER_REPEATS if is_cuda else 1
    yield from measure_servers(args.out, is_cuda=is_cuda, repeats=repeats)


def _tests_pass() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *TESTS]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def _line(record: dict[str, Any]) -> str:
    if record["kind"] == "copy":
        rate = record["num_bytes"] / statistics.median(record["seconds"]) / 1e9
        plain = record["num_bytes"] / statistics.median(record["plain_s"]) / 1e9
        return (
            f"copy {record['direction']:4} {record['piece_bytes']:8d} B pieces by "
            f"{record['way']:8} {rate:7.2f} GB/s, plain {plain:7.2f}"
        )
    if record["kind"] == "layers":
        return (
            f"layers in {record['way']:8} memory, efficiency {_streamed(record):.3f}, "
            f"down {_down_rate(record):.2f} GB/s"
        )
    if record["kind"] == "acts":
        told = _acts(record)
        return (
            f"activations: {record['act_pages']} pages rebuilt in "
            f"{told['kv_gen_ms']:.3f} ms, loaded as KV in {told['load_kv_ms']:.3f} ms, "
            f"overlap {told['acts_overlap']:.3f}"
        )
    if record["kind"] == "servers":
        if "missing" in record:
            return f"servers not run: {record['missing']} is not installed"
        return (
            f"servers: answers equal ({record['exact_fraction']:.0%} of the tokens bit "
            f"for bit); at once, layer-wise over plain: time to first token "
            f"{_over_plain(record, 'mean_ttft_s'):.3f}, all "
            f"{_over_plain(record, 'total_s'):.3f}"
        )
    return (
        f"overlap by {record['way']:8} efficiency {_efficiency(record):.3f}, forward "
        f"beside an offload {_offload_cost(record):.3f}"
    )


def _efficiency(record: dict[str, Any]) -> float:
    """Return both over max(forward, load) plus the first layer's load; 1 is ideal."""
    median = {
        name: statistics.median(record[name])
        for name in ("forward_s", "load_s", "both_s", "first_layer_s")
    }
    longer = max(median["forward_s"], median["load_s"])
    return median["both_s"] / (longer + median["first_layer_s"])


def _streamed(record: dict[str, Any]) -> float:
    """Return the streamed forward over the longer of forward and copies; 1 is ideal."""
    median = {
        name: statistics.median(record[name])
        for name in ("forward_s", "link_s", "both_s")
    }
    return median["both_s"] / max(median["forward_s"], median["link_s"])


def _acts(record: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of one layer, and how well loads and rebuilds overlap.

    The overlap is the time of both over the longer of loads and rebuilds; 1 is ideal.
    """
    names = ("kv_gen_s", "load_act_s", "load_kv_s", "loads_s", "both_s")
    median = {name: statistics.median(record[name]) for name in names}
    rebuilds_s = record["num_layers"] * median["kv_gen_s"]
    figures = {f"{name[:-2]}_ms": 1e3 * median[name] for name in names[:3]}
    figures["acts_overlap"] = median["both_s"] / max(median["loads_s"], rebuilds_s)
    return figures


def _down_rate(record: dict[str, Any]) -> float:
    """Return GB/s of layers that go down one at a time."""
    return float(record["stream_bytes"] / statistics.median(record["down_s"]) / 1e9)


def _over_plain(record: dict[str, Any], name: str) -> float:
    """Return a time of the server with layer-wise KV over that of the plain one."""
    ours, theirs = (
        statistics.median(one[name] for one in record[way])
        for way in ("layered", "plain")
    )
    return ours / theirs


def _offload_cost(record: dict[str, Any]) -> float:
    """Return the forward beside an offload over the forward alone; 1 is no cost."""
    beside = statistics.median(record["forward_beside_offload_s"])
    return beside / statistics.median(record["forward_s"])


def _summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures by name, in GB/s and as ratios."""
    figures: dict[str, Any] = {}
    for record in records:
        if record["kind"] == "copy":
            rate = record["num_bytes"] / statistics.median(record["seconds"]) / 1e9
            name = f"{record['direction']}_{record['way']}_gb_per_s"
            figures.setdefault(name, {})[str(record["piece_bytes"])] = round(rate, 3)
        elif record["kind"] == "layers":
            way = record["way"]
            streamed = figures.setdefault("streamed_efficiency", {})
            streamed[way] = round(_streamed(record), 4)
            down = figures.setdefault("layers_down_gb_per_s", {})
            down[way] = round(_down_rate(record), 3)
        elif record["kind"] == "acts":
            figures |= {name: round(one, 4) for name, one in _acts(record).items()}
        elif record["kind"] == "servers":
            if "missing" in record:
                figures["servers_not_run"] = record["missing"]
                continue
            figures["servers_exact_fraction"] = record["exact_fraction"]
            for name in ("mean_ttft_s", "total_s"):
                figures[f"servers_{name}_over_plain"] = round(
                    _over_plain(record, name), 4
                )
        else:
            by_way = figures.setdefault("overlap_efficiency", {})
            by_way[record["way"]] = round(_efficiency(record), 4)
            cost = figures.setdefault("forward_beside_offload", {})
            cost[record["way"]] = round(_offload_cost(record), 4)
    return figures


def _cuda() -> str:
    return torch.version.cuda or "none"


def _write(path: Path, facts: dict[str, Any], records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"kind": "header", **asdict(make_header("movement", facts))}
    lines = [json.dumps(record) for record in (header, *records)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
