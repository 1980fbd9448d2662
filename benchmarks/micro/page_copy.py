"""How fast pages move between a host region and the layers of a device pool.

The pages of a 6,000-token prompt at 16 tokens a page: 375 pages, 12 layers, K and V of
8 KiB each (a head size of 64, 4 KV heads, bfloat16), scattered on both sides, on one
thread. Beside it: torch's index put, and one plain copy of as many bytes in a row,
which is the roof. GB/s count the bytes copied (each is read once and written once).

    python benchmarks/micro/page_copy.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from sgl_tiered_kernels import page_copy

LAYERS, PAGES, ROW_BYTES = 12, 375, 8192
HOST_PAGES, DEVICE_PAGES = 1000, 512
TOTAL_BYTES = LAYERS * PAGES * 2 * ROW_BYTES


class Bench:
    """The two sides of the copy, filled with noise."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = (HOST_PAGES, LAYERS * 2 * ROW_BYTES)
        self.host = rng.integers(0, 256, shape, np.uint8)
        self.layers = [
            (
                np.zeros((DEVICE_PAGES, ROW_BYTES), np.uint8),
                np.zeros((DEVICE_PAGES, ROW_BYTES), np.uint8),
            )
            for _ in range(LAYERS)
        ]
        self.host_rows = rng.permutation(HOST_PAGES)[:PAGES].astype(np.int64)
        self.rows = rng.permutation(DEVICE_PAGES)[:PAGES].astype(np.int64)
        self.flat = rng.integers(0, 256, (2, TOTAL_BYTES), np.uint8)

    def load(self) -> None:
        """Host pages to all layers."""
        for i, (keys, values) in enumerate(self.layers):
            at = i * 2 * ROW_BYTES
            page_copy.copy_layer(
                keys,
                values,
                self.rows,
                self.host,
                self.host_rows,
                at,
                at + ROW_BYTES,
                ROW_BYTES,
            )

    def offload(self) -> None:
        """All layers to host pages."""
        for i, (keys, values) in enumerate(self.layers):
            at = i * 2 * ROW_BYTES
            page_copy.gather_layer(
                self.host,
                self.host_rows,
                at,
                at + ROW_BYTES,
                keys,
                values,
                self.rows,
                ROW_BYTES,
            )

    def torch_load(self) -> None:
        """The same load with torch's advanced indexing."""
        rows, host_rows = torch.from_numpy(self.rows), torch.from_numpy(self.host_rows)
        host = torch.from_numpy(self.host.view(np.int64))
        words = ROW_BYTES // 8
        for i, (keys, values) in enumerate(self.layers):
            at = i * 2 * words
            torch.from_numpy(keys.view(np.int64))[rows] = host[
                host_rows, at : at + words
            ]
            torch.from_numpy(values.view(np.int64))[rows] = host[
                host_rows, at + words : at + 2 * words
            ]

    def plain(self) -> None:
        """As many bytes in one piece: the roof."""
        np.copyto(self.flat[0], self.flat[1])

    def check(self) -> None:
        """Refuse to report a copy that did not copy."""
        self.load()
        for i, (keys, values) in enumerate(self.layers):
            at = i * 2 * ROW_BYTES
            page = self.host[self.host_rows, at : at + 2 * ROW_BYTES]
            if not (page == np.hstack([keys[self.rows], values[self.rows]])).all():
                raise SystemExit(f"layer {i} was not copied")


def main() -> None:
    """Time the four copies in turn and print GB/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    backend = page_copy.prepare()
    prepare_s = time.perf_counter() - began
    bench = Bench()
    bench.check()
    copies: dict[str, Callable[[], None]] = {
        "load": bench.load,
        "offload": bench.offload,
        "torch_load": bench.torch_load,
        "plain": bench.plain,
    }
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    for _ in range(args.repeats):
        for name, copy in copies.items():
            began = time.perf_counter()
            copy()
            seconds[name].append(time.perf_counter() - began)
    record: dict[str, object] = {"backend": backend, "prepare_s": round(prepare_s, 3)}
    print(f"{'copy':12} {'median GB/s':>12} {'best GB/s':>12}")
    for name, taken in seconds.items():
        median = TOTAL_BYTES / statistics.median(taken) / 1e9
        best = TOTAL_BYTES / min(taken) / 1e9
        print(f"{name:12} {median:12.2f} {best:12.2f}")
        record[f"{name}_gb_per_s"] = round(median, 2)
        record[f"{name}_best_gb_per_s"] = round(best, 2)
    print(json.dumps({**record, "bytes": TOTAL_BYTES, "threads": 1}))


if __name__ == "__main__":
    main()
