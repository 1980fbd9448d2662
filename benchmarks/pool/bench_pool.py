"""What a call of the pool costs, and what a transfer keeps of its transport's speed.

The index holds 200,000 pages of 16 tokens on the device. Blocks are allocated one at a
time and 256 at once; prompts of 4,096 tokens (256 pages) are inserted and matched.
Transfers move 256 blocks of 256 KiB between two pools of one process, in their three
steps, against a push of the same pieces by the transport alone; then the same bytes by
layer, by request and by request aggregated. Runs alternate; figures are medians, unless
they say otherwise. The last line is one JSON object:

    alloc_us             per block, 256 at once; alloc_1_us one at a time (medians of
                         means over 2,048 blocks: single calls differ, since one in so
                         many sets a run of blocks aside)
    insert_4k_ms, match_4k_ms
    transfer_vs_transport  speed of the pool's transfer over the bare push
    agg_vs_by_layer, agg_vs_by_request  speed over the discrete forms

    python benchmarks/pool/bench_pool.py [--repeats 300] [--transport loopback]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import KVShape, MemoryForm, Shard, Way, batches
from sgl_tiered.pool.membership import InstanceKind, Member, View
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.messages import Envelope, Place, PoolInfo, RankInfo
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.pool.transfer import Rank
from sgl_tiered.transport.base import TransferStatus
from sgl_tiered.transport.batched import BatchedTransport

PAGE_TOKENS = 16
PROMPT_TOKENS = 4096
PROMPT_PAGES = PROMPT_TOKENS // PAGE_TOKENS
NUM_SEQUENCES = 200
VOCABULARY = 32_000
SHAPE = KVShape(num_layers=16, num_heads=8, head_bytes=64, page_tokens=PAGE_TOKENS)
"""A block of 256 KiB: 16 layers of 16 tokens of 8 heads, keys and values."""
MOVED_BLOCKS = 256
TIMEOUT_S = 120.0
VIEW = View(
    1, tuple(Member(f"bench-{n}", n, 1, InstanceKind.COLOCATED) for n in range(2))
)


@dataclass
class Wire:
    """Messages between the two pools of this process."""

    inboxes: tuple[list[Envelope], list[Envelope]] = field(
        default_factory=lambda: ([], [])
    )


class Channel:
    """One end of the wire."""

    def __init__(self, wire: Wire, instance: int) -> None:
        self._wire = wire
        self._instance = instance

    def send(self, message: Envelope) -> None:
        """Put a message into the other's inbox."""
        self._wire.inboxes[message.receiver[0]].append(message)

    def take(self) -> list[Envelope]:
        """Empty our own."""
        inbox = self._wire.inboxes[self._instance]
        found = inbox[:]
        inbox.clear()
        return found


@dataclass
class Side:
    """One instance: its pool, its transport and its memory."""

    pool: MemPool
    transport: BatchedTransport
    region: int
    form: MemoryForm


def open_transport(name: str) -> BatchedTransport:
    """Return a transport of a kind."""
    if name == "mooncake":
        from sgl_tiered.transport.mooncake import open_mooncake

        return open_mooncake("127.0.0.1")
    from sgl_tiered.transport.loopback import open_loopback

    return open_loopback()


def make_pool(num_blocks: int) -> MemPool:
    """Return a pool without memory and without others."""
    store = TableStore(
        0,
        Shard(0, 16, 0, 8).layout(SHAPE),
        {TierId.DEVICE: num_blocks, TierId.HOST: num_blocks},
        {medium: LRUPolicy() for medium in (TierId.DEVICE, TierId.HOST)},
        SystemClock(),
    )
    return MemPool(store, 1, PoolInfo(SHAPE, ()), [], Channel(Wire(), 0), SystemClock())


def make_side(wire: Wire, instance: int, transport: str, *, discrete: bool) -> Side:
    """Return an instance with memory for what is moved."""
    (shard,) = Shard.split(SHAPE, 1, 1)
    num_blocks = 2 * MOVED_BLOCKS
    form = (
        MemoryForm.discrete(SHAPE, shard, num_blocks)
        if discrete
        else MemoryForm.aggregated(SHAPE, shard)
    )
    layout = shard.layout(SHAPE)
    memory = np.ones(num_blocks * layout.page_bytes, np.uint8)
    opened = open_transport(transport)
    region = opened.register(memory).number
    place = Place(TierId.DEVICE, region, form)
    info = PoolInfo(SHAPE, (RankInfo(opened.address, (place,)),))
    clock = SystemClock()
    eviction = {TierId.DEVICE: LRUPolicy()}
    store = TableStore(instance, layout, {TierId.DEVICE: num_blocks}, eviction, clock)
    rank = Rank(0, opened, {})
    pool = MemPool(store, 1, info, [rank], Channel(wire, instance), clock)
    pool.see(VIEW)
    return Side(pool, opened, region, form)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def smooth(seconds: list[float], num: int) -> float:
    """Return the median of means over ``num`` calls."""
    means = [statistics.mean(seconds[i : i + num]) for i in range(0, len(seconds), num)]
    return statistics.median(means)


def time_calls(num_pages: int, repeats: int) -> dict[str, float]:
    """Time allocation, insertion and match on a full index."""
    pool = make_pool(num_pages + (repeats + 64) * PROMPT_PAGES)
    rng = np.random.default_rng(1)
    tokens = num_pages // NUM_SEQUENCES * PAGE_TOKENS
    prompts = []
    for _ in range(NUM_SEQUENCES):
        sequence = rng.integers(VOCABULARY, size=tokens, dtype=np.int32)
        blocks = pool.alloc_mem(tokens // PAGE_TOKENS)
        assert blocks is not None
        assert not pool.insert(sequence, blocks).refusal
        prompts.append(sequence[:PROMPT_TOKENS].copy())
    # As SGLang does after start-up, so that the collector does not walk the index.
    gc.freeze()
    allocs, inserts, matches = [], [], []
    for i in range(repeats):
        fresh = rng.integers(VOCABULARY, size=PROMPT_TOKENS, dtype=np.int32)
        start = time.perf_counter()
        blocks = pool.alloc_mem(PROMPT_PAGES)
        allocs.append(time.perf_counter() - start)
        assert blocks is not None
        start = time.perf_counter()
        done = pool.insert(fresh, blocks)
        inserts.append(time.perf_counter() - start)
        assert done.num_inserted == PROMPT_PAGES
        known = prompts[i % NUM_SEQUENCES]
        start = time.perf_counter()
        found = pool.match(known)
        matches.append(time.perf_counter() - start)
        assert len(found) == PROMPT_PAGES
    singles, kept = [], []
    for _ in range(max(64 * repeats, 2048)):
        start = time.perf_counter()
        one = pool.alloc_mem(1, BlockType.HOST)
        singles.append(time.perf_counter() - start)
        assert one is not None
        kept.append(one)
        if len(kept) == 2048:
            assert not pool.free_mem(np.concatenate(kept))
            kept.clear()
    frees = []
    for _ in range(repeats):
        blocks = pool.alloc_mem(PROMPT_PAGES)
        assert blocks is not None
        frees.append(timed(lambda blocks=blocks: pool.free_mem(blocks)))
    return {
        "alloc_us": smooth(allocs, 8) / PROMPT_PAGES * 1e6,
        "alloc_1_us": smooth(singles, 2048) * 1e6,
        "free_us": statistics.median(frees) / PROMPT_PAGES * 1e6,
        "insert_4k_ms": statistics.median(inserts) * 1e3,
        "insert_4k_ms_p99": float(np.percentile(inserts, 99)) * 1e3,
        "match_4k_ms": statistics.median(matches) * 1e3,
        "match_4k_ms_p99": float(np.percentile(matches, 99)) * 1e3,
    }


def time_transfers(transport: str, repeats: int, *, discrete: bool) -> dict[str, float]:
    """Time transfers by every way that fits the form, and the bare push."""
    wire = Wire()
    here = make_side(wire, 0, transport, discrete=discrete)
    there = make_side(wire, 1, transport, discrete=discrete)
    peer = here.transport.connect(there.transport.address)
    sources = here.pool.alloc_mem(MOVED_BLOCKS)
    assert sources is not None
    slots = np.arange(MOVED_BLOCKS)
    (shard,) = Shard.split(SHAPE, 1, 1)

    (pieces,) = batches(
        Way.BY_REQUEST, SHAPE, here.form, there.form, shard, slots, slots
    )

    def push() -> None:
        done = here.transport.push(peer, pieces, timeout_s=TIMEOUT_S).wait()
        assert done is TransferStatus.DONE, done

    def send(way: Way) -> None:
        transfer = here.pool.transfer(1, sources, way=way, timeout_s=TIMEOUT_S)
        # The threads of the transport do the work: look now and then, and wait.
        while transfer.status is TransferStatus.RUNNING:
            there.pool.poll()
            here.pool.poll()
            time.sleep(50e-6)
        assert transfer.status is TransferStatus.DONE, transfer.error
        (arrival,) = there.pool.take_arrivals()
        assert not there.pool.free_mem(arrival.addresses)

    jobs: dict[str, Callable[[], None]] = {
        "by-request-agg": lambda: send(Way.BY_REQUEST_AGG)
    }
    if discrete:
        jobs = {
            "by-layer": lambda: send(Way.BY_LAYER),
            "by-request": lambda: send(Way.BY_REQUEST),
        }
    else:
        jobs["transport"] = push
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for round_ in range(repeats + 2):
        for name, job in jobs.items():
            seconds = timed(job)
            if round_ >= 2:
                times[name].append(seconds)
    for side in (here, there):
        side.transport.close()
    num_bytes = MOVED_BLOCKS * shard.layout(SHAPE).page_bytes
    return {n: num_bytes / statistics.median(t) / 1e9 for n, t in times.items()}


def main() -> None:
    """Measure, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--pages", type=int, default=200_000)
    parser.add_argument(
        "--transport", choices=["loopback", "mooncake"], default="loopback"
    )
    args = parser.parse_args()
    results = time_calls(args.pages, args.repeats)
    for name, value in results.items():
        print(f"{name:20s} {value:10.4f}")
    gc.unfreeze()
    rounds = max(5, args.repeats // 20)
    speeds = time_transfers(args.transport, rounds, discrete=False)
    speeds |= time_transfers(args.transport, rounds, discrete=True)
    for name, speed in speeds.items():
        print(f"{name:20s} {speed:10.2f} GB/s over {args.transport}")
    agg = speeds["by-request-agg"]
    results["transfer_vs_transport"] = agg / speeds["transport"]
    results["agg_vs_by_layer"] = agg / speeds["by-layer"]
    results["agg_vs_by_request"] = agg / speeds["by-request"]
    rounded = {name: round(value, 4) for name, value in results.items()}
    print(json.dumps({**rounded, "transport": args.transport, "pages": args.pages}))


if __name__ == "__main__":
    main()
