"""The driver where a forward breaks off, has no room, or has requests that ended."""

import numpy as np
import pytest
import torch

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver, NoRoomError
from sgl_tiered.layered.base import LayerReadError, PassRequest
from sgl_tiered.serving.options import LayerKv
from tests.unit.layered.layered_support import Pool

EVERYTHING = np.ones(Pool.LAYERS, np.bool_)
NOTHING = ~EVERYTHING


@pytest.fixture
def pool():
    pool = Pool(26, 4)
    yield pool
    pool.close()


@pytest.fixture
def driver(pool):
    layout = PageLayout(Pool.LAYERS, Pool.TOKENS, 64)
    return LayerDriver(pool.manager, LayerPlan(layout, 15, 26, 4, LayerKv()))


def prompt(rid, pages, retained=None):
    pages = np.array(pages, np.int64)
    return PassRequest(rid, pages, 0, len(pages) * Pool.TOKENS, retained)


def run(pool, driver, requests):
    """Run a forward through the driver."""
    plan = driver.begin_pass(requests)
    for layer in range(Pool.LAYERS):
        pages = np.concatenate([one.pages[-1:] for one in requests])
        driver.slots_for_write(layer, torch.from_numpy(pages * Pool.TOKENS))
        pool.manager.layer_written(layer)
        for group in range(len(plan.groups)):
            pool.manager.wait_unit(layer, group)
            pool.manager.unit_done(layer, group)
    driver.end_pass()


def test_what_was_decided_holds_until_the_pass_has_begun(driver, pool):
    """A pass that is refused, and tried again, leaves the same layers."""
    driver.decide("b", NOTHING)
    run(pool, driver, [prompt("a", range(1, 6), EVERYTHING)])
    driver.decide("c", EVERYTHING)
    with pytest.raises(NoRoomError):
        # More than all: whatever leaves, there is no room.
        driver.begin_pass([prompt("c", range(6, 13), driver.decided("c"))])
    assert driver.decided("c").all()
    run(pool, driver, [prompt("b", range(6, 8), driver.decided("b"))])
    assert driver.decided("b") is None
    assert not pool.manager.held("b").any()


def test_without_room_it_says_who_and_nothing_has_begun(driver, pool):
    """Others' layers leave first; the manager can be asked at once."""
    run(pool, driver, [prompt("a", range(1, 6), EVERYTHING)])
    batch = [
        PassRequest("a", np.arange(1, 7), 10, 1),
        prompt("b", range(7, 14), EVERYTHING),
    ]
    with pytest.raises(NoRoomError, match="1 of 2 requests") as caught:
        driver.begin_pass(batch)
    assert caught.value.keys == ("b",)
    pool.manager.poll()
    assert not pool.manager.held("a").any()
    assert driver.known == {"a"}
    driver.lose(["b"])
    run(pool, driver, batch)
    assert driver.known == {"a"}
    assert driver.counters()["layerkv_requests_lost"] == 1
    pool.manager.check()


def test_a_forward_that_broke_off_is_ended_once(driver, pool):
    """Whoever asks next finds none under way; its new tokens have no KV."""
    run(pool, driver, [prompt("a", range(1, 4), NOTHING)])
    pool.settle()
    pool.manager._room.drop(26)
    pool.copier.bad_rows = {2}
    request = PassRequest("a", np.arange(1, 5), 6, 1)
    plan = driver.begin_pass([request])
    assert plan.num_units == 3
    with pytest.raises(LayerReadError):
        pool.manager.wait_unit(0, 0)
    driver.broke_off()
    driver.broke_off()
    pool.manager.poll()
    assert not pool.binding.filled[:, 4].any()
    pool.copier.bad_rows = set()
    run(pool, driver, [request])
    assert pool.binding.filled[:, 4].all()
    counters = driver.counters()
    assert counters["layerkv_copies_failed_to_device"] >= 2
    assert counters["layerkv_copies_failed_to_host"] == 0


def test_a_lost_request_writes_where_padding_does(driver, pool):
    """Its pages keep what they have, and the others' are written as ever."""
    run(pool, driver, [prompt("a", range(1, 3)), prompt("b", range(3, 5))])
    driver.lose(["a"])
    batch = [
        PassRequest("a", np.array([1, 2, 5]), 4, 1),
        PassRequest("b", np.array([3, 4, 6]), 4, 1),
    ]
    driver.begin_pass(batch)
    loc = torch.tensor([5 * Pool.TOKENS, 6 * Pool.TOKENS + 1])
    slots = driver.slots_for_write(0, loc).tolist()
    place = int(pool.binding.device[0, 6])
    assert slots == [0, place * Pool.TOKENS + 1]
    driver.broke_off()
    driver.finished("a")
    assert not driver.is_lost("a")
    assert driver.take_report("a")["layers_retained"] == Pool.LAYERS


def test_a_request_is_lost_once(driver):
    """However often it is named."""
    driver.lose(["a"])
    driver.lose(["a", "b"])
    driver.repeats()
    counters = driver.counters()
    assert counters["layerkv_requests_lost"] == 2
    assert counters["layerkv_forwards_repeated"] == 1
