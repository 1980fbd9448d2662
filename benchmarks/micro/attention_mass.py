"""What attention mass and small entries cost, beside the attention of the same rows.

The shapes of the 40 M model, one layer, on the CPU: PagedAttention as served, then each
of the three functions. Samples are interleaved; medians are printed, and one JSON
object at the end. The mass is compared with the reference on a few rows first: no time
is printed for wrong numbers.

    python benchmarks/micro/attention_mass.py

On a machine that others keep busy, ``--clock cpu --threads 1`` counts the CPU seconds
of one thread instead of wall time.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from _timing import Clock, interleaved, start_clock, timing_options, timing_record
from sgl_tiered_kernels.attention_mass import (
    attention_mass,
    row_statistics,
    small_entries,
)
from sgl_tiered_kernels.attention_mass.reference import mass_reference
from sgl_tiered_kernels.paged_attention import PagedAttention, RequestRows

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
LOCAL = 64
DTYPE = torch.bfloat16
CASES = {
    "prefill: 2,000 new": (0, 2000),
    "chunk: 2,048 new, 3,952 cached": (3952, 2048),
    "hit: 16 new, 5,984 cached": (5984, 16),
    "sample: 8 of 2,000": (1992, 8),
    "sample: 64 of 2,000": (1936, 64),
    "sample: 64 of 16,000": (15936, 64),
}
"""Cached and new tokens."""
COLUMNS = ("attention", "mass_with_lse", "mass", "statistics", "small")


def timed(case: tuple[int, int], repeats: int, clock: Clock) -> dict[str, float]:
    """Return median milliseconds by what was done."""
    cached, new = case
    kv_len = cached + new
    gen = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn((kv_len, KV_HEADS, HEAD_DIM), generator=gen).to(DTYPE) for _ in "kv"
    )
    query = (1.6 * torch.randn((new, HEADS, HEAD_DIM), generator=gen)).to(DTYPE)
    scale = HEAD_DIM**-0.5
    attention = PagedAttention()
    rows = RequestRows(0, new, torch.arange(kv_len), 0)
    out = torch.empty_like(query)
    mass = torch.zeros(KV_HEADS, kv_len)
    counts = torch.zeros(HEADS, dtype=torch.int64)
    maximum, lse = row_statistics(query, keys, cached, scale)
    check(query, keys, cached, scale)
    jobs: dict[str, Callable[[], object]] = {
        "attention": lambda: attention.attend(query, keys, values, rows, scale, out),
        "mass_with_lse": lambda: attention_mass(
            query, keys, lse, cached, scale, mass, local=LOCAL
        ),
        "mass": lambda: attention_mass(
            query, keys, None, cached, scale, mass, local=LOCAL
        ),
        "statistics": lambda: row_statistics(query, keys, cached, scale),
        "small": lambda: small_entries(query, keys, maximum, cached, scale, counts),
    }
    return {name: s * 1e3 for name, s in interleaved(jobs, repeats, clock).items()}


def check(query: torch.Tensor, keys: torch.Tensor, first: int, scale: float) -> None:
    """Refuse to go on with a wrong mass."""
    few = min(3, query.shape[0])
    found = torch.zeros(KV_HEADS, keys.shape[0])
    begin = query.shape[0] - few
    args = (keys, None, first + begin, scale, found)
    attention_mass(query[begin:], *args, local=LOCAL)
    wanted = mass_reference(query[begin:], keys, first + begin, scale, local=LOCAL)
    difference = (found - wanted).abs().max().item()
    if difference > 1e-4:
        raise SystemExit(f"the mass is off by {difference}")


def main() -> None:
    """Run all cases and print the table."""
    parser = timing_options(__doc__)
    args = parser.parse_args()
    clock = start_clock(parser, args)
    print(f"{'one layer, ms':32}" + "".join(f"{name:>15}" for name in COLUMNS))
    results = {}
    with torch.inference_mode():
        for name, case in CASES.items():
            times = timed(case, args.repeats, clock)
            results[name] = {key: round(value, 3) for key, value in times.items()}
            cells = "".join(f"{times[column]:15.2f}" for column in COLUMNS)
            print(f"{name:32}{cells}", flush=True)
    prefill = results["prefill: 2,000 new"]
    record = {
        "mass_over_attention": round(prefill["mass"] / prefill["attention"], 2),
        "cases_ms": results,
        "shape": [HEADS, KV_HEADS, HEAD_DIM],
        "dtype": str(DTYPE),
        **timing_record(args),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
