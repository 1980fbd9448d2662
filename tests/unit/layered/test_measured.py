"""What forwards rebuild and load is measured, and refines the cost model."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import RebuildFit, TokensFit
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.rebuild import RebuildCosts
from sgl_tiered.engines.sglang.layered.activations.build import learn_lines
from sgl_tiered.layered.unit_stream import Measured
from sgl_tiered.testing.throttled import Link, LinkPace
from tests.property.layered_driver import LAYERS, TOKENS
from tests.unit.cost.calibration_support import QUALITY
from tests.unit.layered.act_support import ActDriver, only_acts

SUB_UNIT = 2


def only_kv(num_act, num_kv, num_new):
    """Choose none."""
    return np.zeros(num_new, np.bool_)


def away(driver, num_pages):
    """Return a request whose pages are on the host only."""
    num_tokens = num_pages * TOKENS
    nothing = np.zeros(LAYERS, np.bool_)
    key = driver.start(1, num_tokens, nothing, share=False).key
    assert driver.forward([key], num_tokens) == [key]
    driver.sent_away()
    return key


def measured(driver):
    """Return the list that each forward's measurements will be added to."""
    told = []
    driver.manager.on_measured = lambda *samples: told.append(samples)
    return told


def slowly(clock, seconds, work):
    """Return ``work``, which takes so long."""

    def slow(*args):
        clock.advance(seconds)
        return work(*args)

    return slow


def test_a_mean_lies_on_the_line_of_its_parts():
    """Overhead and seconds per token are those of each part."""
    sample = Measured()
    assert sample.mean(16) is None
    for num_pages in (2, 6):
        sample.add(num_pages, 1.0 + 0.25 * num_pages * 16)
    assert sample.mean(16) == (64, 1.0 + 0.25 * 64)


def test_rebuilds_are_measured_without_what_they_waited_for():
    """Their seconds are those of the copier's call, and their tokens a sub-unit's."""
    clock = ManualClock()
    driver = ActDriver(clock=clock, choose=only_acts, sub_unit_pages=SUB_UNIT)
    key, told = away(driver, 4), measured(driver)
    driver.acts.rebuild = slowly(clock, 1.0, driver.acts.rebuild)
    assert driver.forward([key], 1) == [key]
    assert told == [((SUB_UNIT * TOKENS, 1.0), None)]
    driver.close()


def test_loads_of_kv_are_measured():
    """Those of units; where nothing was staged nothing is told of it."""
    clock = ManualClock()
    driver = ActDriver(clock=clock, choose=only_kv, sub_unit_pages=SUB_UNIT)
    key, told = away(driver, 4), measured(driver)
    driver.copier.to_device = slowly(clock, 0.5, driver.copier.to_device)
    assert driver.forward([key], 1) == [key]
    assert told == [(None, (SUB_UNIT * TOKENS, 0.5))]
    driver.close()


def test_loads_beside_others_are_not_measured():
    """Weights take the link as well: it is no load alone."""
    clock = ManualClock()
    driver = ActDriver(
        clock=clock,
        choose=only_kv,
        pace=LinkPace(Link(1e6), 0.0, clock, clock.advance),
        weight_bytes=10,
    )
    key, told = away(driver, 4), measured(driver)
    assert driver.forward([key], 1) == [key]
    assert told == [(None, None)]
    driver.close()


def make_cost():
    """Return costs that are to be refined."""
    line = TokensFit(1e-3, 1e-6, QUALITY)
    return CostModel(
        PrefillCost.from_coefficients(1e-3, 1e-4, 1e-9),
        {TierId.HOST: LinkCost(1e-4, 1e9)},
        RebuildCosts.measured(RebuildFit(line, line)),
    )


@pytest.mark.parametrize("kind", ["kv_gen", "load_kv"])
def test_the_cost_model_learns_from_them(kind):
    """Each line from its own, by way of the ranks' agreement."""
    cost, asked = make_cost(), []

    def learned(observe):
        asked.append(observe)
        return observe

    manager = SimpleNamespace(on_measured=None)
    learn_lines(manager, SimpleNamespace(learned=learned), cost)
    assert asked == [cost.observe_rebuild, cost.observe_load_kv]
    before = cost.snapshot()
    samples = [(100, 1.0), None] if kind == "kv_gen" else [None, (100, 1.0)]
    manager.on_measured(*samples)
    other = "load_kv" if kind == "kv_gen" else "kv_gen"
    after = cost.snapshot()
    name = "rebuild.{}.num_observations"
    assert after[name.format(kind)] == before[name.format(kind)] + 1
    assert after[name.format(other)] == before[name.format(other)]
    line = cost.rebuild.kv_gen if kind == "kv_gen" else cost.rebuild.load_kv
    assert line.seconds(100) > 1e-3 + 100 * 1e-6
