"""Plays a workload on tiers that the factory built; prints JSON.

    thread_program.py FOLDER

Told is which calls that may wait for a disk the scheduler's thread made: once it
serves, there are to be none.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Build, play, tell."""
    import runtime_program

    from sgl_tiered.core.ids import TierId
    from sgl_tiered.engines.sglang.factory import _build_runtime
    from sgl_tiered.serving.option_reader import read_options
    from sgl_tiered.serving.prometheus import PrometheusSink
    from tests.unit.engines.scheduler_thread_support import Scheduler, ThreadGuard

    settings = {
        "config": None,
        "host_size": str(16 * 8192),
        "disk_path": sys.argv[1],
        "disk_size": str(48 * 9000),
        "write_policy": "write-through",
        "load_policy": "always",
        "prefetch": "car",
        # What is asked for again was written once only; chance would fill the disk.
        "disk_admission": "all",
        "log_interval": 0.001,
    }
    runtime = _build_runtime(runtime_program.context(), read_options(settings))
    runtime.publish = PrometheusSink(runtime.page_tokens).publish
    scheduler = Scheduler(runtime)
    stats = runtime.cache.stats

    def is_warm() -> Any:
        stats = runtime.cache.stats
        return stats.pages_evicted[TierId.DISK] and stats.pages_loaded[TierId.DISK]

    scheduler.run(lambda: scheduler.until(is_warm), 120.0)
    with ThreadGuard() as guard:

        def work() -> bool:
            guard.watch_this_thread()
            scheduler.steps(200)
            runtime.drop(TierId.DISK)
            scheduler.steps(20)
            scheduler.let_go()
            runtime.drain_device()
            runtime.pump()
            runtime.reset()
            return scheduler.steps(20)

        scheduler.run(work, 120.0)
    stats = runtime.cache.stats
    runtime.close(runtime.pump)
    told = {
        "seen": guard.seen,
        "stored": stats.pages_stored[TierId.DISK],
        "loaded": stats.pages_loaded[TierId.DISK],
        "evicted": stats.pages_evicted[TierId.DISK],
    }
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
