"""What a call of the pool costs, and what a transfer keeps of its transport's speed.

The index holds 200,000 pages of 16 tokens on the device. Blocks are allocated one at a
time and 256 at once; prompts of 4,096 tokens (256 pages) are inserted and matched.

Transfers move 256 blocks of 256 KiB between two pools of one process, in their three
steps, from and to places in another order, against a push of the same pieces by the
transport alone; then the same bytes by layer, by request and by request aggregated
(MemServe, Figure 11: many small pieces or few large ones). Runs alternate; figures are
medians, unless they say otherwise.

Figure 12: requests of 1,024 tokens are prefilled one after the other, which here means
that time passes, and sent by layer as the layers are done, or by request when all are.
What counts is the time from a prefill's end until the receiver has it all: at low load
(a prefill takes four times as long as sending by request) and at high load (half as
long, so that sends queue up).

The last line is one JSON object:

    alloc_us             per block, 256 at once; alloc_1_us one at a time (medians of
                         means over 2,048 blocks: single calls differ, since one in so
                         many sets a run of blocks aside)
    insert_4k_ms, match_4k_ms
    transfer_vs_transport  speed of the pool's transfer over the bare push
    agg_vs_by_layer, agg_vs_by_request  speed over the discrete forms
    low_WAY_ms, high_WAY_ms  from a prefill's end to its arrival, mean of the requests

Keys of the second transport end in its name.

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

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import UInt64s
from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.layouts import KVShape, MemoryForm, Shard, Way, batches
from sgl_tiered.pool.membership import InstanceKind, Member, View
from sgl_tiered.pool.mempool import MemPool
from sgl_tiered.pool.messages import Envelope, Place, PoolInfo, RankInfo, as_entry
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.pool.transfer import Rank, Transfer
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
REQUEST_BLOCKS = 1024 // PAGE_TOKENS
NUM_REQUESTS = 6
LOADS = {"low": 4.0, "high": 0.5}
"""Time of a prefill over that of sending it by request on discrete pages."""
TIMEOUT_S = 120.0
_REST_S = 5e-3


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
    if name == "nixl":
        from sgl_tiered.transport.nixl import open_nixl

        return open_nixl()
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


def make_sides(transport: str, *, discrete: bool) -> tuple[Side, Side]:
    """Return two instances that look after each other while one of them waits."""
    sides: list[Side] = []

    def pause() -> None:
        for side in sides:
            side.pool.poll()

    wire = Wire()
    sides += [make_side(wire, n, transport, pause, discrete=discrete) for n in range(2)]
    members = tuple(
        Member(
            f"bench-{n}",
            n,
            1,
            InstanceKind.COLOCATED,
            memory=as_entry(side.pool.info),
        )
        for n, side in enumerate(sides)
    )
    for side in sides:
        side.pool.see(View(1, members))
    return sides[0], sides[1]


def make_side(
    wire: Wire,
    instance: int,
    transport: str,
    pause: Callable[[], None],
    *,
    discrete: bool,
) -> Side:
    """Return an instance with memory for what is moved."""
    (shard,) = Shard.split(SHAPE, 1, 1)
    num_blocks = 2 * max(MOVED_BLOCKS, NUM_REQUESTS * REQUEST_BLOCKS)
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
    channel = Channel(wire, instance)
    pool = MemPool(store, 1, info, [rank], channel, clock, pause=pause)
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
    here, there = make_sides(transport, discrete=discrete)
    peer = here.transport.connect(there.transport.address)
    sources = scattered(here.pool, MOVED_BLOCKS)
    (shard,) = Shard.split(SHAPE, 1, 1)
    (pieces,) = batches(
        Way.BY_REQUEST,
        SHAPE,
        here.form,
        there.form,
        shard,
        slots_of(sources),
        np.arange(MOVED_BLOCKS),
    )

    def push() -> float:
        start = time.perf_counter()
        done = here.transport.push(peer, pieces, timeout_s=TIMEOUT_S).wait()
        assert done is TransferStatus.DONE, done
        return time.perf_counter() - start

    def send(way: Way) -> float:
        start = time.perf_counter()
        transfer = here.pool.transfer(1, sources, way=way, timeout_s=TIMEOUT_S)
        while transfer.status is TransferStatus.RUNNING:
            there.pool.poll()
            here.pool.poll()
            # Nobody else asks anything of these two pools.
            transfer.rest(_REST_S)
        seconds = time.perf_counter() - start
        assert transfer.status is TransferStatus.DONE, transfer.error
        (arrival,) = there.pool.take_arrivals()
        assert not there.pool.free_mem(arrival.addresses)
        return seconds

    jobs: dict[str, Callable[[], float]] = {
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
            seconds = job()
            if round_ >= 2:
                times[name].append(seconds)
    for side in (here, there):
        side.transport.close()
    num_bytes = MOVED_BLOCKS * shard.layout(SHAPE).page_bytes
    return {n: num_bytes / statistics.median(t) / 1e9 for n, t in times.items()}


def scattered(pool: MemPool, num_blocks: int) -> UInt64s:
    """Return new blocks in random order: no two are neighbours on both sides."""
    blocks = pool.alloc_mem(num_blocks)
    assert blocks is not None
    return np.random.default_rng(num_blocks).permutation(blocks)


class Sent:
    """One request of Figure 12: when it is prefilled, and when it has arrived.

    Args:
        here: the sender.
        way: how it is sent.
        first_s, prefill_s: when its prefill begins, and what it takes.
    """

    def __init__(self, here: Side, way: Way, first_s: float, prefill_s: float) -> None:
        self._pool = here.pool
        self._way = way
        self.sources = scattered(here.pool, REQUEST_BLOCKS)
        targets = here.pool.alloc_mem(REQUEST_BLOCKS, id=1)
        assert targets is not None
        self._targets = targets
        self.ends_s = first_s + prefill_s
        num = SHAPE.num_layers
        self._due_s = (
            [first_s + prefill_s * (i + 1) / num for i in range(num)]
            if way is Way.BY_LAYER
            else [self.ends_s]
        )
        self._begun: list[Transfer] = []
        self.late_s = -1.0

    def step(self, now_s: float) -> None:
        """Begin what is due, and note the end."""
        num = len(self._begun)
        is_last = num == len(self._due_s) - 1
        # What hands the blocks over waits for the layers before.
        waits = is_last and any(t.status is TransferStatus.RUNNING for t in self._begun)
        if num < len(self._due_s) and now_s >= self._due_s[num] and not waits:
            by_layer = self._way is Way.BY_LAYER
            self._begun.append(
                self._pool.transfer(
                    1,
                    self.sources,
                    self._targets,
                    way=self._way,
                    layers=(num, num + 1) if by_layer else None,
                    more=not is_last,
                    timeout_s=TIMEOUT_S,
                )
            )
        elif num == len(self._due_s) and self.late_s < 0:
            last = self._begun[-1]
            assert not last.error, last.error
            if last.status is TransferStatus.DONE:
                self.late_s = now_s - self.ends_s


def time_requests(here: Side, there: Side, way: Way, prefill_s: float) -> float:
    """Return the mean time from a prefill's end to its arrival, in seconds."""
    clock = SystemClock()
    begin_s = clock.now() + 0.02
    sent = [
        Sent(here, way, begin_s + i * prefill_s, prefill_s) for i in range(NUM_REQUESTS)
    ]
    while any(request.late_s < 0 for request in sent):
        for request in sent:
            request.step(clock.now())
        there.pool.poll()
        here.pool.poll()
        time.sleep(100e-6)
    for request in sent:
        assert not here.pool.free_mem(request.sources)
    for arrival in there.pool.take_arrivals():
        assert not there.pool.free_mem(arrival.addresses)
    return statistics.mean(request.late_s for request in sent)


def time_loads(transport: str, rounds: int) -> dict[str, float]:
    """Time requests at low and at high load, every way: Figure 12, in milliseconds."""
    pairs = {d: make_sides(transport, discrete=d) for d in (False, True)}
    for discrete, way in ((False, Way.BY_REQUEST_AGG), (True, Way.BY_LAYER)):
        time_requests(*pairs[discrete], way, 1e-3)  # The first one connects.
    alone_s = time_requests(*pairs[True], Way.BY_REQUEST, 0.2)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for load, factor in LOADS.items():
            for way in Way:
                sides = pairs[way is not Way.BY_REQUEST_AGG]
                late_s = time_requests(*sides, way, factor * alone_s)
                found.setdefault(f"{load}_{way.value}_ms", []).append(late_s * 1e3)
    for sides in pairs.values():
        for side in sides:
            side.transport.close()
    return {
        name.replace("-", "_"): statistics.median(times)
        for name, times in found.items()
    }


def both() -> list[str]:
    """Return the transports that run here, the one that serves first."""
    try:
        open_transport("mooncake").close()
    except TransportUnavailableError as error:
        print(f"only over loopback: {error}")
        return ["loopback"]
    return ["mooncake", "loopback"]


def time_moves(transport: str, repeats: int) -> dict[str, float]:
    """Time what moves over one transport, and print it."""
    rounds = max(5, repeats // 20)
    speeds = time_transfers(transport, rounds, discrete=False)
    speeds |= time_transfers(transport, rounds, discrete=True)
    for name, speed in speeds.items():
        print(f"{name:20s} {speed:10.2f} GB/s over {transport}")
    agg = speeds["by-request-agg"]
    loads = time_loads(transport, max(3, repeats // 100))
    for name, late_ms in loads.items():
        print(f"{name:28s} {late_ms:10.2f} after the prefill, over {transport}")
    return {
        "transfer_vs_transport": agg / speeds["transport"],
        "agg_vs_by_layer": agg / speeds["by-layer"],
        "agg_vs_by_request": agg / speeds["by-request"],
        **loads,
    }


def main() -> None:
    """Measure, and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--pages", type=int, default=200_000)
    parser.add_argument(
        "--transport",
        choices=["loopback", "mooncake", "nixl"],
        help="only this one; default: mooncake where it is installed, and loopback",
    )
    args = parser.parse_args()
    results = time_calls(args.pages, args.repeats)
    for name, value in results.items():
        print(f"{name:20s} {value:10.4f}")
    gc.unfreeze()
    transports = [args.transport] if args.transport else both()
    for transport in transports:
        suffix = "" if transport == transports[0] else f"_{transport}"
        moved = time_moves(transport, args.repeats)
        results |= {f"{name}{suffix}": value for name, value in moved.items()}
    rounded = {name: round(value, 4) for name, value in results.items()}
    told = {**rounded, "transport": transports[0], "pages": args.pages}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
