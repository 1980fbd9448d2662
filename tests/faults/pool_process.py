"""A pool node in a process of its own, told what to do by lines of JSON.

    pool_process.py NAME REGISTRY TRANSPORT TTL_S GRACE_S TIMEOUT_S PORT SEED

Pages' bytes follow from their tokens, so whoever finds a page can tell whether it is
the right one. It prints a line of JSON when it is in the pool, and one per command:

    hold P N         compute and keep pages 0 .. N-1 of prompt P
    fetch I P N      have them written here by instance I; says what came of it
    send I P N       send them to instance I, which keeps them
    lend I N         have N blocks allocated at instance I, for the next command
    push I P N       begin to write pages to those blocks, and do not wait for it
    fill             take all blocks that can be had and write to them; says how many
    filled           say whether all that was taken so is as it was written
    drop             give it back
    work N           N random operations more, while the commands go on being heard
    check            say what was done so far, and whether everything kept here is right
    settle           end the work, wait until nothing is under way; say what is left
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

import numpy as np
import xxhash

from sgl_tiered.core.addresses import slots_of
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.pool.base import BlockType
from sgl_tiered.pool.block_slots import NO_ADDRESSES
from sgl_tiered.pool.layouts import KVShape, Shard
from sgl_tiered.pool.membership import Lease
from sgl_tiered.pool.mempool import PoolConfig
from sgl_tiered.pool.node import NodeConfig, PoolNode
from sgl_tiered.pool.table_store import TableStore
from sgl_tiered.tiers.region import RegionTier
from sgl_tiered.transport.base import TransferStatus, Transport
from sgl_tiered.transport.loopback import open_loopback
from sgl_tiered.transport.mooncake import open_mooncake

SHAPE = KVShape(num_layers=4, num_heads=4, head_bytes=64, page_tokens=16)
(SHARD,) = Shard.split(SHAPE, 1, 1)
LAYOUT = SHARD.layout(SHAPE)
NUM_BLOCKS = 160
NUM_PROMPTS = 12
NUM_PAGES = 24
MAX_UNDER_WAY = 4


def tokens(prompt: int, num_pages: int) -> np.ndarray:
    """Return a prompt; half of its pages it has in common with another."""
    step = SHAPE.page_tokens
    common = np.arange(num_pages * step, dtype=np.int32) + (prompt // 2 << 20)
    common[NUM_PAGES // 2 * step :] += prompt % 2 << 10
    return common


def content(prompt: int, page: int) -> np.ndarray:
    """Return a page's bytes, which follow from its tokens and those before."""
    seed = xxhash.xxh3_64_intdigest(tokens(prompt, page + 1).tobytes())
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.page_bytes, np.uint8)


class Array:
    """A region that is a plain array."""

    def __init__(self, num_rows: int) -> None:
        self.array = np.zeros((num_rows, LAYOUT.page_bytes), np.uint8)

    def close(self) -> None:
        """Nothing to close."""


class Process:
    """The node, what it has under way, and what came of the rest."""

    def __init__(
        self,
        name: str,
        registry: str,
        transport: str,
        ttl_s: float,
        grace_s: float,
        timeout_s: float,
        port: int,
    ) -> None:
        opener = open_mooncake if transport == "mooncake" else open_loopback
        self.transport: Transport = opener(grace_s=grace_s)
        self.memory = Array(NUM_BLOCKS)
        self.node = PoolNode(
            NodeConfig(
                name,
                registry,
                port=port,
                ttl_s=ttl_s,
                pool=PoolConfig(timeout_s=timeout_s, retry_s=0.25),
            ),
            SHAPE,
            self.make_store,
            self.transport,
        )
        self.pool = self.node.pool
        self.fetches: list[tuple[Any, int, bool]] = []
        self.sends: list[tuple[Any, bool]] = []
        self.work = 0
        self.lent = NO_ADDRESSES
        self.pushes: list[Any] = []
        self.taken: list[int] = []
        self.counts = {"wrong": 0, "fetched": 0, "sent": 0, "failed": 0, "done": 0}

    def make_store(self, lease: Lease) -> TableStore:
        """Return a store of host memory."""
        host = TierId.HOST
        tiers = {host: RegionTier(host, self.memory)}
        return TableStore(
            lease.instance,
            LAYOUT,
            {host: NUM_BLOCKS},
            {host: LRUPolicy()},
            SystemClock(),
            tiers,
            lease.incarnation,
        )

    # Operations.

    def hold(self, prompt: int, num_pages: int) -> bool:
        """Compute pages and keep them."""
        blocks = self.pool.alloc_mem(num_pages, BlockType.HOST)
        if blocks is None:
            return False
        for page, slot in enumerate(slots_of(blocks).tolist()):
            self.memory.array[slot] = content(prompt, page)
        done = self.pool.insert(tokens(prompt, num_pages), blocks, free_duplicates=True)
        assert not done.refusal, done.refusal
        return True

    def fetch(self, holder: int, prompt: int, num_pages: int, *, tell: bool) -> None:
        """Begin to fetch."""
        blocks = self.pool.alloc_mem(num_pages, BlockType.HOST)
        if blocks is None:
            if tell:
                say(error="there is no room here", num_pages=0, right=True)
            return
        found = self.pool.fetch(holder, tokens(prompt, num_pages), blocks)
        self.fetches.append((found, prompt, tell))

    def send(
        self, to: int, prompt: int, num_pages: int, *, only_missing: bool, tell: bool
    ) -> None:
        """Begin to send what is kept here of a prompt."""
        prompt_tokens = tokens(prompt, num_pages)
        found = self.pool.match(prompt_tokens)
        transfer = self.pool.transfer_with_insert(
            to, prompt_tokens, found, type=BlockType.HOST, only_missing=only_missing
        )
        self.sends.append((transfer, tell))

    def lend(self, to: int, num_pages: int) -> bool:
        """Have blocks allocated elsewhere."""
        found = self.pool.alloc_mem(num_pages, BlockType.HOST, id=to)
        self.lent = NO_ADDRESSES if found is None else found
        return found is not None

    def push(self, to: int, prompt: int, num_pages: int) -> str:
        """Begin to write to them; return why not."""
        found = self.pool.match(tokens(prompt, num_pages))
        self.pushes.append(self.pool.transfer(to, found, self.lent, more=True))
        return str(self.pushes[-1].error)

    def num_pushing(self) -> int:
        """Return how many pieces are in the hands of the transport's library."""
        ours = [*self.pushes, *self.pool._sender._transfers]
        return sum(push.num_running for each in ours for _, _, push in each._pushes)

    def fill(self) -> int:
        """Take all blocks that nobody has, and write each one's number to it."""
        num = 0
        while (found := self.pool.alloc_mem(1, BlockType.HOST)) is not None:
            (slot,) = slots_of(found).tolist()
            self.memory.array[slot] = slot
            self.taken.append(int(found[0]))
            num += 1
        return num

    def is_filled(self) -> bool:
        """Return whether nobody else has written there."""
        slots = slots_of(np.array(self.taken, np.uint64))
        return bool((self.memory.array[slots] == slots[:, None].astype(np.uint8)).all())

    def drop(self) -> None:
        """Give back what was taken."""
        refusal = self.pool.free_mem(np.array(self.taken, np.uint64))
        assert not refusal, refusal
        self.taken.clear()

    def look(self) -> None:
        """Take note of what has ended."""
        running = TransferStatus.RUNNING
        for entry in [e for e in self.fetches if e[0].status is not running]:
            self.fetches.remove(entry)
            fetch, prompt, tell = entry
            right = self.is_right(prompt, fetch.addresses[: fetch.num_blocks])
            self.counts["wrong"] += not right
            self.counts["failed" if fetch.error else "fetched"] += 1
            self.counts["done"] += 1
            refusal = self.pool.free_mem(fetch.addresses)
            assert not refusal, refusal
            if tell:
                say(error=fetch.error, num_pages=fetch.num_blocks, right=right)
        for sent in [e for e in self.sends if e[0].status is not running]:
            self.sends.remove(sent)
            transfer, tell = sent
            self.counts["failed" if transfer.error else "sent"] += 1
            self.counts["done"] += 1
            if tell:
                say(error=transfer.error, num_known=transfer.num_known)

    def is_right(self, prompt: int, blocks: np.ndarray) -> bool:
        """Return whether blocks have the first pages of a prompt."""
        return all(
            (self.memory.array[slot] == content(prompt, page)).all()
            for page, slot in enumerate(slots_of(blocks).tolist())
        )

    def num_wrong(self) -> int:
        """Return how many prompts kept here have a wrong byte."""
        return sum(
            not self.is_right(prompt, self.pool.match(tokens(prompt, NUM_PAGES)))
            for prompt in range(NUM_PROMPTS)
        )

    def begin_something(self, rng: np.random.Generator) -> None:
        """Begin one random operation."""
        others = [
            m.instance
            for m in self.node.view.members
            if m.instance != self.node.instance
        ]
        prompt = int(rng.integers(NUM_PROMPTS))
        num_pages = int(rng.integers(1, NUM_PAGES + 1))
        what = int(rng.integers(5))
        if what == 0 or not others:
            self.hold(prompt, num_pages)
        elif what < 3:
            # Some is left where a holder stops: what is lent to it stays so.
            if self.pool.usage().num_lent_blocks <= NUM_BLOCKS // 2:
                self.fetch(int(rng.choice(others)), prompt, num_pages, tell=False)
        elif len(self.pool.match(tokens(prompt, num_pages))) == num_pages:
            self.send(
                int(rng.choice(others)),
                prompt,
                num_pages,
                only_missing=bool(rng.integers(2)),
                tell=False,
            )
        self.pool.take_arrivals()


def say(**fields: Any) -> None:
    """Print a line."""
    print("pool: " + json.dumps(fields), flush=True)


def main() -> None:
    """Do what the lines say, until there are no more."""
    name, registry, transport, *times, port, seed = sys.argv[1:]
    rng = np.random.default_rng(int(seed))
    ttl_s, grace_s, timeout_s = map(float, times)
    process = Process(name, registry, transport, ttl_s, grace_s, timeout_s, int(port))
    node = process.node
    say(instance=node.instance, incarnation=node.incarnation)
    os.set_blocking(sys.stdin.fileno(), False)
    pending, settling = b"", False
    while True:
        busy = process.work > 0
        select.select([sys.stdin, node], [], [], 0.0005 if busy else 0.2)
        node.poll()
        process.look()
        if busy and len(process.fetches) + len(process.sends) < MAX_UNDER_WAY:
            process.work -= 1
            process.begin_something(rng)
        if settling and process.pool.is_idle and not process.fetches:
            settling = False
            usage = node.store.usage(TierId.HOST)
            say(
                wrong=process.counts["wrong"] + process.num_wrong(),
                active=usage.active,
                held=usage.held,
                under_way=node.state()["under_way"],
            )
        try:
            got = os.read(sys.stdin.fileno(), 65536)
        except BlockingIOError:
            continue
        if not got:
            break
        *lines, pending = (pending + got).split(b"\n")
        for line in lines:
            word, *numbers = line.decode().split()
            values = [int(number) for number in numbers]
            if word == "hold":
                say(ok=process.hold(*values))
            elif word == "fetch":
                process.fetch(*values, tell=True)
            elif word == "send":
                process.send(*values, only_missing=True, tell=True)
            elif word == "lend":
                say(ok=process.lend(*values))
            elif word == "push":
                say(error=process.push(*values))
            elif word == "fill":
                say(num=process.fill())
            elif word == "filled":
                say(right=process.is_filled())
            elif word == "drop":
                say(ok=process.drop() is None)
            elif word == "work":
                process.work = values[0]
            elif word == "settle":
                process.work, settling = 0, True
            else:
                state = node.state()
                under_way = state["under_way"]
                say(
                    **process.counts,
                    wrong_kept=process.num_wrong(),
                    members=[m.instance for m in node.view.members],
                    incarnation=node.incarnation,
                    trouble=state["trouble"],
                    lease_left_s=state["lease_left_s"],
                    pushing=process.num_pushing(),
                    pushes=[push.status.name for push in process.pushes],
                    fetching=under_way["num_fetches"],
                    kept_for_the_gone=under_way["num_quarantined_blocks"],
                    lent=under_way["num_lent_blocks"],
                    fences=under_way["num_fences"],
                )
    node.close()
    # Mooncake's threads may outlive what they use.
    os._exit(0)


if __name__ == "__main__":
    main()
