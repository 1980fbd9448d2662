"""Tiers below a pool whose layers lie singly, with real bytes: KV and activations."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import OffloadPlan
from sgl_tiered.engines.device.act_transfers import ActTransfers
from sgl_tiered.engines.device.layer_copier import CpuLayerCopier
from sgl_tiered.engines.sglang.layered.device_pool import ActBytes, LayeredDevicePool
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.pipelines.completions import CompletionQueue
from sgl_tiered.pipelines.layerwise_load import LayerwiseLoader, LoadJob, Segment
from sgl_tiered.pipelines.offload import OffloadWorker
from sgl_tiered.tiers.base import TierHealth
from tests.unit.pipelines.pipeline_support import PATIENCE_S, load_plan

LAYOUT = PageLayout(num_layers=3, page_tokens=2, token_bytes=32)
LAYERS, SLOT = LAYOUT.num_layers, LAYOUT.slot_bytes
HIDDEN = 10  # of 2 bytes: 40 B of activations in a layer, 128 B of KV
ACT = LAYOUT.page_tokens * HIDDEN * 2
NUM_PAGES, NUM_PHYSICAL, NUM_ACTS, NUM_ROWS = 9, 30, 20, 12
MIXED = 0
"""A seed of two pages of activations among six."""
SEEDS = st.integers(0, 2**32 - 1)


class Machine:
    """A pool on a CPU, both its host regions, rows of a tier, and where pages lie."""

    def __init__(self, seed, *, with_acts=True):
        self.rng = np.random.default_rng(seed)
        shape = (2, (NUM_PHYSICAL + 1) * LAYOUT.page_tokens, 2, 8)
        kv = torch.from_numpy(self.rng.integers(0, 999, shape).astype(np.int16))
        area = self.rng.integers(0, 999, (NUM_ACTS + 1, LAYOUT.page_tokens, HIDDEN))
        self.kv_rows = self.noise((NUM_PAGES + 1, SLOT))
        self.act_rows = self.noise((NUM_PAGES, LAYERS * ACT))
        self.tier = self.noise((NUM_ROWS, SLOT))
        self.area = torch.from_numpy(area.astype(np.int16))
        pool = SimpleNamespace(
            k_buffer=[kv[0]] * LAYERS,
            v_buffer=[kv[1]] * LAYERS,
            region=SimpleNamespace(array=self.kv_rows),
        )
        self.keys, self.values = (part.numpy() for part in kv)
        self.is_act = np.zeros(NUM_PAGES + 1, np.bool_)
        self.row = np.arange(NUM_PAGES + 1)
        transfers = np.full((LAYERS, NUM_PAGES + 1), -1, np.int32)
        self.driver = SimpleNamespace(transfers=transfers, act_transfers=None)
        self.act = np.full((LAYERS, NUM_PAGES + 1), -1, np.int32)
        if with_acts:
            pool.acts = self.area
            pool.act_region = SimpleNamespace(array=self.act_rows)
            self.is_act[1:] = self.rng.random(NUM_PAGES) < 0.5
            self.row[1:] = self.rng.permutation(NUM_PAGES)
            self.driver.act_transfers = ActTransfers(LAYERS, NUM_PAGES + 1, 4)
        copier = CpuLayerCopier(pool, LAYOUT)
        acts = ActBytes.of_pool(pool)
        assert (acts is not None) == with_acts
        self.pool = LayeredDevicePool(copier, self.driver, LAYOUT, acts)
        count = int(self.rng.integers(1, NUM_PAGES + 1))
        self.pages = 1 + self.rng.permutation(NUM_PAGES)[:count].astype(np.int64)
        self.rows = self.rng.permutation(NUM_ROWS)[:count].astype(np.int64)

    def noise(self, shape):
        return self.rng.integers(0, 256, shape, np.uint8)

    def place(self, *, is_load):
        """Let layers lie somewhere, and note it as a transfer begins."""
        free = iter(1 + self.rng.permutation(NUM_PHYSICAL))
        acts = iter(1 + self.rng.permutation(NUM_ACTS))
        for layer in range(LAYERS):
            for page in self.pages:
                if self.rng.random() < 0.5:
                    continue
                if not self.is_act[page]:
                    self.driver.transfers[layer, page] = next(free)
                elif not is_load and (place := next(acts, None)) is not None:
                    self.act[layer, page] = place
        if self.driver.act_transfers is not None:
            is_act = self.is_act[self.pages]
            noted = self.driver.act_transfers
            noted.note(self.pages, is_act, self.act, self.row)

    def held(self, layer, page):
        """Return one layer of a page as bytes, from where it lies."""
        row = self.row[page]
        if self.is_act[page]:
            place = self.act[layer, page]
            if place >= 0:
                return self.area[int(place)].numpy().tobytes()
            return self.act_rows[row, layer * ACT : (layer + 1) * ACT].tobytes()
        place = self.driver.transfers[layer, page]
        if place >= 0:
            tokens = slice(place * LAYOUT.page_tokens, (place + 1) * LAYOUT.page_tokens)
            return self.keys[tokens].tobytes() + self.values[tokens].tobytes()
        begin = LAYOUT.key_offset(layer)
        return self.kv_rows[row, begin : begin + LAYOUT.layer_page_bytes].tobytes()

    def below(self, layer, page, row):
        """Return one layer of a page as it has to lie in a slot."""
        if self.is_act[page]:
            return self.tier[row, layer * ACT : (layer + 1) * ACT].tobytes()
        begin = LAYOUT.key_offset(layer)
        return self.tier[row, begin : begin + LAYOUT.layer_page_bytes].tobytes()

    def everything(self):
        """Return copies of all memory but the tier's."""
        parts = (self.keys, self.values, self.area.numpy(), self.kv_rows, self.act_rows)
        return [part.copy() for part in parts]

    def store(self):
        self.place(is_load=False)
        self.pool.store_pages(self.tier, self.rows, self.pages, None)

    def load(self):
        self.place(is_load=True)
        for layer in range(LAYERS):
            self.pool.load_layer(layer, self.tier, self.rows, self.pages)

    def differing(self):
        """Return the layers of pages that differ between both sides."""
        return [
            (layer, int(page))
            for page, row in zip(self.pages, self.rows, strict=True)
            for layer in range(LAYERS)
            if self.held(layer, page) != self.below(layer, page, row)
        ]


@given(seed=SEEDS, with_acts=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_page_goes_down_as_what_it_is_kept_as(seed, with_acts):
    """From the device, the act area or a host row; nothing else of a slot changes."""
    machine = Machine(seed, with_acts=with_acts)
    before = machine.tier.copy()
    ours = machine.everything()
    machine.store()
    assert machine.differing() == []
    for page, row in zip(machine.pages, machine.rows, strict=True):
        used = LAYERS * ACT if machine.is_act[page] else LAYOUT.page_bytes
        assert (machine.tier[row, used:] == before[row, used:]).all()
    others = np.setdiff1d(np.arange(NUM_ROWS), machine.rows)
    assert (machine.tier[others] == before[others]).all()
    for was, now in zip(ours, machine.everything(), strict=True):
        assert (was == now).all()


@given(seed=SEEDS, with_acts=st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_page_comes_up_as_what_its_slot_holds(seed, with_acts):
    """To the device or a host row; no other page's place or row is written."""
    machine = Machine(seed, with_acts=with_acts)
    slots = machine.tier.copy()
    _, _, area, kv_rows, act_rows = machine.everything()
    machine.load()
    assert machine.differing() == []
    assert (machine.tier == slots).all()
    assert (machine.area.numpy() == area).all()
    is_act = machine.is_act[machine.pages]
    rows = machine.row[machine.pages]
    others = np.setdiff1d(np.arange(NUM_PAGES + 1), rows[~is_act])
    assert (machine.kv_rows[others] == kv_rows[others]).all()
    others = np.setdiff1d(np.arange(NUM_PAGES), rows[is_act])
    assert (machine.act_rows[others] == act_rows[others]).all()


def test_a_pool_is_probed_before_pages_have_rows():
    """More pages than the region has rows of KV: none lies outside."""
    machine = Machine(MIXED)
    rows, pages = np.arange(NUM_PAGES), np.arange(1, NUM_PAGES + 1)
    assert machine.driver.act_transfers.rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    for layer in range(LAYERS):
        machine.pool.load_layer(layer, machine.tier, rows, pages)


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_down_and_up_again_changes_no_byte(seed):
    """Of KV and of activations, at other places and rows than before."""
    machine = Machine(seed)
    machine.store()
    before = {(x, p): machine.held(x, p) for x in range(LAYERS) for p in machine.pages}
    machine.driver.transfers[:] = -1
    machine.act[:] = -1
    machine.row[1:] = machine.rng.permutation(NUM_PAGES)
    machine.kv_rows[:], machine.act_rows[:] = 0, 0
    machine.load()
    for (layer, page), was in before.items():
        assert machine.held(layer, page) == was


@pytest.mark.parametrize("way", ["store", "load"])
def test_a_swapped_kind_is_seen(way):
    """The comparison above is one that can fail: one page, noted as the other kind."""
    machine = Machine(MIXED)
    assert set(machine.is_act[machine.pages].tolist()) == {False, True}
    place = machine.place

    def place_wrongly(*, is_load):
        place(is_load=is_load)
        machine.driver.act_transfers.is_act[machine.pages[0]] ^= True

    machine.place = place_wrongly
    getattr(machine, way)()
    assert {page for _, page in machine.differing()} == {int(machine.pages[0])}


class Tier:
    """A memory tier over the rows of a machine, which is charged."""

    tier_id = TierId.HOST

    def __init__(self, region):
        self.region = region
        self.charged = []

    def charge(self, num_bytes, *, is_store=False):
        self.charged.append((num_bytes, is_store))

    def read_view(self, addresses):
        return self.region, addresses

    def health(self):
        return TierHealth(usable=True, detail="", emulated=False)


def bytes_of(machine):
    """Return the bytes of each page, by what it is kept as."""
    sizes = (LAYOUT.page_bytes, LAYERS * ACT)
    return np.array([sizes[k] for k in machine.is_act[machine.pages].astype(int)])


def test_offload_and_load_pay_for_what_they_move():
    """By the pipelines: bytes are right, and so are the charges, page by page."""
    machine = Machine(MIXED)
    tier = Tier(machine.tier)
    count, num_bytes = len(machine.pages), bytes_of(machine)
    numbers = np.arange(count, dtype=np.int32)
    machine.place(is_load=False)
    kinds = machine.is_act[machine.pages].astype(np.uint8)
    plan = OffloadPlan(1, TierId.HOST, numbers, numbers, machine.rows, kinds, num_bytes)
    completions, clock, metrics = CompletionQueue(), SystemClock(), MetricsRegistry()
    worker = OffloadWorker(machine.pool, tier, completions, clock, metrics)
    worker.submit(plan, machine.pages, None)
    assert worker.drain(PATIENCE_S)
    worker.close(PATIENCE_S)
    (ended,) = completions.drain()
    assert ended.result.ok.all()
    assert ended.result.num_bytes == num_bytes.sum()
    assert tier.charged == [(num_bytes.sum(), True)]
    assert machine.differing() == []

    tier.charged.clear()
    machine.driver.transfers[:] = -1
    machine.act[:] = -1
    machine.kv_rows[:], machine.act_rows[:] = 0, 0
    machine.place(is_load=True)
    segment = Segment.of_tier(tier, machine.rows, numbers)
    job = LoadJob(load_plan(machine.rows), (segment,), machine.pages, num_bytes)
    loader = LayerwiseLoader(machine.pool, completions, clock, metrics)
    ticket = loader.submit([job])
    assert ticket.wait(PATIENCE_S)
    loader.close(PATIENCE_S)
    assert sum(paid for paid, _ in tier.charged) == num_bytes.sum()
    assert ticket.moved[TierId.HOST][0] == num_bytes.sum()
    assert machine.differing() == []
