"""Layer-wise KV on a device with streams: every read sees the bytes that were written.

The manager and mover of ``layered/`` over the copier of ``pipelines/stream_layers.py``,
on a device that runs what is queued in any order that its streams allow.
"""

import threading

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.layered.base import PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.pipelines.contention import ContentionGuard, QueuedCollectives
from sgl_tiered.pipelines.stream_layers import StreamLayerCopier
from sgl_tiered.testing.fake_streams import FakeDevice, FakeEvent, FakeLayerOps
from tests.unit.pipelines.pipeline_support import LAYOUT, PATIENCE_S, SLOT

NUM_LAYERS, WIDTH, PAGE = LAYOUT.num_layers, LAYOUT.layer_page_bytes, LAYOUT.page_tokens
HALF, NUM_PAGES, NUM_REQUESTS = 4, 24, 3
NUM_PHYSICAL = 2 * HALF + NUM_REQUESTS * HALF * NUM_LAYERS
SEEDS = st.integers(0, 2**32 - 1)


class Server:
    """Requests that grow, with what each layer of their pages has to hold."""

    def __init__(self, seed, *, pinned=True, guarded=False, marks=True):
        self.rng = np.random.default_rng(seed)
        self.device = FakeDevice(np.random.default_rng(seed + 1))
        self.ops = FakeLayerOps(self.device, LAYOUT, NUM_PHYSICAL + 1)
        region = np.zeros((NUM_PAGES, SLOT), np.uint8)
        if not pinned:
            self.ops.unpinned.append(region)
        self.copier = StreamLayerCopier(self.ops, region, ahead=not guarded)
        if not marks:
            self.copier.mark = list
        self.watch = QueuedCollectives(
            lambda: FakeEvent(self.device), lambda: self.device.engine
        )
        clock = SystemClock()
        guard = ContentionGuard(self.watch, clock, max_wait_s=1e-3)
        self.mover = LayerMover(
            self.copier,
            WIDTH,
            clock,
            guard=guard if guarded else None,
            sub_unit_pages=2,
        )
        binding = LayerBinding(NUM_LAYERS, NUM_PAGES, NUM_PHYSICAL, first_physical=1)
        self.manager = LayerManager(binding, self.mover, PAGE, HALF, lazy=False)
        self.truth = np.zeros((NUM_LAYERS, NUM_PAGES, WIDTH), np.uint8)
        self.free = list(range(1, NUM_PAGES))
        self.lens = dict.fromkeys(range(NUM_REQUESTS), 0)
        self.pages = {key: [] for key in self.lens}
        self.num_reads = self.num_wrong = self.num_groups = self.num_units = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.device.settle()
        self.mover.close()
        self.copier.close()

    def forward(self):
        """Run all requests, each with new tokens; one that is long starts anew."""
        batch, written = [], []
        for key in self.lens:
            if self.lens[key] > (HALF - 1) * PAGE:
                self.manager.finished(key)
                self.manager.freed(np.array(self.pages[key]))
                self.free += self.pages[key]
                self.pages[key], self.lens[key] = [], 0
            context, new = self.lens[key], int(self.rng.integers(1, PAGE + 1))
            retained = self.rng.random(NUM_LAYERS) < 0.3 if not context else None
            while len(self.pages[key]) * PAGE < context + new:
                self.pages[key].append(self.free.pop(0))
            self.lens[key] += new
            written += self.pages[key][context // PAGE :]
            pages = np.array(self.pages[key], np.int64)
            batch.append(PassRequest(key, pages, context, new, retained))
        plan = self.manager.begin_pass(batch)
        assert not plan.refused
        self.num_groups = max(self.num_groups, len(plan.groups))
        self.num_units += plan.num_units
        everything = np.concatenate([request.pages for request in batch])
        for layer in range(NUM_LAYERS):
            self.write(layer, np.array(written))
            for group, (first, last) in enumerate(plan.groups):
                self.manager.wait_unit(layer, group)
                own = slice(int(plan.indptr[first]), int(plan.indptr[last]))
                places = self.manager.table(layer)[own].copy()
                self.read(places, self.truth[layer, everything[own]].copy())
                self.manager.unit_done(layer, group)
            begun = self.watch.begin(1 << 20)
            self.device.engine.run(lambda: None, cost_ms=1.0)
            self.watch.end(begun)
        self.manager.end_pass()

    def write(self, layer, pages):
        places = self.manager.pages_for_write(layer, pages).copy()
        # All of a page anew: what a read sees is then told by one comparison.
        fresh = self.rng.integers(0, 256, (len(pages), WIDTH), np.uint8)
        self.truth[layer, pages] = fresh
        self.device.engine.run(lambda: self.ops.tensor.__setitem__(places, fresh))
        self.manager.layer_written(layer)

    def read(self, places, wanted):
        def kernel():
            self.num_reads += 1
            self.num_wrong += not np.array_equal(self.ops.tensor[places], wanted)

        self.device.engine.run(kernel)

    def settle(self):
        """Let every copy land, as happens between some forwards."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_S / 0.002)):
            self.manager.poll()
            if self.manager.is_idle:
                return
            pause.wait(0.002)
        raise AssertionError("a copy did not land")

    def run(self, num_forwards):
        for _ in range(num_forwards):
            self.forward()
            if self.rng.random() < 0.5:
                self.settle()
        self.device.settle()


@given(seed=SEEDS, pinned=st.booleans(), guarded=st.booleans())
@settings(max_examples=25)
def test_every_read_sees_what_was_written(seed, pinned, guarded):
    """Layers leave, are streamed through the halves and come back, in any order."""
    with Server(seed, pinned=pinned, guarded=guarded) as server:
        server.run(8)
        assert server.num_reads >= 8 * NUM_LAYERS
        assert server.num_wrong == 0


def test_the_runs_above_stream_and_split():
    """They would show nothing if all layers stayed on the device."""
    with Server(3) as server:
        for _ in range(12):
            server.forward()
            server.settle()
        assert server.num_units > NUM_LAYERS
        assert server.num_groups > 1
        assert server.num_wrong == 0


def test_copies_that_wait_for_no_mark_are_caught():
    """The negative control: some order of the device shows bytes of another time."""
    wrong = 0
    for seed in range(6):
        with Server(seed, marks=False) as server:
            server.run(8)
            wrong += server.num_wrong
    assert wrong > 0


def test_a_guarded_server_asked_for_each_sub_unit():
    """Collectives on the engine's stream hold swaps back, and all of them end."""
    with Server(5, guarded=True) as server:
        guard = server.mover._guard
        asked = []
        wait = guard.wait
        guard.wait = lambda stop: asked.append(1) or wait(stop)
        server.run(8)
        server.settle()
        assert len(asked) > NUM_LAYERS
        assert server.num_wrong == 0
