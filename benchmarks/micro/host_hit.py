"""What a host hit costs over a device hit, on a CPU: ours and HiCache's, side by side.

One forward's attention, all layers, of a prompt of which all but 16 tokens are cached:
on the device; in our host tier, loaded by the real loader while the forward asks for
its layers; the same with the pages going to the pool only, from which attention then
gathers them; and in HiCache's two host layouts, whose copies are those of the hooks of
``benchmarks/baselines``. Samples are interleaved; medians are printed, and one JSON
object at the end.

    python benchmarks/micro/host_hit.py [--cached 2048]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from _timing import interleaved, start_clock, timing_options, timing_record
from attention import HEAD_DIM, KV_HEADS, LAYERS, PAGE_TOKENS, Bench, Case

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import LoadPlan
from sgl_tiered.engines.device.pools import CpuDevicePool, page_layout
from sgl_tiered.engines.sglang import cpu_attention
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.serving.layer_counter import LayerCounter

sys.path.append(str(Path(__file__).parents[1] / "baselines"))
from hicache_cpu.copies import LAYOUTS, load_layer

HOST_PAGES = 2048


class HostHits:
    """A prompt whose pages are in the pool and in a host region of each system."""

    def __init__(self, bench: Bench, cached: int) -> None:
        self.bench, self.case = bench, Case("hit", 1, cached, 16)
        self.batch, self.inputs = bench.batch(self.case)
        pool = bench.pool
        slots = bench.table[0, :cached].long()
        self.slots = slots
        self.pages = (slots[::PAGE_TOKENS] // PAGE_TOKENS).numpy()
        self.rows = np.random.default_rng(1).permutation(HOST_PAGES)[: len(self.pages)]
        layout = page_layout(pool, PAGE_TOKENS)
        self.device = CpuDevicePool(pool, layout)
        self.region = np.zeros((HOST_PAGES, layout.slot_bytes), np.uint8)
        self.device.store_pages(self.region, self.rows, self.pages, None)
        self.loader = LayerwiseLoader(
            self.device, CompletionQueue(), SystemClock(), MetricsRegistry()
        )
        self.counter = LayerCounter(LAYERS)

    def attend(self) -> torch.Tensor:
        """Run the attention of all layers over what is in the pool."""
        bench = self.bench
        return bench.forward(bench.ours, self.case, self.batch, self.inputs)

    def load(self) -> torch.Tensor:
        """Do as ``attend``, with a load of the pages and its end."""
        positions = np.arange(len(self.pages))
        plan = LoadPlan(
            plan_id=1,
            first_page=0,
            pages=positions.astype(np.int32),
            tiers=np.full(len(positions), TierId.HOST, np.uint8),
            addresses=self.rows,
            checksums=np.zeros(len(positions), np.uint64),
            predicted_s=0.0,
        )
        segment = Segment(self.region, self.rows, positions)
        ticket = self.loader.submit([LoadJob(plan, (segment,), self.pages)])
        self.bench.pool.register_layer_transfer_counter(self.counter)
        self.counter.set_consumer(self.counter.add(ticket))
        out = self.attend()
        if not ticket.wait():
            raise SystemExit(f"the load failed: {ticket.failed}")
        self.bench.pool.register_layer_transfer_counter(None)
        return out

    def load_to_pool(self) -> torch.Tensor:
        """Do as ``load``, without rows for attention beside the pool."""
        most, cpu_attention._MAX_READ_BYTES = cpu_attention._MAX_READ_BYTES, 0
        out = self.load()
        cpu_attention._MAX_READ_BYTES = most
        return out

    def hicache(self, layout: str) -> Callable[[], torch.Tensor]:
        """Return ``attend`` over pages that HiCache's hooks copy layer by layer."""
        pool = self.bench.pool
        shape: tuple[int, ...] = (HOST_PAGES * PAGE_TOKENS, LAYERS, KV_HEADS, HEAD_DIM)
        if layout == "page_first_direct":
            shape = (HOST_PAGES, LAYERS, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        host = SimpleNamespace(
            layout=layout,
            page_size=PAGE_TOKENS,
            k_buffer=torch.zeros(shape, dtype=pool.dtype),
            v_buffer=torch.zeros(shape, dtype=pool.dtype),
            device_k_buffers=pool.k_buffer,
            device_v_buffers=pool.v_buffer,
        )
        grid = self.rows[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        rows = torch.from_numpy(grid.reshape(-1))
        for kept, buffers in (
            (host.k_buffer, pool.k_buffer),
            (host.v_buffer, pool.v_buffer),
        ):
            for layer, buffer in enumerate(buffers):
                pages = buffer[self.slots].view(-1, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
                if layout == "page_first_direct":
                    kept[self.rows, layer] = pages
                else:
                    kept[rows, layer] = buffer[self.slots]

        def run() -> torch.Tensor:
            there: set[int] = set()

            def wait_until(layer: int) -> None:
                if layer not in there:
                    there.add(layer)
                    load_layer(host, rows, self.slots, layer)

            counter = SimpleNamespace(wait_until=wait_until)
            pool.register_layer_transfer_counter(counter)
            out = self.attend()
            pool.register_layer_transfer_counter(None)
            return out

        return run

    def wipe(self) -> None:
        """Let nothing of the prompt be in the pool."""
        for buffer in (*self.bench.pool.k_buffer, *self.bench.pool.v_buffer):
            buffer[self.slots] = float("nan")


def main() -> None:
    """Check that all answer alike, time them, print."""
    parser = timing_options(__doc__)
    parser.add_argument("--cached", type=int, default=5984)
    args = parser.parse_args()
    clock = start_clock(parser, args)
    with torch.inference_mode():
        hits = HostHits(Bench(clock), args.cached)
        jobs: dict[str, Callable[[], torch.Tensor]] = {
            "device hit": hits.attend,
            "ours": hits.load,
            "ours, pool only": hits.load_to_pool,
            **{f"HiCache {layout}": hits.hicache(layout) for layout in LAYOUTS},
        }
        expected = hits.attend()
        for name, job in jobs.items():
            if name != "device hit":
                hits.wipe()
            if not torch.equal(job(), expected):
                raise SystemExit(f"{name}: not the answer of a device hit")
        seconds = interleaved(jobs, args.repeats, clock)
    hits.loader.close()
    device_s = seconds["device hit"]
    peer_s = min(seconds[f"HiCache {layout}"] for layout in LAYOUTS) - device_s
    print(f"{'way':28} {'ms':>8} {'over a device hit':>18}")
    for name, spent_s in seconds.items():
        print(f"{name:28} {spent_s * 1e3:8.2f} {(spent_s - device_s) * 1e3:18.2f}")
    record = {
        "ms": {name: round(spent_s * 1e3, 2) for name, spent_s in seconds.items()},
        "ours_vs_hicache": round((seconds["ours"] - device_s) / peer_s, 2),
        "cached_tokens": args.cached,
        **timing_record(args),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
