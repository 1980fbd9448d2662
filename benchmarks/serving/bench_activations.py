"""Activations beside KV: rebuilt while the rest loads, on real CPU servers.

    python benchmarks/serving/bench_activations.py [--part a|b|reload|regret|all]

HybridServe (papers: hybridserve) inside SGLang. The arms differ in nothing but
``--tiered-activations``: ``kv_only`` (off: our own layer-wise KV, which streams at
every step), ``act_only`` (1.0) and ``hybrid`` (auto). Same model (MHA, 40 M random
parameters, float32), same device pool, same host bytes, one OMP thread, one server at
a time; hybrid/README.md says how.

- ``a``: T_load_kv / T_kv_gen = 1.25 for equal tokens, by an emulated link: throughput
  of the decode phase and bytes over the link per generated token;
- ``reload``: on the same servers, TTFT of long prefixes that only the host has;
- ``b``: the proportions of OPT-30B on an RTX 4090 with PCIe 4, streamed weights
  included: the measured step against the shortest one by the regressions;
- ``regret``: no emulated link: auto against off.

The simulated part is ``benchmarks/sim/activations.py``. The last line is one JSON
object; exit status 1 where it names ``problems``, or a server did not start.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from hybrid.arms import MODEL, Scale
from hybrid.measure import PARTS, Options, parts_of, run_parts
from hybrid.results import summary
from sgl_tiered_workloads.model import make_model
from sgl_tiered_workloads.server import ServerStartError, exit_on_signals

QUICK = Scale(num_requests=4, answer=24, repeats=1, prefixes=2, reloads=4, pairs=1)


def main() -> int:
    """Run the bench; return the exit status."""
    args = _arguments()
    exit_on_signals()
    scale = QUICK if args.quick else Scale(repeats=args.repeats)
    options = Options(
        model=make_model(MODEL, args.models.resolve()),
        logs=args.out.resolve() / "logs",
        parts=parts_of(args.part or ()),
        scale=scale,
        share=args.share,
        minutes=args.minutes,
        first_port=args.first_port,
        seed=args.seed,
    )
    try:
        findings = run_parts(options, lambda text: print(text, flush=True))
    except (ServerStartError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    result = summary(findings, options.parts, scale) | {"is_quick": args.quick}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if result["problems"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/bench-activations"))
    parser.add_argument("--models", type=Path, default=Path("out/models"))
    parser.add_argument("--part", action="append", choices=(*PARTS, "all"))
    parser.add_argument(
        "--share", type=float, help="of activations, instead of what auto chooses"
    )
    parser.add_argument("--repeats", type=int, default=2, help="servers of an arm")
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="after which nothing is measured a second time",
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="a smoke run, no figures")
    parser.add_argument("--first-port", type=int, help="default: any free ports")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
