"""What the router pays per KV event, per request and per page that it remembers.

A fleet of instances, each holding prompts of its own behind a shared beginning of 512
tokens, page 16. Timed one by one, in CPU time of the thread: a stored batch of 64
blocks, decoding it, the removal of as many, keys and lookup of a prompt of 4,096
tokens, and the whole decision, which the assumption that follows from it precedes for
the prompt before, as in a router. Memory by tracemalloc. ``--policy`` is whose decision
is timed. The last line is one JSON object.

    python benchmarks/micro/routing.py [--instances 16] [--pages 4096] [--repeats 300]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.policies.routing.registry import ROUTINGS, make_routing
from sgl_tiered.router.board import LoadBoard
from sgl_tiered.router.config import COLOCATED, InstanceConfig
from sgl_tiered.router.events import apply, decode
from sgl_tiered.router.instances import Instance
from sgl_tiered.router.prompts import read_prompt
from sgl_tiered.router.scheduler import Choice, Scheduler
from sgl_tiered.router.tree import PromptTree

PAGE = 16
SHARED_TOKENS = 512
PROMPT_TOKENS = 4096
BATCH_BLOCKS = 64
STORE, REMOVE = "store 64 blocks", "remove 64 blocks"


@dataclass
class StillFleet:
    """Instances that neither come nor go, as far as a scheduler looks."""

    trees: dict[str, PromptTree]
    boards: dict[str, LoadBoard]
    instances: list[Instance] = field(default_factory=list)

    @classmethod
    def empty(cls) -> StillFleet:
        """Return a fleet without instances."""
        instances: list[Instance] = []
        tree = PromptTree()
        board = LoadBoard(tree, lambda: instances, lambda i: i.load(0.0, 1.0), 5.0)
        return cls({COLOCATED: tree}, {COLOCATED: board}, instances)


class Names:
    """Numbers blocks, as hashes would."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, num: int) -> list[int]:
        """Return so many new ones."""
        first, self.next = self.next, self.next + num
        return list(range(first, self.next))


def fill(fleet: StillFleet, num: int, num_pages: int, names: Names) -> list[list[int]]:
    """Let each instance hold so many pages; returns a prompt of each."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 2**17, SHARED_TOKENS).tolist()
    tree = fleet.trees[COLOCATED]
    prompts = []
    for number in range(num):
        config = InstanceConfig(f"i{number}", f"http://10.0.0.1:{number + 1}")
        holder = tree.add_holder(config.name, PAGE)
        instance = Instance(config, is_up=True, holders=[holder])
        instance.on_change = fleet.boards[COLOCATED].note_load
        fleet.instances.append(instance)
        beginning = names.take(SHARED_TOKENS // PAGE)
        tree.store(holder, beginning, None, shared, PAGE, TierId.DEVICE)
        left = num_pages - len(beginning)
        while left > 0:
            own = min((PROMPT_TOKENS - SHARED_TOKENS) // PAGE, left)
            tokens = rng.integers(0, 2**17, own * PAGE).tolist()
            blocks = names.take(own)
            tree.store(holder, blocks, beginning[-1], tokens, PAGE, TierId.DEVICE)
            left -= own
        prompts.append([*shared, *tokens][:PROMPT_TOKENS])
    return prompts


def main() -> None:
    """Fill, then time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--pages", type=int, default=4096, help="held per instance")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--policy", choices=ROUTINGS, default="prompt-tree")
    args = parser.parse_args()
    fleet, names = StillFleet.empty(), Names()
    tracemalloc.start()
    prompts = fill(fleet, args.instances, args.pages, names)
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tree = fleet.trees[COLOCATED]
    scheduler = Scheduler(fleet, make_routing(args.policy), 64, SystemClock())
    times_ns: dict[str, list[int]] = defaultdict(list)

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.thread_time_ns()
        call()
        times_ns[name].append(time.thread_time_ns() - start)

    rng = np.random.default_rng(1)
    for repeat in range(args.repeats):
        holder = fleet.instances[repeat % args.instances].holders[0]
        stored = {
            "type": "BlockStored",
            "block_hashes": names.take(BATCH_BLOCKS),
            "parent_block_hash": None,
            "token_ids": rng.integers(0, 2**17, BATCH_BLOCKS * PAGE).tolist(),
            "block_size": PAGE,
            "medium": "GPU",
        }
        removed = {"type": "BlockRemoved", "block_hashes": stored["block_hashes"]}
        payload = msgspec.msgpack.encode([0.0, [stored], 0])
        timed("decode 64 blocks", lambda p=payload: decode(p))
        (event,) = decode(payload)
        timed(STORE, lambda e=event, h=holder: apply(tree, h, e))
        (event,) = decode(msgspec.msgpack.encode([0.0, [removed], 0]))
        timed(REMOVE, lambda e=event, h=holder: apply(tree, h, e))
        body = {"input_ids": prompts[repeat % args.instances]}
        prompt = read_prompt("/generate", body, None)
        keys = scheduler.keys(prompt)
        timed("keys of 4,096 tokens", lambda k=keys: k.at(PAGE))
        choices: list[Choice | None] = []
        timed(
            "decision, all of it",
            lambda p=prompt, found=choices: found.append(
                scheduler.choose(p, scheduler.keys(p), COLOCATED, session="s")
            ),
        )
        timed("lookup of 4,096 tokens", lambda k=keys: tree.find(k.at(PAGE)))
        assert choices[0] is not None
        instance = choices[0].instance
        timed(
            "assumption of 4,096", lambda i=instance, k=keys: scheduler.assume(i, k, 9)
        )
        ticket = instance.open(0.0, prompt.num_tokens)
        if repeat % 8:
            instance.close(ticket)
    num_claims = args.instances * args.pages
    results: dict[str, object] = {"instances": args.instances, "claims": num_claims}
    results["bytes_per_claim"] = round(num_bytes / num_claims, 1)
    for name, samples in times_ns.items():
        p50, p99 = np.percentile(samples, [50, 99]) / 1e3
        print(f"{name:24s} p50 {p50:9.1f} us   p99 {p99:9.1f} us")
        results[name] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
    per_batch_ns = sum(
        float(np.mean(times_ns[name])) for name in ("decode 64 blocks", STORE, REMOVE)
    )
    # A page that comes and goes is two events of one block each.
    results["block_events_per_s"] = round(2 * BATCH_BLOCKS / per_batch_ns * 1e9)
    results["claim_sets"] = tree.num_claim_sets
    print(
        f"{results['bytes_per_claim']} bytes per page and holder, "
        f"{results['block_events_per_s']} block events/s"
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
