"""Pages of activations on a device with streams: every read sees what was written.

The manager and mover of ``layered/`` over the copiers of ``pipelines/stream_layers.py``
and ``stream_acts.py``: captures, copies down, loads and rebuilds run in any order that
the streams allow.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.layered.base import ActPlan
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.pipelines.stream_acts import StreamActCopier
from sgl_tiered.pipelines.stream_layers import StreamLayerCopier
from sgl_tiered.testing.fake_streams import FakeActOps, FakeEvent
from tests.property.test_layers_on_streams import (
    HALF,
    LAYOUT,
    NUM_LAYERS,
    NUM_PAGES,
    NUM_PHYSICAL,
    PAGE,
    SLOT,
    WIDTH,
    Server,
)
from tests.unit.pipelines.test_stream_acts import kv_pages

ACTS = PageLayout(NUM_LAYERS, PAGE, LAYOUT.token_bytes // 2)
ACT_BYTES = ACTS.layer_page_bytes
PLAN = ActPlan(NUM_PAGES // 2, 60, HALF, 2, ACT_BYTES)
SEEDS = st.integers(0, 2**32 - 1)


class ActServer(Server):
    """The same requests; every other page is kept as activations."""

    def __init__(self, seed, *, pinned=True, guarded=False):
        super().__init__(seed, pinned=pinned, guarded=guarded)
        self.mover.close()
        self.copier.close()
        num_kv_rows = NUM_PAGES - PLAN.num_act_rows
        region = np.zeros((num_kv_rows, SLOT), np.uint8)
        act_region = np.zeros((PLAN.num_act_rows, ACTS.page_bytes), np.uint8)
        self.act_ops = FakeActOps(self.device, ACTS, PLAN.num_acts + 1, self.ops)
        if not pinned:
            self.ops.unpinned.append(region)
            self.act_ops.unpinned.append(act_region)
        self.copier = StreamLayerCopier(self.ops, region, ahead=not guarded)
        self.acts = StreamActCopier(
            self.act_ops, act_region, PLAN.num_acts + 1, ahead=not guarded
        )
        guard = self.mover._guard
        self.mover = LayerMover(
            self.copier,
            WIDTH,
            self.mover.clock,
            guard=guard,
            sub_unit_pages=2,
            acts=self.acts,
            act_page_bytes=ACT_BYTES,
        )
        binding = LayerBinding(
            NUM_LAYERS, NUM_PAGES, NUM_PHYSICAL, first_physical=1, acts=PLAN
        )
        self.manager = LayerManager(
            binding, self.mover, PAGE, HALF, lazy=False, choose=self.choose
        )

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.acts.close()

    @staticmethod
    def choose(num_act, num_kv, num_new):
        return (np.arange(num_new) + num_act + num_kv) % 2 == 0

    def write(self, layer, pages):
        acts = self.manager.acts_for_write(layer, pages).copy()
        places = self.manager.pages_for_write(layer, pages).copy()
        fresh = self.rng.integers(0, 256, (len(pages), WIDTH), np.uint8)
        is_act = acts >= 0
        kept = self.rng.integers(0, 256, (int(is_act.sum()), ACT_BYTES), np.uint8)
        index = {page: n for own in self.pages.values() for n, page in enumerate(own)}
        positions = np.array([index[page] * PAGE for page in pages.tolist()])
        fresh[is_act] = kv_pages(kept, layer, positions[is_act])
        self.truth[layer, pages] = fresh
        area = self.act_ops.tensor
        self.device.engine.run(lambda: area.__setitem__(acts[is_act], kept))
        self.device.engine.run(lambda: self.ops.tensor.__setitem__(places, fresh))
        self.manager.layer_written(layer)


@given(seed=SEEDS, pinned=st.booleans(), guarded=st.booleans())
@settings(max_examples=20)
def test_every_read_sees_what_was_written(seed, pinned, guarded):
    """Activations leave under the forward, and KV is made of them under the next."""
    with ActServer(seed, pinned=pinned, guarded=guarded) as server:
        server.run(8)
        assert server.num_reads >= 8 * NUM_LAYERS
        assert server.num_wrong == 0


def test_the_runs_above_rebuild():
    """And what it took is told, by the device's clock."""
    with ActServer(3) as server:
        manager, told = server.manager, []
        manager.on_measured = lambda *samples: told.append(samples)
        server.run(12)
        assert manager.num_rebuilt > 10
        assert manager.rebuild_s > 0.0
        assert 0.0 <= manager.rebuild_exposed_s <= manager.stall_s
        # What waited for a copy tells nothing, and on a busy machine much waits.
        for _ in range(20):
            if all(any(each) for each in zip(*told, strict=True)):
                break
            server.run(12)
        for number in range(2):
            found = [samples[number] for samples in told if samples[number]]
            assert found
            assert all(tokens >= PAGE and seconds > 0.0 for tokens, seconds in found)


def test_a_rebuild_that_does_not_wait_for_its_load_is_seen():
    """The negative control, through manager and mover."""

    def is_right(seed):
        with ActServer(seed) as server:
            pool = server.acts.copies.pool
            pool.loaded = lambda: FakeEvent(server.device)
            server.run(6)
            return server.num_wrong == 0

    assert not all(is_right(seed) for seed in range(12))
