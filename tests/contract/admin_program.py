"""Makes SGLang's admin calls on our cache, and prints what came of them.

    admin_program.py

Once with each of SGLang's tree cores, without a server: the methods are SGLang's, with
our hooks on them, called for a scheduler that consists of what they read. Copies from
the device are held up, so that calls come while one runs. The last line is one JSON
object.
"""

from __future__ import annotations

import json
import tempfile
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from limits_program import NUM_PAGES, PAGE, PATIENCE_S, Bench

TOKENS = np.arange(PAGE * NUM_PAGES, dtype=np.int32)


def hold_offloads(
    bench: Bench, is_held: threading.Event | None = None
) -> threading.Event:
    """Hold the copies of pages up until the event that is returned is set.

    The other one is set when the first is held.
    """
    may_go = threading.Event()
    device = bench.runtime.parts.device
    store = device.store_pages

    def held(*args: Any, **kwargs: Any) -> Any:
        if is_held is not None:
            is_held.set()
        assert may_go.wait(PATIENCE_S)
        return store(*args, **kwargs)

    device.store_pages = held
    return may_go


def scheduler_of(bench: Bench) -> Any:
    """Return a scheduler as the methods below see it, with nothing to do."""
    return SimpleNamespace(
        tree_cache=bench.tree,
        enable_hierarchical_cache=False,
        enable_lmcache=True,
        idle_sleeper=None,
    )


def is_idle(bench: Bench) -> bool:
    """Say what the cache adds to SGLang's ``is_fully_idle``."""
    return not bench.tree.has_pending_cache_operations()


def cleared_while_offloading(backend: str) -> dict[str, Any]:
    """Clear the storage while a copy runs; then start anew on the folder."""
    from sglang.srt.managers.scheduler import Scheduler

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(backend, Path(folder))
        bench.keep_on_disk(TOKENS)
        used = bench.used("disk")
        may_go = hold_offloads(bench)
        bench.offload(TOKENS + 1)
        answer = Scheduler.clear_hicache_storage_wrapped(scheduler_of(bench), None)
        out = {
            "used_before": used,
            "success": answer.success,
            "used": bench.used("disk"),
        }
        may_go.set()
        bench.settle()
        out["idle"] = is_idle(bench)
        out["locked"] = int(bench.tree.protected_size())
        out["kept"] = bench.used("host")
        bench.tree.clear_storage_backend()
        bench.close()
        again = Bench(backend, Path(folder))
        out["adopted"] = again.used("disk")
        again.close()
    return out


def dropped_while_offloading(backend: str) -> dict[str, Any]:
    """Drop the disk while a copy runs that ends meanwhile; then start anew."""
    from sgl_tiered.core.ids import TierId

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(backend, Path(folder))
        bench.keep_on_disk(TOKENS)
        may_go = hold_offloads(bench)
        bench.offload(TOKENS + 1)
        threading.Timer(0.05, may_go.set).start()
        bench.tree.drop(TierId.DISK)
        out = {"idle": is_idle(bench), "locked": int(bench.tree.protected_size())}
        bench.settle()
        bench.tree.drop(TierId.DISK)
        bench.close()
        again = Bench(backend, Path(folder))
        out["adopted"] = again.used("disk")
        again.close()
    return out


def forgotten_while_the_disk_is_held(backend: str) -> dict[str, Any]:
    """Clear, drop and flush while a write of the disk hangs; what was held is gone."""
    from sglang.srt.managers.scheduler import Scheduler

    from sgl_tiered.core.ids import TierId
    from sgl_tiered.engines.sglang import runtime as runtime_module

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(backend, Path(folder))
        bench.keep_on_disk(TOKENS)
        may_go, is_held = threading.Event(), threading.Event()
        disk = bench.runtime.parts.disk
        store = disk.store

        def held(*args: Any, **kwargs: Any) -> Any:
            is_held.set()
            assert may_go.wait(2 * PATIENCE_S)
            return store(*args, **kwargs)

        disk.store = held
        bench.offload(TOKENS + 1)
        bench.runtime.drain_device()
        bench.tree.check_hicache_events()
        assert is_held.wait(PATIENCE_S)
        # Whoever waits for the disk, in bounded time or not, waits for the rescuer.
        patience_s = runtime_module._DRAIN_TIMEOUT_S
        runtime_module._DRAIN_TIMEOUT_S = 1e6
        rescuer = threading.Timer(PATIENCE_S, may_go.set)
        rescuer.start()
        Scheduler.clear_hicache_storage_wrapped(scheduler_of(bench), None)
        bench.tree.check_hicache_events()
        bench.tree.drop(TierId.HOST)
        bench.tree.drop(TierId.DISK)
        bench.tree.leave_device()
        bench.tree.check_hicache_events()
        bench.tree.reset()
        bench.allocator.clear()
        out = {"used_while_held": bench.used("disk")}
        bench.offload(TOKENS + 2)
        bench.runtime.drain_device()
        bench.tree.check_hicache_events()
        out["kept_while_held"] = bench.used("host")
        out["is_held"] = not may_go.is_set()
        rescuer.cancel()
        may_go.set()
        runtime_module._DRAIN_TIMEOUT_S = patience_s
        bench.settle()
        bench.runtime.cache.check()
        out["used"], out["kept"] = bench.used("disk"), bench.used("host")
        bench.close()
        again = Bench(backend, Path(folder))
        out["adopted"] = again.used("disk")
        again.close()
    return out


def cleared_without_a_disk(backend: str) -> dict[str, Any]:
    """Clear the storage of a server that has none."""
    from sglang.srt.managers.scheduler import Scheduler

    bench = Bench(backend, None)
    answer = Scheduler.clear_hicache_storage_wrapped(scheduler_of(bench), None)
    counters = bench.runtime.metrics_snapshot()["counters"]
    bench.close()
    return {
        "success": answer.success,
        "refused": int(counters.get("refused_storage_clear", 0)),
    }


def released_while_offloading(backend: str) -> dict[str, Any]:
    """Give the device's memory back while a copy runs."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    bench = Bench(backend, None)
    seen = {}

    class Saver:
        """Notes whether a copy still runs when the memory is taken away."""

        def pause(self, tag: str) -> None:
            seen["running"] = len(bench.tree._locks)

        def resume(self, tag: str) -> None:
            seen["resumed"] = tag

    scheduler = scheduler_of(bench)
    scheduler._engine_paused, scheduler.disaggregation_mode = False, None
    manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    manager.scheduler = scheduler
    manager.is_fully_idle = lambda **asked: is_idle(bench)
    manager.flush_cache = bench.tree.reset
    manager.memory_saver_adapter, manager.offload_tags = Saver(), set()
    # Without an accelerator SGLang waits for a CUDA device here, and finds none.
    device_module, torch.get_device_module = torch.get_device_module, lambda: torch.cpu
    may_go = hold_offloads(bench)
    bench.offload(TOKENS)
    threading.Timer(0.05, may_go.set).start()
    asked = SimpleNamespace(tags=["kv_cache"])
    try:
        manager.release_memory_occupation(asked)
    finally:
        torch.get_device_module = device_module
    manager.resume_memory_occupation(asked)
    bench.allocator.clear()
    bench.offload(TOKENS)
    bench.settle()
    out = {**seen, "kept": bench.used("host")}
    bench.close()
    return out


def released_under_a_store_given_up(backend: str) -> dict[str, Any]:
    """Give the device's memory back under a copy that was given up; flush there."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    bench = Bench(backend, None)
    asked_s: list[float | None] = []
    offloader = bench.runtime.parts.offloader
    drain, offloader.stuck_s = offloader.drain, lambda: 1e6

    def noted(timeout_s: float | None = None) -> bool:
        asked_s.append(timeout_s)
        return drain(timeout_s)

    offloader.drain = noted
    taken: list[str] = []
    scheduler = scheduler_of(bench)
    scheduler._engine_paused, scheduler.disaggregation_mode = False, None
    manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    manager.scheduler = scheduler
    manager.is_fully_idle = lambda **asked: is_idle(bench)
    manager.flush_cache = bench.tree.reset
    manager.memory_saver_adapter = SimpleNamespace(
        pause=taken.append, resume=lambda tag: taken.append(f"{tag} again")
    )
    manager.offload_tags = set()
    device_module, torch.get_device_module = torch.get_device_module, lambda: torch.cpu
    may_go = hold_offloads(bench, is_held := threading.Event())
    bench.offload(TOKENS)
    assert is_held.wait(PATIENCE_S)
    bench.tree.take_ends()
    offloader.stuck_s = lambda: 0.0
    out: dict[str, Any] = {"idle": is_idle(bench)}
    asked = SimpleNamespace(tags=["kv_cache"])
    try:
        manager.release_memory_occupation(asked)
        manager.resume_memory_occupation(asked)
        out["taken_under_it"] = list(taken)
        bench.tree.finish_offloads()
        bench.tree.reset()
        out["drains"] = len(asked_s)
        may_go.set()
        bench.settle()
        manager.release_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
        manager.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]))
        out["taken"] = taken
    finally:
        may_go.set()
        torch.get_device_module = device_module
    counters = bench.runtime.metrics_snapshot()["counters"]
    out["refused"] = int(counters.get("refused_memory_release", 0))
    bench.close()
    return out


def paused_while_offloading(backend: str) -> dict[str, Any]:
    """Turn SGLang's loop over while generation is paused and a copy ends."""
    from sglang.srt.managers.scheduler import Scheduler

    bench = Bench(backend, None)
    bench.offload(TOKENS)
    bench.runtime.drain_offloads()
    # As with several ranks, who only take ends together.
    bench.tree.has_pending_cache_operations = lambda: bool(bench.tree._locks)
    scheduler = scheduler_of(bench)
    scheduler.is_fully_idle = lambda: is_idle(bench)
    told: list[bool] = []
    scheduler.metrics_reporter = SimpleNamespace(
        record_scheduler_idle=lambda: told.append(True),
        record_scheduler_active=lambda at_ns: told.append(False),
    )
    Scheduler._record_scheduler_state_for_paused_engine(scheduler)
    bench.close()
    return {"told_idle": told}


def slept_while_demoting(backend: str) -> dict[str, Any]:
    """Let an idle server sleep while it writes, forgets pages, and afterwards."""
    from sglang.srt.managers.scheduler import Scheduler

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(backend, Path(folder))
        disk = bench.runtime.parts.disk
        may_go, store = threading.Event(), disk.store

        def held(io: Any) -> Any:
            assert may_go.wait(PATIENCE_S)
            return store(io)

        disk.store = held
        bench.offload(TOKENS)
        bench.tree.finish_offloads()
        naps: list[str] = []
        scheduler = scheduler_of(bench)
        scheduler.idle_sleeper = SimpleNamespace(
            maybe_sleep=lambda: naps.append("slept")
        )
        Scheduler.maybe_sleep_on_idle(scheduler)
        while_writing = len(naps)
        may_go.set()
        bench.settle()
        Scheduler.maybe_sleep_on_idle(scheduler)
        out = {
            "while_writing": while_writing,
            "afterwards": len(naps),
            "used": bench.used("disk"),
        }
        bench.runtime.cache._store.removal.max_pages = 1
        bench.tree.clear_storage_backend()
        Scheduler.maybe_sleep_on_idle(scheduler)
        out["while_giving_back"] = len(naps)
        bench.settle()
        Scheduler.maybe_sleep_on_idle(scheduler)
        out["at_the_end"], out["left"] = len(naps), bench.used("disk")
        bench.close()
    return out


def beams(backend: str) -> dict[str, Any]:
    """Ask for a beam search."""
    from sglang.srt.beam_search.coordinator import BeamCoordinator

    bench = Bench(backend, None)
    asked = SimpleNamespace(tree_cache=bench.tree)
    said = BeamCoordinator.validate_and_init(asked, None, None)
    counters = bench.runtime.metrics_snapshot()["counters"]
    bench.close()
    return {"said": said, "refused": int(counters.get("refused_beam_search", 0))}


def story(backend: str) -> dict[str, Any]:
    """Make each call."""
    bench = Bench(backend, None)
    out: dict[str, Any] = {"core": type(bench.tree.tree_core).__name__}
    bench.close()
    calls = (
        cleared_while_offloading,
        dropped_while_offloading,
        forgotten_while_the_disk_is_held,
        cleared_without_a_disk,
        released_while_offloading,
        released_under_a_store_given_up,
        paused_while_offloading,
        slept_while_demoting,
        beams,
    )
    for call in calls:
        try:
            out[call.__name__] = call(backend)
        except (AssertionError, LookupError, RuntimeError, ValueError) as error:
            out[call.__name__] = {"ended_by": f"{type(error).__name__}: {error}"}
    return out


def main() -> None:
    """Hook SGLang as the plugin does, and print one line of JSON."""
    warnings.simplefilter("ignore")
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sgl_tiered.engines.sglang.reporting import scheduler_hooks

    for target, hook, kind in scheduler_hooks():
        HookRegistry.register(target, hook, kind)
    HookRegistry.apply_hooks()
    print("\n" + json.dumps({core: story(core) for core in ("rust", "python")}))


if __name__ == "__main__":
    main()
