"""Cold read and write speed of the disk tier, through ``store`` and ``load``.

The last line is one JSON object. Reads are cold: O_DIRECT does not use the page cache,
and where the file system refuses it the slabs are synced and dropped before each read.
Every page read is verified by the tier, and the bytes are compared once more here.

    python benchmarks/micro/disk.py [--path DIR] [--pages N] [--page-bytes B]
"""

from __future__ import annotations

import argparse
import json
import os
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
from sgl_tiered.tiers.memory import aligned_buffer

PAGE_TOKENS = 16


def records_for(num_pages: int, rng: np.random.Generator) -> PageRecords:
    keys = rng.integers(0, 256, (num_pages, 16), np.uint8)
    return PageRecords(
        namespace=bytes(16),
        keys=keys,
        parents=np.roll(keys, 1, axis=0),
        tokens=rng.integers(0, 1000, (num_pages, PAGE_TOKENS)).astype(np.int32),
        checksums=np.zeros(num_pages, np.uint64),
        addresses=np.arange(num_pages),
    )


def drop_cache(path: Path) -> None:
    for file in path.glob("*.kv"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def median(values: list[float]) -> float:
    return float(np.median(values))


def measure(path: Path, num_pages: int, page_bytes: int, repeats: int, threads: int):
    rng = np.random.default_rng(0)
    slot_bytes = -(-page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    tier = DiskTier.open(
        path,
        slot_bytes=slot_bytes,
        page_bytes=page_bytes,
        page_tokens=PAGE_TOKENS,
        max_bytes=4 * num_pages * (slot_bytes + 4096),
        fingerprint="benchmark",
        num_threads=threads,
    )
    source = aligned_buffer(num_pages, slot_bytes)
    source[:] = rng.integers(0, 256, source.shape, np.uint8)
    target = aligned_buffer(num_pages, slot_bytes)
    target[:] = 1
    rows = np.arange(num_pages)
    total = num_pages * page_bytes
    result: dict[str, object] = {
        "benchmark": "micro/disk",
        "num_pages": num_pages,
        "page_bytes": page_bytes,
        "threads": threads,
        "repeats": repeats,
        "direct": tier.direct,
    }
    for order in ("sequential", "random"):
        addresses = rows.copy()
        if order == "random":
            addresses = rng.permutation(tier.num_slots)[:num_pages]
        writes, reads = [], []
        for _ in range(repeats):
            started = time.perf_counter()
            stored = tier.store(
                TierIO(addresses, source, rows, records_for(num_pages, rng))
            )
            writes.append(total / (time.perf_counter() - started) / 1e9)
            if not stored.ok.all():
                raise SystemExit(f"store failed: {stored.error}")
            drop_cache(path)
            wanted = expected_checksums(stored.checksums, addresses)
            started = time.perf_counter()
            loaded = tier.load(TierIO(addresses, target, rows, wanted))
            reads.append(total / (time.perf_counter() - started) / 1e9)
            if not loaded.ok.all() or not np.array_equal(source, target):
                raise SystemExit(f"load failed: {loaded.error}")
            target[:] = 1
        result[f"write_{order}_gb_per_s"] = round(median(writes[1:]), 3)
        result[f"read_{order}_cold_gb_per_s"] = round(median(reads[1:]), 3)
        result[f"read_{order}_cold_ms"] = round(total / median(reads[1:]) / 1e6, 2)
        print(order, "write", np.round(writes, 2), "read", np.round(reads, 2))
    tier.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=None, help="on the disk to test")
    parser.add_argument("--pages", type=int, default=375)
    parser.add_argument("--page-bytes", type=int, default=196_608)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    base = args.path or Path.cwd()
    scratch = Path(tempfile.mkdtemp(prefix="tiered-bench-", dir=base))
    try:
        print(
            json.dumps(
                measure(
                    scratch, args.pages, args.page_bytes, args.repeats, args.threads
                )
            )
        )
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
