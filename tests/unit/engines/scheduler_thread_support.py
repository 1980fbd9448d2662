"""A runtime over a host tier and a real disk tier, and a scheduler's thread for it.

``steps`` is what a scheduler does with it, again and again: prompts are offloaded,
looked for, loaded; ends are taken; counters and state are asked for.
"""

import builtins
import os
import shutil
import sys
import threading
import traceback
from contextlib import ExitStack
from unittest import mock

import numpy as np

from sgl_tiered.cache.config import CacheConfig, TierConfig
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.engines.sglang.runtime import Parts, TieredRuntime
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.demote import DemoteWorker
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.pipelines.promote import PromoteWorker
from sgl_tiered.pipelines.staging import StagingReader
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Observe, Options
from sgl_tiered.serving.weights import WeightsIdentity
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.testing.fakes import FakeDevicePool
from sgl_tiered.tiers.disk import DiskTier
from sgl_tiered.tiers.host import HostTier
from tests.unit.engines.weights_support import FakeWeights

LAYOUT = PageLayout(num_layers=3, page_tokens=2, token_bytes=96)
HOST_SLOTS = 16
DISK_SLOTS = 48
PROMPT_PAGES = 4
DEVICE_PAGES = 32
PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


def prompt(number, page_tokens):
    """Return the tokens of a prompt of ``PROMPT_PAGES`` pages and one token more."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 1000, PROMPT_PAGES * page_tokens + 1).astype(np.int32)


def open_disk(folder, *, fingerprint="model", calls=None, slow_io_s=1e6):
    """Open the disk tier in a folder, probed without a rest."""
    return DiskTier.open(
        folder,
        slot_bytes=LAYOUT.slot_bytes,
        page_bytes=LAYOUT.page_bytes,
        page_tokens=LAYOUT.page_tokens,
        max_bytes=(DISK_SLOTS + 2) * LAYOUT.slot_bytes,
        slab_bytes=8 * LAYOUT.slot_bytes,
        fingerprint=fingerprint,
        io="threads",
        num_threads=2,
        calls=calls,
        slow_io_s=slow_io_s,
        rest_s=0.0,
    )


def make_runtime(folder, calls=None, *, slow_io_s=1e6, emulator=None):
    """Return a runtime whose disk lies in a folder; its weights are changed at will."""
    disk = open_disk(folder, calls=calls, slow_io_s=slow_io_s)
    emulator = emulator or Emulator()
    host = emulator.wrap(HostTier(LAYOUT.slot_bytes, HOST_SLOTS))
    pool = FakeDevicePool(LAYOUT, DEVICE_PAGES)
    pool.fill(np.random.default_rng(3))
    clock, metrics, completions = SystemClock(), MetricsRegistry(), CompletionQueue()
    weights = FakeWeights()
    tiers = (TierId.HOST, TierId.DISK)
    cost = CostModel(
        PrefillCost(1000, 3, 64, 1e9), {tier: LinkCost(1e-4, 1e9) for tier in tiers}
    )
    cache = TieredCache(
        CacheConfig(
            layout=LAYOUT,
            tiers=(TierConfig(TierId.HOST, HOST_SLOTS), TierConfig(TierId.DISK, 40)),
            load_policy="always",
            demote_rest_s=0.0,
        ),
        cost=cost,
        eviction={tier: LRUPolicy() for tier in tiers},
        clock=clock,
    )
    work = (completions, clock, metrics)
    runtime = TieredRuntime(
        Parts(
            config=Options(observe=Observe(1e-9)),
            namespace=Namespace("model", "bfloat16", LAYOUT.page_tokens),
            weights=WeightsIdentity(weights.begin, Agreement(clock), metrics),
            clock=clock,
            cost=cost,
            cache=cache,
            device=pool,
            host=host,
            cxl=None,
            disk=disk,
            emulator=emulator,
            metrics=metrics,
            completions=completions,
            loader=LayerwiseLoader(pool, *work),
            offloader=OffloadWorker(pool, host, *work),
            demoters={tiers: DemoteWorker(host, disk, *work)},
            stager=StagingReader(disk, 16, *work),
            promoter=PromoteWorker(disk, host, *work, part_pages=2),
            lookahead=None,
            deferred=None,
            probe={},
            served={},
        ),
        wait_whole=False,
    )
    runtime.fake_weights = weights
    for breaker in runtime._breakers.values():
        breaker._rest_s = 0.0
    return runtime


class Scheduler:
    """Makes steps with a runtime, each on the one thread that is the scheduler's.

    Args:
        runtime: closed by its owner.
        first: number of the first prompt.
    """

    def __init__(self, runtime, first=0):
        self.runtime = runtime
        self.num_steps = first
        self._asking = None

    def run(self, work, patience_s=PATIENCE_S):
        """Run work on the scheduler's thread; return what it returned, within patience.

        Returns None where it has not ended: then it is waiting for somebody.
        """
        done = []

        def main():
            try:
                done.append(work())
            except BaseException:  # noqa: BLE001 - told to the test
                done.append(traceback.format_exc())

        thread = threading.Thread(target=main, name="scheduler", daemon=True)
        thread.start()
        thread.join(patience_s)
        assert done, "the scheduler's thread is held up"
        assert not isinstance(done[0], str), done[0]
        return done[0]

    def steps(self, count):
        """Make so many steps; return True."""
        for _ in range(count):
            self.step()
        return True

    def until(self, condition):
        """Make steps until a condition holds; return True."""
        while not condition():
            self.step()
            # As long as a forward takes; what ends meanwhile ends the wait.
            self.runtime.completions.wait(0.001)
        return True

    def step(self):
        """Serve a prompt that is new and one that was seen before."""
        runtime, number = self.runtime, self.num_steps
        self.num_steps += 1
        pages = np.arange(PROMPT_PAGES, dtype=np.int64) + number % 4 * PROMPT_PAGES
        self._offload(prompt(number, runtime.page_tokens), pages)
        runtime.pump()
        runtime.between_passes()
        self._look(number, max(0, number - 8))
        if number % 8 == 7:
            runtime.metrics_snapshot()
            runtime.stats()

    def _offload(self, tokens, pages):
        runtime = self.runtime
        digest = runtime.namespace(None, None)
        plan = runtime.cache.plan_offload(digest, tokens)
        if plan is not None:
            runtime.offload(plan, pages[plan.positions])

    def _look(self, number, wanted):
        """Ask for a prompt, load what is there, check it, and forget the request."""
        runtime = self.runtime
        coordinator = runtime.coordinator
        if self._asking is None:
            rid, digest = f"r{number}", runtime.namespace(None, None)
            tokens = prompt(wanted, runtime.page_tokens)
            state = coordinator.track(rid, digest, tokens, PROMPT_PAGES)
            self._asking = (rid, state, wanted)
        rid, state, wanted = self._asking
        ready = coordinator.prepare(state, 0)
        runtime.note_wait(rid, waiting=not ready)
        if not ready:
            return
        num_pages = coordinator.loadable_pages(state, 0)
        target = np.arange(16, 16 + num_pages, dtype=np.int64)
        job = coordinator.begin(state, target) if num_pages else None
        if job is not None:
            ticket = runtime.loader.submit([job])
            landed = runtime.transfers.landed(ticket)
            coordinator.settle(state, landed=landed)
            # A pool of SGLang's cannot be looked into so.
            look = getattr(runtime.parts.device, "page", None)
            for page in range(num_pages if landed and look else 0):
                source = wanted % 4 * PROMPT_PAGES + page
                assert np.array_equal(look(16 + page), look(source))
        runtime.forget_request(rid)
        self._asking = None

    def begin_load(self, wanted):
        """Begin to load a prompt that is in memory, and do not wait for it."""
        runtime = self.runtime
        coordinator, digest = runtime.coordinator, runtime.namespace(None, None)
        tokens = prompt(wanted, runtime.page_tokens)
        state = coordinator.track("begun", digest, tokens, PROMPT_PAGES)
        while not coordinator.prepare(state, 0):
            runtime.completions.wait(0.001)
            runtime.pump()
        target = np.arange(16, 16 + coordinator.loadable_pages(state, 0))
        return runtime.loader.submit([coordinator.begin(state, target)])

    def let_go(self):
        """Forget the request that is asked for, and end what runs for it."""
        self._asking = None
        self.runtime.coordinator.release_all()


BLOCKING = """
    access chmod close fdatasync fstat fsync ftruncate link listdir lseek lstat mkdir
    open posix_fallocate pread preadv pwrite pwritev read readlink remove rename replace
    rmdir scandir sendfile stat statvfs sync symlink truncate unlink utime write writev
"""


class ThreadGuard:
    """Notes calls on one thread that may wait for a disk, while it is entered.

    Attributes:
        seen: names of the calls, and the frames of ours that made them.
    """

    def __init__(self):
        self.seen = []
        self._stack = ExitStack()
        self._thread = None

    def __enter__(self):
        for name in BLOCKING.split():
            self._watch(os, name)
        self._watch(builtins, "open")
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def watch_this_thread(self):
        """Note what the calling thread does from now on."""
        self._thread = threading.get_ident()

    def _watch(self, module, name):
        real = getattr(module, name)

        def watched(*args, **kwargs):
            if threading.get_ident() == self._thread:
                self.seen.append(f"{name} by {' < '.join(our_frames())}")
            return real(*args, **kwargs)

        self._stack.enter_context(mock.patch.object(module, name, watched))


def our_frames():
    """Return where in the product the caller is, innermost first; reads no file."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        _, inside, file = frame.f_code.co_filename.rpartition("sgl_tiered/")
        if inside:
            found.append(f"{file}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


def replace_by_a_copy(folder):
    """Put a copy in the place of a folder, as a disk that went and came back."""
    copy = folder.with_name(folder.name + "-copy")
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    copy.rename(folder)
