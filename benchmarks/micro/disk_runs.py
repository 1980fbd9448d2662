"""How long the runs of a prompt's pages on disk are after much churn, and the I/Os.

Sessions take turns in random order; each turn makes a prompt longer by a few pages, and
a session that has ended begins anew. Host and disk are full nearly all of the time, so
every write evicts. At each turn the whole prompt's addresses on disk are cut into I/Os
as the disk tier does it. Nothing is written: this is about addresses.

Prints I/O sizes for the first tenth and the last tenth of the churn; the last line is
one JSON object. An I/O of less than 1 MiB is one that a disk does not do at full speed.

    python benchmarks/micro/disk_runs.py [--turns 4000]
"""

from __future__ import annotations

import argparse
import json

import numpy as np
from _caches import PAGE_TOKENS, landed, make_cache

from sgl_tiered.cache.index import concat_rows
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.tiers.disk_io import plan_extents

SLOT_BYTES = 196_608
HOST_PAGES, DISK_PAGES = 2_000, 10_000
NUM_SESSIONS = 250
MAX_SESSION_PAGES = 250
DEMOTE_PAGES = 128
MIB = 1 << 20
MAX_IO_BYTES = 2 * MIB
"""More than the tier's own, which would hide how long the runs are."""


def io_bytes(cache: TieredCache, digest: bytes, prompt: np.ndarray) -> list[int]:
    """Return the sizes of the I/Os that read what the disk has of a prompt."""
    index, table = cache._index, cache._table
    path = index.walk(index.root(digest), prompt.tobytes())
    if not path:
        return []
    entries = table.entry_of[1][concat_rows(path)]
    addresses = table.address[entries[entries >= 0]]
    extents = plan_extents(
        addresses,
        np.arange(len(addresses)),
        max(1, (256 * MIB) // SLOT_BYTES),
        SLOT_BYTES,
        MAX_IO_BYTES,
        num_threads=1,
    )
    return [len(extent.positions) * SLOT_BYTES for extent in extents]


def churn(cache: TieredCache, turns: int) -> list[list[int]]:
    """Let sessions take turns; return the I/O sizes at each of them."""
    rng = np.random.default_rng(1)
    digest = cache.open_namespace(Namespace("model", "float32", PAGE_TOKENS, "0/1"))
    prompts = [np.zeros(0, np.int32) for _ in range(NUM_SESSIONS)]
    sizes = []
    for _ in range(turns):
        which = int(rng.zipf(1.2) - 1) % NUM_SESSIONS
        if len(prompts[which]) > MAX_SESSION_PAGES * PAGE_TOKENS:
            prompts[which] = np.zeros(0, np.int32)
        sizes.append(io_bytes(cache, digest, prompts[which]))
        num_pages = 1 + int(rng.lognormal(2.5, 0.8))
        more = rng.integers(32_000, size=num_pages * PAGE_TOKENS, dtype=np.int32)
        prompts[which] = np.concatenate([prompts[which], more])
        plan = cache.plan_offload(digest, prompts[which])
        if plan is not None:
            cache.finish_offload(plan, landed(len(plan.pages)))
        while (demote := cache.plan_demote(DEMOTE_PAGES)) is not None:
            cache.finish_demote(demote, landed(len(demote.pages)))
    return sizes


def describe(sizes: list[list[int]]) -> dict[str, float]:
    """Return what a reader of these prompts would see."""
    flat = np.array([size for turn in sizes for size in turn], float)
    return {
        "mean_io_mib": round(float(flat.mean()) / MIB, 3),
        # By bytes, not by I/Os: what share is read at the disk's full speed.
        "share_in_ios_of_1_mib": round(float(flat[flat >= MIB].sum() / flat.sum()), 3),
        "ios_per_100_mib": round(float(len(flat) / flat.sum()) * 100 * MIB, 1),
    }


def main() -> None:
    """Churn, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=4000)
    args = parser.parse_args()
    cache = make_cache(HOST_PAGES, DISK_PAGES)
    sizes = churn(cache, args.turns)
    full = args.turns // 10
    # The first tenth hits little: take the next one, when sessions have come back.
    early, late = describe(sizes[full : 2 * full]), describe(sizes[-full:])
    used = cache.occupancy(TierId.DISK)
    print("early", early)
    print("late ", late)
    print(
        json.dumps(
            {
                "benchmark": "micro/disk_runs",
                "turns": args.turns,
                "disk_pages": DISK_PAGES,
                "disk_used_pages": used.used_slots,
                "pages_evicted": cache.stats.pages_evicted[TierId.DISK],
                "early": early,
                "late": late,
            }
        )
    )


if __name__ == "__main__":
    main()
