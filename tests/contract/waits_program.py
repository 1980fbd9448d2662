"""Counts what holds the scheduler's thread on each way of a page; prints JSON.

    waits_program.py STORY CORE FOLDER

SGLang's scheduler and the loop of its overlap schedule run in this process, over a CUDA
device that is played (``played_scheduler.py``): its tensors note what would wait for
them (``host_waits.py``), and it runs only while results are taken, so that whoever
waits for it elsewhere stands still. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from host_waits import HostWaits, on_device
from played_scheduler import PAGE, PlayedScheduler

warnings.simplefilter("ignore")

POOL_PAGES = 96
MOST_RUNNING = 4
FLAGS = (
    *("--max-total-tokens", str(POOL_PAGES * PAGE)),
    *("--max-running-requests", str(MOST_RUNNING)),
    *("--chunked-prefill-size", "256", "--schedule-policy", "lpm"),
    *("--tiered-host-size", "4MB", "--tiered-load-policy", "always"),
)


PLAIN = (
    *("--tiered-prefetch", "car", "--tiered-prefetch-to", "device"),
    # Longer than a turn.
    *("--tiered-emulate", "disk:latency=0.02"),
)
SPLIT = (
    *("--tiered-emulate", "disk:bandwidth=10MB"),
    *("--tiered-load-policy", "auto"),
)
AHEAD = ("--tiered-write-policy", "on-evict", "--tiered-offload-threshold", "0.5")
LAYERWISE = (
    *("--tiered-layerkv", "on", "--tiered-layerkv-host-size", "24MB"),
    *("--tiered-layerkv-staging-size", "327680", "--tiered-layerkv-retain", "0"),
    "--disable-overlap-schedule",
)
SPARSE = (
    *("--tiered-sparsity", "load", "--tiered-sparsity-keep", "0.5"),
    "--disable-overlap-schedule",
)


class Ways:
    """Runs requests on each way, one after the other, and labels what they wait for."""

    def __init__(
        self,
        core: str,
        folder: Path,
        *flags: str,
        disk: bool = True,
        **how: Any,
    ) -> None:
        words = [*FLAGS, *flags]
        if disk:
            words += ["--tiered-disk-path", str(folder), "--tiered-disk-size", "64MB"]
            words += ["--tiered-disk-admission", "all", "--tiered-disk-io", "threads"]
        self.waits = HostWaits().__enter__()
        self.server = PlayedScheduler(0, words, self.waits, core, **how)
        self.rng = np.random.default_rng(1)
        self.num_asked = 0
        self.told: dict[str, Any] = {}
        self._plays = how.get("plays", True)

    def prompt(self, num_tokens: int) -> list[int]:
        """Return tokens of chance."""
        found: list[int] = self.rng.integers(0, 500, num_tokens).tolist()
        return found

    def ask(self, prompt: list[int], most_new: int = 4, **facts: Any) -> Any:
        """Send a request."""
        self.num_asked += 1
        return self.server.ask(f"r{self.num_asked}", prompt, most_new, **facts)

    def run(
        self,
        path: str,
        prompts: list[list[int]],
        *,
        stops: bool = True,
        behind: int = 0,
        aborts: bool = False,
        **facts: Any,
    ) -> list[Any]:
        """Run requests until all have ended, on a way that has a name.

        Args:
            path: its name.
            prompts: of the requests.
            stops: whether the device runs while results are taken only.
            behind: tokens of others' answers, which they have to wait for.
            aborts: they are aborted once they wait, or their loads run.
            facts: of each request.
        """
        before = self.figures()
        is_stopped = stops and self._plays
        stopped = self.server.stopped() if is_stopped else contextlib.nullcontext()
        with self.waits.on(path), stopped:
            asked: list[Any] = []
            # They end one after the other, so that something always runs.
            lengths = [behind + 8 * n for n in range(MOST_RUNNING)] if behind else []
            ahead = [self.ask(self.prompt(20), length) for length in lengths]

            def is_full() -> bool:
                return all(len(one.tokens) > 1 for one in ahead)

            def go() -> None:
                asked.extend(self.ask(prompt, **facts) for prompt in prompts)

            def is_loading() -> bool:
                tree = self.server.tree
                is_fetching = tree.fetcher is not None and tree.fetcher.num_lent
                return bool(tree._passes or is_fetching)

            def leave() -> None:
                for one in asked:
                    self.server.abort(one.rid)

            self.server.run((is_full, go), *([(is_loading, leave)] if aborts else ()))
        self.server.settle()
        self.note(path, before, cached=[one.cached for one in asked])
        return asked

    def note(self, path: str, before: dict[str, int], **facts: Any) -> None:
        """Say what moved meanwhile."""
        after = self.figures()
        moved = {name: n - before.get(name, 0) for name, n in after.items()}
        self.told[path] = {**facts, **{k: n for k, n in moved.items() if n}}

    def figures(self) -> dict[str, int]:
        """Return counters: pages by edge, and what was fetched and promoted."""
        with self.waits.held():
            snapshot = self.server.runtime.metrics_snapshot()
        edges = {name: int(edge["pages"]) for name, edge in snapshot["edges"].items()}
        names = ("fetches", "fetched_pages", "fetches_cancelled", "promoted_pages")
        names += ("decisions_split",)
        counters = snapshot["counters"]
        found = {name: int(counters.get(name, 0)) for name in names}
        return {**edges, **found, "retracted": self.server.num_retracted}

    def end(self) -> dict[str, Any]:
        """Return everything, once nothing runs."""
        server, waits = self.server, self.waits
        server.settle()
        wrong = server.wrong() if self._plays else []
        finished = [one.finish for one in server.asked.values()]
        waits.__exit__()
        paths = list(self.told)

        def by_path(found: dict[str, Any]) -> dict[str, dict[str, int]]:
            return {path: dict(found.get(path, {})) for path in paths}

        told = {
            "core": type(server.tree.tree_core).__name__,
            "is_overlapped": server.engine.enable_overlap,
            "host_waits_on_scheduler": by_path(waits.ours),
            "in_sglang_for_ours": by_path(waits.through),
            "in_sglang": by_path(waits.sglang),
            "waits_for_threads": by_path(waits.threads),
            "pinned_allocations": by_path(waits.pinned),
            "held": server.held,
            "served": server.runtime.stats()["served"],
            "moved": self.told,
            "wrong": wrong,
            "ends": sorted({finish["type"] for finish in finished if finish}),
        }
        server.runtime.close(server.tree.take_ends)
        return told


def plain(core: str, folder: Path) -> dict[str, Any]:
    """Plain tiers, written through, with reads ahead of need."""
    ways = Ways(core, folder, *PLAIN)
    prompts = [ways.prompt(7 * PAGE + 3) for _ in range(4)]
    ways.run("offload", prompts)
    ways.server.drop("device")
    ways.run("hit from host", prompts)
    ways.server.drop("host", "device")
    ways.run("hit from disk", prompts)
    ways.server.drop("host", "device")
    ways.run("hit from disk beside a prefill", [ways.prompt(200), *prompts])
    ways.server.drop("device")
    ways.run("queue", [*prompts, *(ways.prompt(3 * PAGE) for _ in range(8)), *prompts])
    ways.server.drop("device")
    ways.run("chunks behind a hit", [prompts[0] + ways.prompt(30 * PAGE)])
    ways.run("eviction", [ways.prompt(15 * PAGE) for _ in range(12)])
    ways.server.drop("device")
    ways.server.retracts(True)
    ways.run("retraction", prompts, most_new=12)
    ways.server.retracts(False)
    ways.server.drop("host", "device")
    ways.run("prefetch to host", prompts, behind=40)
    ways.server.drop("device")
    ways.run("prefetch to device", prompts, stops=False, behind=40)
    ways.server.drop("device")
    ways.run("aborted while it loads", prompts, aborts=True)
    ways.server.drop("device")
    # The device comes to loads last, so that they are under way for long.
    ways.server.delays_loads = True
    ways.run("prefetch taken back", prompts, behind=12)
    ways.server.drop("device")
    ways.run("aborted while it is fetched", prompts, behind=12, aborts=True)
    ways.server.drop("device")
    ways.run("hit from host, late", prompts)
    return ways.end()


def ahead(core: str, folder: Path) -> dict[str, Any]:
    """Plain tiers, written to when the device is nearly full."""
    ways = Ways(core, folder, *AHEAD)
    prompts = [ways.prompt(15 * PAGE + 3) for _ in range(10)]
    ways.run("offload ahead", prompts)
    ways.run("hit from host", prompts[:3])
    return ways.end()


def split(core: str, folder: Path) -> dict[str, Any]:
    """Plain tiers: a prompt's front is computed while its back comes from the disk."""
    ways = Ways(core, folder, *SPLIT, link=(1e-3, 1e7))
    prompt = ways.prompt(40 * PAGE + 3)
    ways.run("offload", [prompt])
    ways.server.drop("host", "device")
    ways.run("split", [prompt])
    return ways.end()


def unpinned(core: str, folder: Path) -> dict[str, Any]:
    """Plain tiers whose memory CUDA has refused to pin."""
    ways = Ways(core, folder, disk=False)
    ways.server.played.pinned.clear()
    prompts = [ways.prompt(7 * PAGE + 3) for _ in range(4)]
    ways.run("offload", prompts)
    ways.server.drop("device")
    ways.run("hit from host", prompts)
    return ways.end()


def planted(core: str, folder: Path) -> dict[str, Any]:
    """Waits that are put in on purpose, one after the other."""
    from sgl_tiered.engines.sglang import cache

    module: Any = cache
    ways = Ways(core, folder, disk=False)
    prompts = [ways.prompt(7 * PAGE + 3) for _ in range(2)]
    ways.run("nothing", prompts)
    real = cache.page_numbers
    stream = ways.server.engine.forward_stream
    plants = {
        "cpu": lambda firsts: firsts.cpu(),
        "to": lambda firsts: firsts.to("cpu"),
        "item": lambda firsts: firsts[0].item(),
        "int": lambda firsts: int(firsts[0]),
        "tolist": lambda firsts: firsts.tolist(),
        "nonzero": lambda firsts: firsts.nonzero(),
        "masked": lambda firsts: firsts[firsts > 3],
        "unique": lambda firsts: torch.unique(firsts),
        "copy": lambda firsts: torch.empty(len(firsts)).copy_(firsts),
        "upload": lambda firsts: torch.tensor([1, 2], device=firsts.device),
        "host index": lambda firsts: firsts[torch.zeros(1, dtype=torch.int64)],
        "stream": lambda firsts: stream.synchronize(),
        "event": lambda firsts: stream.record_event().synchronize(),
        "device": lambda firsts: torch.cuda.synchronize(),
        "sleep": lambda firsts: time.sleep(0.001),
    }
    for name, plant in plants.items():

        def with_plant(device: Any, firsts: Any, page: int, plant: Any = plant) -> Any:
            plant(firsts)
            return real(device, firsts, page)

        module.page_numbers = with_plant
        ways.server.drop("device")
        ways.run(name, prompts, stops=False)
    module.page_numbers = real
    return ways.end()


def layerwise(core: str, folder: Path) -> dict[str, Any]:
    """Layers of KV placed singly, in the CPU platform's form."""
    ways = Ways(core, folder, *LAYERWISE, disk=False, plays=False)
    return placed(ways)


def sparse(core: str, folder: Path) -> dict[str, Any]:
    """KV kept in part, in the CPU platform's form."""
    ways = Ways(core, folder, *SPARSE, disk=False, plays=False)
    return placed(ways, lossy="allow")


def placed(ways: Ways, **facts: Any) -> dict[str, Any]:
    """Run what all forms have."""
    prompts = [ways.prompt(7 * PAGE + 3) for _ in range(4)]
    ways.run("offload", prompts, **facts)
    ways.server.drop("device")
    ways.run("hit from host", prompts, **facts)
    ways.run("eviction", [ways.prompt(15 * PAGE) for _ in range(12)], **facts)
    return ways.end()


def layerwise_cuda(core: str, folder: Path) -> dict[str, Any]:
    """The forwards of layer-wise KV on CUDA, without SGLang's scheduler.

    Pool, allocator, placing and attention are built as a CUDA server does, over the
    stand-ins of ``cuda_build_program.py``.
    """
    del core, folder
    import cuda_build_program
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.layered.cuda import cuda_hooks

    for target, hook, kind in cuda_hooks():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    with HostWaits() as waits:
        with waits.held():
            server = cuda_build_program.Server(0)
        server.allocator.free_pages = on_device(server.allocator.free_pages)
        rows = server.forwards.backend.req_to_token_pool
        rows.req_to_token = server.forwards.table = on_device(rows.req_to_token)
        pages_of = server.forwards.backend._pages_of

        def of_device(batch: Any, *lens: Any) -> Any:
            # What plays FlashInfer's kernels reads these on the host.
            rows = SimpleNamespace(req_pool_indices=on_device(batch.req_pool_indices))
            return pages_of(rows, *lens)

        server.forwards.backend._pages_of = of_device
        with waits.on("forward"):
            server.run()
        with waits.on("finish"):
            for rid in "abc":
                server.free(rid)
        server.end()
    return {
        "host_waits_on_scheduler": {path: dict(n) for path, n in waits.ours.items()},
        "waits_for_threads": {path: dict(n) for path, n in waits.threads.items()},
        "worst": dict(server.forwards.worst),
    }


STORIES = {
    story.__name__: story
    for story in (
        *(plain, ahead, split, unpinned, planted, layerwise, layerwise_cuda, sparse),
    )
}

if __name__ == "__main__":
    name, backend, folder = sys.argv[1:]
    told = STORIES[name](backend, Path(folder))
    print("\n" + json.dumps(told))
