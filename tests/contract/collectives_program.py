"""One of two ranks over gloo: what the hooks around SGLang's collectives see.

    collectives_program.py RANK FOLDER

Rank 0's all-reduce is in flight until rank 1 comes to it, and rank 1 comes only once
rank 0's swap has asked the guard: at first a thread that asks as a mover does, then a
mover that has layers to copy. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from datetime import timedelta

warnings.simplefilter("ignore")

PATIENCE_S = 120.0


def main() -> None:
    rank, folder = int(sys.argv[1]), sys.argv[2]
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.core.clock import SystemClock
    from sgl_tiered.engines.sglang.layered import collectives

    hooks = collectives.collective_hooks()
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    missing = [target for target, _, _ in hooks if target not in HookRegistry._patched]
    parallel_state.init_distributed_environment(
        world_size=2,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"file://{folder}/ranks",
        backend="gloo",
    )
    group = parallel_state.get_world_group()
    store = torch.distributed.FileStore(f"{folder}/turns", 2)
    store.set_timeout(timedelta(seconds=PATIENCE_S))
    clock = SystemClock()
    watch = collectives.make_watch("cpu", clock)
    unwatched = group.all_reduce(torch.ones(1000)).sum().item()
    collectives.watch_collectives(watch)
    guard = collectives.ContentionGuard(watch, clock, max_wait_s=PATIENCE_S)
    sums, seen = [], {}
    for turn in range(3):
        if rank == 1:
            store.wait([f"go{turn}"])
            sums.append(group.all_reduce(torch.full((1000,), 2.0)).sum().item())
            continue
        swap = threading.Thread(target=_swap, args=(watch, guard, store, turn, seen))
        swap.start()
        sums.append(group.all_reduce(torch.full((1000,), 1.0)).sum().item())
        swap.join(PATIENCE_S)
    moved: dict[str, object] = {}
    if rank == 1:
        store.wait(["copy"])
        sums.append(group.all_reduce(torch.full((1000,), 2.0)).sum().item())
    else:
        swap = threading.Thread(target=_copy, args=(watch, guard, store, moved))
        swap.start()
        sums.append(group.all_reduce(torch.full((1000,), 1.0)).sum().item())
        swap.join(PATIENCE_S)
    gathered = group.all_gather(torch.full((4,), float(rank)), dim=0).tolist()
    done = {
        "missing": missing,
        "unwatched": unwatched,
        "sums": sums,
        "gathered": gathered,
        "num_seen": watch.num_seen,
        "in_flight": watch.in_flight_s(),
        "usual_s": watch._book.usual_s(4000),
        "num_waits": guard.num_waits,
        "seen": seen,
        "moved": moved,
    }
    print(json.dumps(done), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _swap(watch, guard, store, turn, seen) -> None:
    """Ask as a mover does, while the collective waits for the other rank."""
    stop = threading.Event()
    while watch.in_flight_s() is None:
        stop.wait(1e-4)
    seen[f"delay{turn}"] = guard.delay_s(0.0)
    released = threading.Event()

    def release() -> None:
        released.set()
        store.set(f"go{turn}", "1")

    timer = threading.Timer(0.05, release)
    timer.start()
    seen[f"went{turn}"] = guard.wait(stop)
    seen[f"after{turn}"] = released.is_set()


def _copy(watch, guard, store, moved) -> None:
    """Let a mover copy two sub-units of a layer while the collective is in flight."""
    import numpy as np

    from sgl_tiered.layered.binding import LayerBinding
    from sgl_tiered.layered.mover import LayerMover
    from sgl_tiered.testing.fake_layers import FakeLayerCopier

    copier = FakeLayerCopier(1, 4, 4, 2)
    copier.device[:] = np.arange(8).reshape(4, 2)
    binding = LayerBinding(1, 4, 4)
    pages = np.arange(4)
    binding.bind(0, pages)
    binding.written(0, pages)
    mover = LayerMover(copier, 16, guard=guard, sub_unit_pages=2)
    while watch.in_flight_s() is None:
        threading.Event().wait(1e-4)
    mover.start(binding.depart(0, pages, is_up=False))
    threading.Event().wait(0.05)
    moved["during"] = len(copier.copies)
    store.set("copy", "1")
    mover.wait()
    (landing,) = mover.collect()
    moved["ok"] = landing.ok.tolist()
    moved["copies"] = len(copier.copies)
    moved["asked"] = guard.num_asked
    mover.close()


if __name__ == "__main__":
    main()
