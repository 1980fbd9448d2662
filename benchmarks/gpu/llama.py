"""An 8B model on one GPU: plain SGLang, HiCache, LMCache and sgl-tiered.

    python benchmarks/gpu/llama.py --model MODEL --out out/llama   # one GPU
    python benchmarks/gpu/llama.py --dry-run                       # on a CPU, tiny

Measured: TTFT by the length of a hit and by where its KV lay, throughput without reuse,
and the shared-prefix and multi-turn loads of SGLang's own bench_serving. Servers run
one after the other, and then in the opposite order, with one page size, device pool,
memory fraction and attention backend. Answers are compared: a system whose answers are
wrong, or were not judged, has no figures.

Each finished cell is a file at once; the same command goes on where it was stopped. A
system that fails stops no other. ``table.md``, ``result.json`` and ``chart.png`` are
made from the cells; the last line is one JSON object. Where torch sees no accelerator,
it is a dry run on the CPU platform, with a small model. The exit status is 0 where all
was measured or is not there, 1 where something failed, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# What other benchmarks have already.
sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "baselines"))

from comparison.checks import check, check_settings, sees_accelerator
from comparison.run import Comparison
from comparison.settings import DRY, GPU, Model, ProblemError, Shared, Sizes, header
from comparison.store import Store
from comparison.systems import DEFAULT, DEFAULT_DRY, SYSTEMS
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import exit_on_signals

DRY_PRESET = "tiny"
"""Of 3 million parameters: a CPU without instructions for bfloat16 computes the 40
million of "bench" at 100 tokens per second."""
_GPU_SHARED = Shared(64, 131_072, 0.85, "", host_gb=0, disk_gb=40)
_DRY_SHARED = Shared(16, 2048, None, "", host_gb=0, disk_gb=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    args = _parser().parse_args(argv)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    try:
        comparison = _prepare(args, say)
    except ProblemError as problem:
        print(f"llama.py: {problem}", file=sys.stderr)
        return 2
    exit_on_signals()
    status = 0
    try:
        asyncio.run(comparison.run())
    except (KeyboardInterrupt, SystemExit):
        status = 130
        say("stopped; the same command goes on from here")
    finally:
        # Also of a run that ended by a fault of its own, whose traceback follows.
        line, text = comparison.finish()
        line["seconds"] = round(time.monotonic() - began, 1)
        print("\n" + text)
        say(f"table, figures, chart, cells and logs are in {args.out}")
        print(json.dumps(line), flush=True)
    return status or (1 if line["problems"] or not line["figures"] else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--out", type=Path, default=Path("out/llama"))
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help=f"of {', '.join(SYSTEMS)}"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="on the CPU platform, with a small model at tiny sizes",
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="of hits, in tokens")
    parser.add_argument("--page-size", type=int, help="tokens per page (64)")
    parser.add_argument(
        "--pool-tokens", type=int, help="most tokens of the device pool (131072)"
    )
    parser.add_argument(
        "--mem-fraction", type=float, help="SGLang's --mem-fraction-static (0.85)"
    )
    parser.add_argument(
        "--attention-backend", default="", help="default: what plain SGLang chooses"
    )
    parser.add_argument(
        "--host-gb", type=int, help="host memory (default: two device pools)"
    )
    parser.add_argument("--disk-gb", type=int, help="of our disk tier (40)")
    parser.add_argument(
        "--server-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="a further flag for every server, as --server-flag=--flag; repeatable",
    )
    parser.add_argument("--port", type=int, help="of the servers; default: free ones")
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    return parser


def _prepare(args: argparse.Namespace, say: object) -> Comparison:
    """Look at everything that can be looked at before a server starts.

    Raises:
        ProblemError: something is wrong.
    """
    assert callable(say)
    dry_run = args.dry_run or not sees_accelerator()
    sizes, shared = _sizes(args, dry_run=dry_run), _shared(args, dry_run=dry_run)
    systems = args.systems or (DEFAULT_DRY if dry_run else DEFAULT)
    check_settings(shared, sizes, systems)
    if args.model is None and not args.dry_run:
        raise ProblemError("--model: name the folder of a model, or ask for --dry-run.")
    model = None if args.model is None else Model.of(args.model)
    if dry_run:
        if not args.dry_run:
            say("torch sees no accelerator: this is a dry run on the CPU")
        say(f"a dry run: the {DRY_PRESET} model (random weights), at tiny sizes")
        model = Model.of(make_model(DRY_PRESET, args.models.resolve()))
    assert model is not None
    out: Path = args.out
    if out.exists() and not out.is_dir():
        raise ProblemError(f"--out: {out} is a file; give a folder.")
    check(model, shared, systems, out, args.port)
    store = Store(out)
    told = header(model, shared, sizes, systems, dry_run=dry_run)
    told["began"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    told = store.begin(told)
    return Comparison(model, shared, sizes, systems, store, args.port, told, say)


def _sizes(args: argparse.Namespace, *, dry_run: bool) -> Sizes:
    sizes = DRY if dry_run else GPU
    if args.lengths:
        sizes = replace(sizes, lengths=tuple(sorted(set(args.lengths))))
    return sizes


def _shared(args: argparse.Namespace, *, dry_run: bool) -> Shared:
    shared = _DRY_SHARED if dry_run else _GPU_SHARED
    given = {
        "page_size": args.page_size,
        "pool_tokens": args.pool_tokens,
        "host_gb": args.host_gb,
        "disk_gb": args.disk_gb,
        "mem_fraction": args.mem_fraction,
    }
    if dry_run:
        # It says nothing on a CPU.
        del given["mem_fraction"]
    given = {name: value for name, value in given.items() if value is not None}
    return replace(
        shared,
        attention_backend=args.attention_backend,
        server_flags=tuple(args.server_flag),
        **given,
    )


if __name__ == "__main__":
    raise SystemExit(main())
