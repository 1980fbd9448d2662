"""Bandwidth of the disk tier against fio, on the very same file.

    python benchmarks/disk/bench_disk.py [--path DIR] [--quick]

The tier moves pages through its public ``store`` and ``load``: index records,
checksums, and source and destination pages in memory as large as the file. A page (a
chunk) is one slot. fio moves the same bytes of the same slab by blocks of the same
size, as many in flight as the tier may have, with O_DIRECT, into buffers that it uses
again and again.

fio's few buffers stay in the processor's cache, which matters where a disk is emulated
by copies; so ``bare`` is shown as well: preadv or pwritev by as many threads between
the file and all of that memory, without index and checksums. It does not count.

Runs are interleaved in rounds of tier, bare, fio psync and fio io_uring, in changing
order; a ratio is of two runs of one round. ``read_vs_fio`` is, for the worst page size
from 1 MiB on, the median of these ratios against the faster one of fio's engines (by
its median bandwidth at that size), and ``write_vs_fio`` the same for writes. Every page
read is verified by the tier and, after the last round, byte by byte here; a page that
is not right ends the run without figures. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fio_runs
import numpy as np
from fio_runs import Measured
from sgl_tiered_workloads.harness.statistics import median_interval

from sgl_tiered.core.plans import PageRecords
from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.checks import expected_checksums
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.disk_engines import ENGINES
from sgl_tiered.tiers.disk_format import slab_name
from sgl_tiered.tiers.memory import MemoryRegion

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB]
LARGE = MIB
"""From here on the figures count."""
PAGE_TOKENS = 16
RECOVER_PAGES = 100_000
TIER, BARE = "tier", "bare"
Samples = dict[str, list[Measured]]


class Bench:
    """One page size: a tier, its slab, and memory for all of it.

    Args:
        folder: empty, on the disk to measure.
        page_bytes: size of a page, a slot and a block.
        size: bytes moved per run, a multiple of ``page_bytes * depth``.
        depth: I/Os in flight.
        io: the tier's engine.
    """

    def __init__(
        self, folder: Path, page_bytes: int, size: int, depth: int, io: str
    ) -> None:
        self.page_bytes = page_bytes
        self.size = size
        self.depth = depth
        self.num_pages = size // page_bytes
        self.tier = DiskTier.open(
            folder,
            slot_bytes=page_bytes,
            page_bytes=page_bytes,
            page_tokens=PAGE_TOKENS,
            max_bytes=self.num_pages * (page_bytes + 4096),
            fingerprint="bench-disk",
            io=io,
            num_threads=depth,
            slab_bytes=2 * size,
        )
        self.slab = folder / slab_name(0)
        # The memory that the product's own tiers and staging rows are made of.
        self._memory = [MemoryRegion(self.num_pages, page_bytes) for _ in range(2)]
        self.source, self.target = (region.array for region in self._memory)
        rng = np.random.default_rng(page_bytes)
        block = rng.integers(0, 256, min(16 * MIB, size), np.uint8)
        flat = self.source.reshape(-1)
        for start in range(0, size, len(block)):
            flat[start : start + len(block)] = block
        self.source[:, :8] = np.arange(self.num_pages)[:, None].view(np.uint8)
        self.target[:] = 1
        self.rows = np.arange(self.num_pages)
        self.records = _records(self.rows, rng)
        self.checksums = np.zeros(self.num_pages, np.uint64)

    def store(self) -> Measured:
        """Write all pages through the tier."""
        io = TierIO(self.rows, self.source, self.rows, self.records)
        measured, result = self._timed(self.tier.store, io)
        self.checksums = result.checksums
        return measured

    def load(self) -> Measured:
        """Read all pages through the tier, with the checksums of the last store."""
        wanted = expected_checksums(self.checksums, self.rows)
        io = TierIO(self.rows, self.target, self.rows, wanted)
        return self._timed(self.tier.load, io)[0]

    def fio(self, engine: str, *, writes: bool) -> Measured:
        """Let fio move the same bytes of the same file."""
        return fio_runs.run(
            self.slab,
            engine=engine,
            writes=writes,
            block_bytes=self.page_bytes,
            depth=self.depth,
            size=self.size,
        )

    def bare(self, *, writes: bool) -> Measured:
        """Move the same bytes by system calls of one page each, and no more."""
        memory = self.source if writes else self.target
        view = memory.reshape(-1).data
        fd = os.open(self.slab, os.O_RDWR | (os.O_DIRECT if self.tier.direct else 0))
        starts = deque(range(0, self.size, self.page_bytes))
        move = os.pwritev if writes else os.preadv

        def work_off() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    start = starts.popleft()
                    move(fd, [view[start : start + self.page_bytes]], start)

        threads = [threading.Thread(target=work_off) for _ in range(self.depth)]
        cpu_s, started_s = time.process_time(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started_s
        cpu_s = time.process_time() - cpu_s
        os.close(fd)
        return Measured(self.size / seconds, cpu_s / self.size * 1e9)

    def check(self) -> None:
        """Compare every byte that the last load brought."""
        if not np.array_equal(self.source, self.target):
            raise SystemExit("the pages that were read are not those written")

    def close(self) -> None:
        """Close the tier and free the memory."""
        self.tier.close()
        for region in self._memory:
            region.close()

    def _timed(self, transfer: Callable[[TierIO], Any], io: TierIO) -> Any:
        cpu_s, started_s = time.process_time(), time.perf_counter()
        result = transfer(io)
        seconds = time.perf_counter() - started_s
        cpu_s = time.process_time() - cpu_s
        if not result.ok.all():
            raise SystemExit(f"the tier failed: {result.error}")
        return Measured(self.size / seconds, cpu_s / self.size * 1e9), result


def _records(rows: np.ndarray, rng: np.random.Generator) -> PageRecords:
    keys = rng.integers(0, 256, (len(rows), 16), np.uint8)
    return PageRecords(
        namespaces=np.zeros((len(rows), 16), np.uint8),
        keys=keys,
        parents=np.roll(keys, 1, axis=0),
        tokens=rng.integers(0, 1000, (len(rows), PAGE_TOKENS)).astype(np.int32),
        checksums=np.zeros(len(rows), np.uint64),
        addresses=rows,
    )


def rounds(bench: Bench, pairs: int, *, writes: bool) -> Samples:
    """Run everything ``pairs`` times in turn, after one warm-up."""
    own = bench.store if writes else bench.load
    runs: dict[str, Callable[[], Measured]] = {TIER: own}
    runs[BARE] = lambda: bench.bare(writes=writes)
    for engine in fio_runs.ENGINES:
        runs[engine] = lambda engine=engine: bench.fio(engine, writes=writes)
    names = list(runs)
    samples: Samples = {name: [] for name in names}
    for turn in range(pairs + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            measured = runs[name]()
            if turn:
                samples[name].append(measured)
    return samples


def compare(samples: Samples) -> dict[str, Any]:
    """Return the ratio to the faster engine, with its interval, and what it is of."""
    speed = {
        name: float(np.median([m.bytes_per_s for m in runs]))
        for name, runs in samples.items()
    }
    engine = max(fio_runs.ENGINES, key=lambda name: speed[name])
    ratios = [
        ours.bytes_per_s / theirs.bytes_per_s
        for ours, theirs in zip(samples[TIER], samples[engine], strict=True)
    ]
    interval = median_interval(ratios)
    cpu = {
        name: round(float(np.median([m.cpu_s_per_gb for m in runs])), 3)
        for name, runs in samples.items()
    }
    return {
        "ratio": round(interval.value, 3),
        "low": round(interval.low, 3),
        "high": round(interval.high, 3),
        "engine": engine,
        "gb_per_s": {name: round(value / 1e9, 3) for name, value in speed.items()},
        "cpu_s_per_gb": cpu,
    }


def recover_s(folder: Path, num_pages: int) -> float:
    """Return the seconds in which a tier finds ``num_pages`` pages after a start."""
    settings: dict[str, Any] = {
        "slot_bytes": 4096,
        "page_bytes": 4096,
        "page_tokens": PAGE_TOKENS,
        "max_bytes": num_pages * 8192,
        "fingerprint": "bench-disk",
    }
    rng = np.random.default_rng(0)
    step = num_pages // 10
    memory = MemoryRegion(step, 4096)
    memory.array[:] = rng.integers(0, 256, memory.array.shape, np.uint8)
    tier = DiskTier.open(folder, **settings)
    rows = np.arange(step)
    for first in range(0, num_pages, step):
        records = _records(rows, rng)
        if not tier.store(TierIO(rows + first, memory.array, rows, records)).ok.all():
            raise SystemExit("the tier for the recovery could not be filled")
    tier.close()
    memory.close()
    started_s = time.perf_counter()
    tier = DiskTier.open(folder, **settings)
    found = tier.recover()
    seconds = time.perf_counter() - started_s
    tier.close()
    if len(found) != num_pages:
        raise SystemExit("not all pages were recovered")
    return seconds


def measure(scratch: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one comparison per page size and direction, and print it."""
    for page_bytes in args.sizes:
        size = args.bytes // (page_bytes * args.depth) * page_bytes * args.depth
        folder = scratch / str(page_bytes)
        bench = Bench(folder, page_bytes, size, args.depth, args.io)
        engine, direct = bench.tier.io, bench.tier.direct
        for writes in (True, False):
            if not writes:
                bench.store()  # fio has overwritten the slab
            samples = rounds(bench, args.pairs, writes=writes)
            found = {
                "page_bytes": page_bytes,
                "op": "write" if writes else "read",
                "io": engine,
                "direct": direct,
                **compare(samples),
            }
            found["samples"] = {k: [asdict(m) for m in v] for k, v in samples.items()}
            print(_line(found), file=sys.stderr, flush=True)
            yield found
        bench.check()
        bench.close()
        shutil.rmtree(folder)


def _line(found: dict[str, Any]) -> str:
    speeds = "  ".join(f"{k} {v:6.3f}" for k, v in found["gb_per_s"].items())
    cpus = "  ".join(f"{k} {v:.3f}" for k, v in found["cpu_s_per_gb"].items())
    return (
        f"{found['page_bytes'] // KIB:6d} KiB {found['op']:5}  GB/s: {speeds}  "
        f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}] of "
        f"{found['engine']}  CPU s/GB: {cpus}"
    )


def summary(found: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the last line."""
    result: dict[str, Any] = {"benchmark": "bench-disk"}
    for op in ("read", "write"):
        of_op = [f for f in found if f["op"] == op]
        large = [f for f in of_op if f["page_bytes"] >= LARGE]
        if large:
            worst = min(large, key=lambda f: f["ratio"])
            result[f"{op}_vs_fio"] = worst["ratio"]
            result[f"{op}_vs_fio_interval"] = [worst["low"], worst["high"]]
            result[f"{op}_vs_fio_page_bytes"] = worst["page_bytes"]
            cpu = worst["cpu_s_per_gb"]
            result[f"{op}_cpu_s_per_gb"] = cpu[TIER]
            result[f"{op}_fio_cpu_s_per_gb"] = cpu[worst["engine"]]
        result[f"{op}_ratios"] = {
            f"{f['page_bytes'] // KIB}KiB": f["ratio"] for f in of_op
        }
        result[f"{op}_vs_bare"] = min(
            (round(f["gb_per_s"][TIER] / f["gb_per_s"][BARE], 3) for f in large),
            default=None,
        )
        result[f"{op}_gb_per_s"] = {
            f"{f['page_bytes'] // KIB}KiB": f["gb_per_s"][TIER] for f in of_op
        }
    result |= {
        "pairs": args.pairs,
        "depth": args.depth,
        "bytes": args.bytes,
        "io": found[0]["io"],
        "direct": all(f["direct"] for f in found),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, default=None, help="on the disk to test")
    parser.add_argument("--pairs", type=int, default=15, help="rounds, at least 6")
    parser.add_argument("--depth", type=int, default=8, help="I/Os in flight")
    parser.add_argument("--bytes", type=int, default=1024 * MIB, help="moved per run")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--io", choices=ENGINES, default="auto")
    parser.add_argument("--out", type=Path, default=Path("out/bench-disk"))
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.bytes, args.sizes = 6, 128 * MIB, [256 * KIB, MIB]
    if shutil.which("fio") is None:
        raise SystemExit(fio_runs.FIO_MISSING)
    started_s = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="tiered-bench-", dir=args.path or "."))
    try:
        found = list(measure(scratch, args))
        num_pages = RECOVER_PAGES // (10 if args.quick else 1)
        seconds = recover_s(scratch / "recover", num_pages)
    finally:
        shutil.rmtree(scratch)
    result = summary(found, args)
    result["recover_pages"] = num_pages
    result["recover_s"] = round(seconds, 3)
    result["wall_s"] = round(time.perf_counter() - started_s, 1)
    args.out.mkdir(parents=True, exist_ok=True)
    records = args.out / f"records-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    records.write_text("".join(json.dumps(line) + "\n" for line in [result, *found]))
    print(f"raw figures: {records}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
