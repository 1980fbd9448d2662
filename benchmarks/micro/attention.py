"""How long the attention of one forward takes: ours against SGLang's torch_native.

Both are SGLang's real backend classes on the same real pool, with the shape of the
40 M model. A forward here is the attention of all layers and nothing else. Samples of
the two are interleaved; medians are printed, and one JSON object at the end.

    python benchmarks/micro/attention.py
    make bench-micro PART=attention RECORD=benchmarks/results

Why decode is no kernel of its own: the README of ``sgl_tiered/engines/sglang``.

On a machine that others keep busy, ``--clock cpu --threads 1`` counts the CPU seconds
of one thread instead of wall time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from _timing import Clock, interleaved, start_clock, timing_options, timing_record
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_tiered.engines.sglang.cpu_attention import TieredCpuAttention

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 12, 8, 4, 64
PAGE_TOKENS, POOL_TOKENS = 16, 16384
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A batch: how many requests, tokens cached of each, new tokens of each."""

    name: str
    requests: int
    cached: int
    new: int
    decode: bool = False


CASES = [
    Case("hit: 16 new, 5,984 cached", 1, 5984, 16),
    Case("chunk: 2,048 new, 3,952 cached", 1, 3952, 2048),
    Case("prefill: 2,000 new", 1, 0, 2000),
    Case("prefill: 6,000 new", 1, 0, 6000),
    Case("decode: 1 x 2,000", 1, 1999, 1, decode=True),
    Case("decode: 8 x 2,000", 8, 1999, 1, decode=True),
    Case("decode: 1 x 6,000", 1, 5999, 1, decode=True),
]


class Bench:
    """One pool, the layers over it, and both backends."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        gen = torch.Generator().manual_seed(0)
        self.pool = MHATokenToKVPool(
            size=POOL_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=DTYPE,
            head_num=KV_HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        for layer in range(LAYERS):
            self.pool.k_buffer[layer].normal_(generator=gen)
            self.pool.v_buffer[layer].normal_(generator=gen)
        self.layers = [
            RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=i)
            for i in range(LAYERS)
        ]
        self.table = torch.zeros((8, 8192), dtype=torch.int32)
        tables = SimpleNamespace(req_to_token=self.table)
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=tables, token_to_kv_pool=self.pool
        )
        self.ours = TieredCpuAttention(tables, self.pool)
        self.stock = TorchNativeAttnBackend(runner)
        self.gen = gen

    def batch(self, case: Case) -> tuple[SimpleNamespace, list[torch.Tensor]]:
        """Lay the requests out on random pages and draw queries, keys and values."""
        kv_len = case.cached + case.new
        per_request = -(-kv_len // PAGE_TOKENS)
        pages = torch.randperm(POOL_TOKENS // PAGE_TOKENS, generator=self.gen)
        new_slots = []
        for request in range(case.requests):
            mine = pages[request * per_request : (request + 1) * per_request]
            slots = mine[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
            slots = slots.flatten()[:kv_len]
            self.table[request, :kv_len] = slots
            new_slots.append(slots[case.cached :])
        many = (case.requests,)
        forward = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if case.decode else ForwardMode.EXTEND,
            req_pool_indices=torch.arange(case.requests),
            seq_lens=torch.full(many, kv_len),
            extend_prefix_lens=torch.full(many, case.cached),
            extend_seq_lens=torch.full(many, case.new),
            out_cache_loc=torch.cat(new_slots),
            encoder_lens=None,
        )
        rows = case.requests * case.new
        q = torch.randn((rows, HEADS * HEAD_DIM), generator=self.gen).to(DTYPE)
        kv = [
            torch.randn((rows, KV_HEADS, HEAD_DIM), generator=self.gen).to(DTYPE)
            for _ in range(2)
        ]
        return forward, [q, *kv]

    def forward(self, backend, case, forward, qkv) -> torch.Tensor:
        """Run the attention of all layers; return the last layer's output."""
        backend.init_forward_metadata(forward)
        run = backend.forward_decode if case.decode else backend.forward_extend
        return [run(*qkv, layer, forward) for layer in self.layers][-1]

    def measure(self, case: Case, repeats: int) -> dict[str, float | str]:
        """Time both backends in turn; refuse to report if they disagree."""
        forward, qkv = self.batch(case)
        apart = self.forward(self.ours, case, forward, qkv).float()
        apart -= self.forward(self.stock, case, forward, qkv).float()
        difference = apart.abs().max().item()
        if difference > 0.02:
            raise SystemExit(f"{case.name}: outputs differ by {difference}")
        jobs = {
            "ours": lambda: self.forward(self.ours, case, forward, qkv),
            "stock": lambda: self.forward(self.stock, case, forward, qkv),
        }
        ours, stock = interleaved(jobs, repeats, self.clock).values()
        return {
            "case": case.name,
            "ours_ms": round(ours * 1e3, 2),
            "torch_native_ms": round(stock * 1e3, 2),
            "speedup": round(stock / ours, 2),
            "max_difference": round(difference, 5),
        }


def main() -> None:
    """Run all cases and print the table."""
    parser = timing_options(__doc__)
    args = parser.parse_args()
    clock = start_clock(parser, args)
    bench, results = Bench(clock), []
    print(f"{'case':32} {'ours ms':>10} {'stock ms':>10} {'speedup':>8}")
    with torch.inference_mode():
        for case in CASES:
            result = bench.measure(case, args.repeats)
            results.append(result)
            print(
                f"{result['case']:32} {result['ours_ms']:10.2f} "
                f"{result['torch_native_ms']:10.2f} {result['speedup']:8.1f}",
                flush=True,
            )
    record = {
        "speedup_vs_torch_native": results[0]["speedup"],
        "cases": results,
        "shape": [LAYERS, HEADS, KV_HEADS, HEAD_DIM],
        "dtype": str(DTYPE),
        **timing_record(args),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
