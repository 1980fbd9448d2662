"""What a layer's K and V cost when rebuilt from activations, beside what it spares.

One layer on the CPU, in bfloat16: the rebuild into consecutive slots and into scattered
pages; the whole fused projection with rotation and store, which is what computing the
tokens anew begins with; and the copies of as many K and V rows, and of as many
activations, between scattered pages (what a load from host memory costs without a
link). Samples are interleaved; medians are printed, and one JSON object at the end. A
few tokens are compared with the reference first: no time is printed for wrong numbers.

    python benchmarks/micro/kv_gen.py

On a machine that others keep busy, ``--clock cpu --threads 1`` counts the CPU seconds
of one thread instead of wall time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from _timing import Clock, interleaved, start_clock, timing_options, timing_record
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv
from sgl_tiered_kernels.kv_gen.reference import rebuild_reference
from sgl_tiered_kernels.tensors import page_rows

DTYPE = torch.bfloat16
PAGE_TOKENS = 16
COLUMNS = ("rebuild_run", "rebuild_pages", "qkv", "copy_kv", "copy_act")


@dataclass(frozen=True)
class Case:
    """A layer's shape and how many tokens; OPT has a bias and no rotation."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    opt: bool = False


CASES = [
    Case("40 M, MHA: 2,000", 512, 8, 8, 64, 2000),
    Case("40 M, MHA: 64", 512, 8, 8, 64, 64),
    Case("40 M, GQA: 2,000", 512, 8, 4, 64, 2000),
    Case("Llama-2-7B: 256", 4096, 32, 32, 128, 256),
    Case("Llama-3-8B: 256", 4096, 32, 8, 128, 256),
    Case("OPT-6.7B: 256", 4096, 32, 32, 128, 256, opt=True),
]


class Layer:
    """Weights, activations and pools of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        gen = torch.Generator().manual_seed(0)
        width = (case.heads + 2 * case.kv_heads) * case.dim
        weight = torch.randn((width, case.hidden), generator=gen) * case.hidden**-0.5
        self.weight = weight.to(DTYPE)
        self.bias = torch.randn(width, generator=gen).to(DTYPE) if case.opt else None
        angles = torch.rand((case.tokens, case.dim // 2), generator=gen) * 6.28
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DTYPE)
        self.table = None if case.opt else table
        self.projection = KVProjection.from_fused(
            self.weight,
            self.bias,
            case.kv_heads,
            case.dim,
            None if self.table is None else Rotary(self.table),
        )
        pages = -(-case.tokens // PAGE_TOKENS) + 3
        acts = torch.randn((pages * PAGE_TOKENS, case.hidden), generator=gen)
        self.acts = acts.to(DTYPE)
        shape = (pages * PAGE_TOKENS, case.kv_heads, case.dim)
        self.pools = [torch.zeros(shape, dtype=DTYPE) for _ in "kvkv"]
        self.copies = torch.zeros_like(self.acts)
        self.run = torch.arange(case.tokens)
        self.rows, self.slots = (
            page_rows(torch.randperm(pages, generator=gen), PAGE_TOKENS)[: case.tokens]
            for _ in "rs"
        )

    def rebuild(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Rebuild K and V of all tokens."""
        keys, values = self.pools[:2]
        given = (self.acts, rows, self.projection, keys, values, slots)
        rebuild_kv(*given, None if self.case.opt else self.run)

    def compute(self) -> None:
        """Run the fused projection, rotate Q and K, and store K and V."""
        case = self.case
        inputs = self.acts[: case.tokens]
        qkv = torch.nn.functional.linear(inputs, self.weight, self.bias)
        query, keys, values = qkv.view(case.tokens, -1, case.dim).split(
            [case.heads, case.kv_heads, case.kv_heads], dim=1
        )
        if self.table is not None:
            cos, sin = self.table.unsqueeze(1).chunk(2, dim=-1)
            for part in (query, keys):
                one, other = part.chunk(2, dim=-1)
                turned = (one * cos - other * sin, other * cos + one * sin)
                part.copy_(torch.cat(turned, dim=-1))
        self.pools[0][self.slots] = keys
        self.pools[1][self.slots] = values

    def copy_kv(self) -> None:
        """Copy K and V of all tokens from one pool to another."""
        for to, frm in zip(self.pools[:2], self.pools[2:], strict=True):
            to[self.slots] = frm[self.rows]

    def copy_act(self) -> None:
        """Copy the activations of all tokens."""
        self.copies[self.slots] = self.acts[self.rows]

    def check(self) -> None:
        """Refuse to go on with a wrong key or value."""
        self.rebuild(self.rows, self.slots)
        few = [0, self.case.tokens - 1]
        positions = None if self.case.opt else self.run[few]
        wanted = rebuild_reference(
            self.acts, self.rows[few], self.projection, positions
        )
        for pool, expected in zip(self.pools, wanted, strict=False):
            apart = (pool[self.slots[few]].float() - expected.float()).abs().max()
            if not apart < 0.07:
                raise SystemExit(f"{self.case.name}: off by {apart}")


def timed(case: Case, repeats: int, clock: Clock) -> dict[str, float]:
    """Return median milliseconds by what was done."""
    layer = Layer(case)
    layer.check()
    jobs = {
        "rebuild_run": lambda: layer.rebuild(layer.run, layer.run),
        "rebuild_pages": lambda: layer.rebuild(layer.rows, layer.slots),
        "qkv": layer.compute,
        "copy_kv": layer.copy_kv,
        "copy_act": layer.copy_act,
    }
    return {name: s * 1e3 for name, s in interleaved(jobs, repeats, clock).items()}


def main() -> None:
    """Run all cases and print the table."""
    parser = timing_options(__doc__)
    args = parser.parse_args()
    clock = start_clock(parser, args)
    print(f"{'one layer, ms':20}" + "".join(f"{name:>15}" for name in COLUMNS))
    results = {}
    with torch.inference_mode():
        for case in CASES:
            times = timed(case, args.repeats, clock)
            flops = 4 * case.tokens * case.hidden * case.kv_heads * case.dim
            results[case.name] = {key: round(value, 3) for key, value in times.items()}
            results[case.name]["gflop_per_s"] = round(
                flops / times["rebuild_pages"] / 1e6, 1
            )
            cells = "".join(f"{times[column]:15.2f}" for column in COLUMNS)
            print(f"{case.name:20}{cells}", flush=True)
    first = results[CASES[0].name]
    record = {
        "rebuild_over_qkv": round(first["rebuild_pages"] / first["qkv"], 2),
        "cases_ms": results,
        "page_tokens": PAGE_TOKENS,
        "dtype": str(DTYPE),
        **timing_record(args),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
