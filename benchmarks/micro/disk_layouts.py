"""MemServe's three layouts of KV on disk, through the disk tier.

A request's KV is written once and read once, cold. A slot of the tier is

- ``by-layer``: keys and values of one layer of one page; the pages of a layer lie
  together, and layers are written and read one call after the other, as a transfer
  that follows the computation does it;
- ``by-request``: the keys, or the values, of one layer of one page: 2 x layers slots
  per page, all in one call, and scattered, as blocks of paged memory are;
- ``by-request-agg``: a whole page, all layers: one slot per page, all in one call.
  This is what the product does.

The first layer's time is when the layers above it may begin to compute: by-layer needs
its first call, the others all of it (the product reads a request in parts to shorten
this). Small slots pay for more records and checksums; blocks below 4 KiB would be
padded. The order of the layouts changes from repeat to repeat; medians. The last line
is one JSON object.

    python benchmarks/micro/disk_layouts.py [--path DIR] [--pages N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from sgl_tiered.core.layout import ALIGNMENT_BYTES
from sgl_tiered.core.plans import PageRecords
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import expected_checksums
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_format import record_dtype
from sgl_tiered.tiers.memory import MemoryRegion

LAYOUTS = ("by-layer", "by-request", "by-request-agg")
PAGE_TOKENS = 16


class Layout:
    """One layout of a request's pages in a tier of its own.

    Args:
        name: one of ``LAYOUTS``.
        path: an empty folder.
        num_pages, num_layers: of the request.
        part_bytes: keys (or values) of one page in one layer.
    """

    def __init__(
        self, name: str, path: Path, num_pages: int, num_layers: int, part_bytes: int
    ) -> None:
        parts = {"by-layer": 2, "by-request": 1, "by-request-agg": 2 * num_layers}
        self.name = name
        self.payload_bytes = num_pages * 2 * num_layers * part_bytes
        slot_payload = parts[name] * part_bytes
        self.slot_bytes = -(-slot_payload // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.num_slots = self.payload_bytes // slot_payload
        self.calls = num_layers if name == "by-layer" else 1
        self.tier = DiskTier.open(
            path,
            slot_bytes=self.slot_bytes,
            page_bytes=slot_payload,
            page_tokens=PAGE_TOKENS,
            max_bytes=self.num_slots
            * (self.slot_bytes + record_dtype(PAGE_TOKENS).itemsize),
            fingerprint="benchmark",
        )
        self._memory = [MemoryRegion(self.num_slots, self.slot_bytes) for _ in range(2)]
        self.source, self.target = (region.array for region in self._memory)
        rng = np.random.default_rng(0)
        self.source[:] = rng.integers(0, 256, self.source.shape, np.uint8)
        self.target[:] = 1
        slots = np.arange(self.num_slots)
        keys = rng.integers(0, 256, (self.num_slots, 16), np.uint8)
        self.batches = np.array_split(slots, self.calls)
        self.keys = keys
        self.addresses = slots
        if name == "by-request":
            self.addresses = rng.permutation(self.num_slots)

    def store(self) -> tuple[float, float, float]:
        """Write all; return the time of the first call, of all, and the CPU time."""
        sums = []

        def one(slots: np.ndarray) -> None:
            keys = self.keys[slots]
            tokens = np.zeros((len(slots), PAGE_TOKENS), np.int32)
            zeros = np.zeros(len(slots), np.uint64)
            addresses = self.addresses[slots]
            records = PageRecords(keys, keys, keys, tokens, zeros, addresses)
            result = self.tier.store(TierIO(addresses, self.source, slots, records))
            if not result.ok.all():
                raise SystemExit(f"{self.name}: store failed: {result.error}")
            sums.append(result.checksums)

        times = self._timed(one)
        self.checksums = np.concatenate(sums)
        return times

    def load(self) -> tuple[float, float, float]:
        """Read all; return the time of the first call, of all, and the CPU time."""

        def one(slots: np.ndarray) -> None:
            addresses = self.addresses[slots]
            wanted = expected_checksums(self.checksums[slots], addresses)
            result = self.tier.load(TierIO(addresses, self.target, slots, wanted))
            if not result.ok.all():
                raise SystemExit(f"{self.name}: load failed: {result.error}")

        times = self._timed(one)
        if not np.array_equal(self.source, self.target):
            raise SystemExit(f"{self.name}: other bytes than written")
        self.target[:] = 1
        return times

    def close(self) -> None:
        """Close the tier and free the memory."""
        self.tier.close()
        for region in self._memory:
            region.close()

    def _timed(self, one) -> tuple[float, float, float]:
        cpu_s, started_s = time.process_time(), time.perf_counter()
        first_s = 0.0
        for number, slots in enumerate(self.batches):
            one(slots)
            if number == 0:
                first_s = time.perf_counter() - started_s
        seconds = time.perf_counter() - started_s
        return first_s, seconds, time.process_time() - cpu_s


def measure(layouts: list[Layout], repeats: int) -> dict[str, dict[str, float]]:
    """Return medians by layout; the first repeat is a warm-up."""
    found: dict[str, dict[str, list[float]]] = {
        layout.name: {"write": [], "read": [], "first": [], "cpu": []}
        for layout in layouts
    }
    for turn in range(repeats + 1):
        shift = turn % len(layouts)
        for layout in layouts[shift:] + layouts[:shift]:
            _, write_s, _ = layout.store()
            first_s, read_s, cpu_s = layout.load()
            if turn:
                gb = layout.payload_bytes / 1e9
                row = found[layout.name]
                row["write"].append(gb / write_s)
                row["read"].append(gb / read_s)
                row["first"].append(first_s * 1e3)
                row["cpu"].append(cpu_s / gb)
    return {
        layout.name: {
            "slot_bytes": layout.slot_bytes,
            "slots": layout.num_slots,
            "index_bytes": layout.num_slots * record_dtype(PAGE_TOKENS).itemsize,
            "write_gb_per_s": round(float(np.median(found[layout.name]["write"])), 3),
            "read_gb_per_s": round(float(np.median(found[layout.name]["read"])), 3),
            "first_layer_ms": round(float(np.median(found[layout.name]["first"])), 2),
            "read_cpu_s_per_gb": round(float(np.median(found[layout.name]["cpu"])), 3),
        }
        for layout in layouts
    }


def main() -> None:
    """Measure all layouts, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--path", type=Path, default=None, help="on the disk to test")
    parser.add_argument("--pages", type=int, default=250, help="4,000 tokens")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--part-bytes", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="tiered-bench-", dir=args.path or "."))
    try:
        layouts = [
            Layout(name, scratch / name, args.pages, args.layers, args.part_bytes)
            for name in LAYOUTS
        ]
        found = measure(layouts, args.repeats)
        for layout in layouts:
            layout.close()
    finally:
        shutil.rmtree(scratch)
    for name, row in found.items():
        print(f"{name:15}", "  ".join(f"{key} {value}" for key, value in row.items()))
    print(json.dumps({"benchmark": "micro/disk_layouts", "layouts": found}))


if __name__ == "__main__":
    main()
