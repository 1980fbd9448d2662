"""The driver between tiers below and pages of two kinds: what goes down, what comes."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.layered.base import ActPlan
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.serving.options import LayerKv
from sgl_tiered.testing.fake_layers import FakeLayerCopier

LAYERS, PAGES = 3, 12
LAYOUT = PageLayout(LAYERS, 2, 32)
ACTS = ActPlan(
    num_act_rows=5, num_acts=20, half_acts=3, up_acts=1, act_layer_page_bytes=40
)


class Manager:
    """Stands in for the one that places layers; its binding is a real one."""

    def __init__(self, acts):
        self.binding = LayerBinding(LAYERS, PAGES, 30, first_physical=1, acts=acts)
        self.clock = ManualClock()
        self.has_room = True
        self.pinned = []
        self.opened = []

    def pin(self, pages):
        self.pinned.append(pages.tolist())

    def unpin(self, pages):
        self.pinned.remove(pages.tolist())

    def where(self, layer, pages):
        return self.binding.device[layer][pages]

    def held(self, rid):
        del rid
        return np.ones(LAYERS, np.bool_)

    def open_load(self, pages, retained, is_act):
        self.opened.append(
            (pages.tolist(), None if is_act is None else is_act.tolist())
        )
        if self.has_room and self.binding.kinds is not None:
            kinds = np.zeros(len(pages), np.bool_) if is_act is None else is_act
            self.binding.new_kinds(pages, kinds)
        return self.has_room


def driver_of(acts):
    manager = Manager(acts)
    plan = LayerPlan(LAYOUT, PAGES - 1, 30, 4, LayerKv(), acts=acts)
    return LayerDriver(manager, plan)


@pytest.fixture
def driver():
    """Pages 1 to 3 are KV, 4 to 6 activations; KV of all but 5 is on the device."""
    driver = driver_of(ACTS)
    binding = driver.manager.binding
    binding.new_kinds(np.arange(1, 4), np.zeros(3, np.bool_))
    binding.new_kinds(np.arange(4, 7), np.ones(3, np.bool_))
    for layer in range(LAYERS):
        binding.bind(layer, np.array([1, 2, 3, 4, 6]))
        binding.kinds.bind(layer, np.array([4, 5, 6]))
    return driver


def pages(*numbers):
    return np.array(numbers, np.int64)


def test_a_page_goes_down_as_what_it_is(driver):
    """Activations from the act area, or from the host where they have left it."""
    binding = driver.manager.binding
    binding.on_host[1, 5] = True
    binding.act[1, 5] = -1
    kinds, lacking = driver.kinds(pages(1, 5, 3, 4))
    assert kinds.tolist() == [0, 1, 0, 1]
    assert kinds.dtype == np.uint8
    assert not lacking.any()


def test_without_whole_activations_the_kv_goes_down(driver):
    """Where that is whole; else the page waits for a later turn."""
    binding = driver.manager.binding
    binding.act[2, pages(4, 5)] = -1
    kinds, lacking = driver.kinds(pages(1, 4, 5, 6))
    assert kinds.tolist() == [0, 0, 0, 1]
    assert lacking.tolist() == [False, False, True, False]


def test_a_store_notes_where_its_pages_are(driver):
    """Places and rows as they are now; pinned until it ends."""
    binding = driver.manager.binding
    binding.act[1, 5] = -1
    chosen = pages(2, 5, 4)
    driver.begin_store(7, chosen, np.array([0, 1, 0], np.uint8))
    noted = driver.act_transfers
    assert noted.is_act[chosen].tolist() == [False, True, False]
    assert (noted.places[:, chosen] == binding.act[:, chosen]).all()
    assert (noted.rows[chosen] == binding.row[chosen]).all()
    assert (driver.transfers[:, chosen] == binding.device[:, chosen]).all()
    assert driver.manager.pinned == [[2, 5, 4]]
    driver.end_store(7)
    assert driver.manager.pinned == []


def test_a_load_asks_for_rows_of_what_comes(driver):
    """And notes those that it was given."""
    chosen = pages(8, 9, 10)
    is_act = np.array([True, False, True])
    assert driver.open_load("r", chosen, is_act)
    assert driver.manager.opened == [([8, 9, 10], [True, False, True])]
    noted = driver.act_transfers
    assert (noted.is_act[chosen] == is_act).all()
    assert (noted.rows[chosen] == driver.manager.binding.row[chosen]).all()
    assert (noted.rows[chosen] >= 0).all()


def test_a_page_that_was_activations_is_noted_anew(driver):
    """Its number is used again, for KV."""
    driver.begin_store(1, pages(4), np.array([1], np.uint8))
    driver.end_store(1)
    driver.begin_store(2, pages(4))
    assert not driver.act_transfers.is_act[4]


def test_a_load_without_room_leaves_no_note(driver):
    """It is computed instead."""
    driver.manager.has_room = False
    assert not driver.open_load("r", pages(8), np.array([True]))
    assert not driver.act_transfers.is_act[8]
    driver.close_loads()


@pytest.fixture
def served():
    """A driver over the manager that a server has; nothing is copied on its own."""
    binding = LayerBinding(LAYERS, PAGES, 30, first_physical=1, acts=ACTS)
    copier = FakeLayerCopier(LAYERS, PAGES, 31, page_tokens=2)
    # Nothing of it is called: no forward runs.
    acts = SimpleNamespace()
    mover = LayerMover(copier, 16, ManualClock(), acts=acts, act_page_bytes=40)
    manager = LayerManager(binding, mover, 2, 4)
    plan = LayerPlan(LAYOUT, PAGES - 1, 30, 4, LayerKv(), acts=ACTS)
    yield LayerDriver(manager, plan)
    manager.close()


def test_what_came_as_activations_goes_down_as_such(served):
    """All layers of it are on its host row, also those that the request keeps."""
    chosen, is_act = pages(8, 2, 5, 9), np.array([True, False, False, True])
    served.decide("r", np.array([True, False, True]))
    assert served.open_load("r", chosen, is_act)
    assert (served.transfers[:, chosen[is_act]] < 0).all()
    assert (served.transfers[0, chosen[~is_act]] >= 0).all()
    assert (served.transfers[1, chosen] < 0).all()
    rows = served.act_transfers.rows[chosen]
    assert (rows >= 0).all()
    served.close_loads()
    kinds, lacking = served.kinds(chosen)
    assert (kinds == is_act).all()
    assert not lacking.any()
    served.begin_store(3, chosen, kinds)
    assert (served.act_transfers.rows[chosen] == rows).all()
    assert (served.act_transfers.places[:, chosen] < 0).all()
    served.end_store(3)
    served.manager.binding.check()


def test_a_kind_without_rows_is_no_room(served):
    """There are rows of KV left, but what comes is activations; nothing is taken."""
    before = served.manager.binding.kinds.num_free_rows
    assert before[1] == 5
    assert not served.open_load("r", np.arange(1, 7), np.ones(6, np.bool_))
    assert served.manager.binding.kinds.num_free_rows == before
    assert served.open_load("r", np.arange(1, 6), np.ones(5, np.bool_))
    served.freed(np.arange(1, 6))
    assert served.manager.binding.kinds.num_free_rows == before
    served.manager.binding.check()


def test_without_activations_nothing_is_noted():
    """Rows are the pages themselves, and nobody asks for kinds."""
    driver = driver_of(None)
    assert driver.kinds(pages(1, 2)) is None
    assert driver.act_transfers is None
    driver.begin_store(1, pages(1))
    assert driver.open_load("r", pages(2))
    assert driver.manager.opened == [([2], None)]


@pytest.mark.parametrize(
    ("share", "has_acts", "told"),
    [(None, False, "It pays nothing."), (0.5, False, ""), (None, True, "")],
    ids=["refused", "nobody left it to us", "kept"],
)
def test_the_cache_is_told_sizes_or_why_not(share, has_acts, told):
    """A refusal is one only where the choice was ours."""
    settings = SimpleNamespace(activations=SimpleNamespace(share=share))
    chosen = SimpleNamespace(reason="It pays nothing.")
    acts = ACTS if has_acts else None
    plan = LayerPlan(LAYOUT, PAGES - 1, 30, 4, settings, acts=acts, chosen=chosen)
    assert plan.act_refusal == told
    assert plan.act_page_bytes == (120 if has_acts else 0)
