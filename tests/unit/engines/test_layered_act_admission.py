"""Admission where pages are of two kinds: what will lack a host row takes more room."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.layered.base import ActPlan, PassRequest
from sgl_tiered.serving.options import LayerKv
from tests.property.layered_driver import LAYERS, PAGES, TOKENS
from tests.unit.layered.act_support import ACT_BYTES, ActDriver, only_acts

HALF = 6
NOTHING = np.zeros(LAYERS, np.bool_)


@pytest.fixture
def make():
    """Makes driver and admission over so many layer-pages beside the staging ones.

    Two pages have rows of KV, and two find places to be activations at a time.
    """
    made = []

    def make(num_layer_pages):
        acts = ActPlan(PAGES - 2, 14, 4, 1, ACT_BYTES)
        num_physical = 2 * HALF + num_layer_pages
        machine = ActDriver(num_physical, HALF, plan=acts, choose=only_acts)
        made.append(machine)
        layout = PageLayout(LAYERS, TOKENS, token_bytes=4)
        settings = LayerKv(retain=0)
        plan = LayerPlan(layout, PAGES - 1, num_physical, HALF, settings, acts)
        driver = LayerDriver(machine.manager, plan)
        forecast = LayerForecast(driver, lambda req: 1)
        admission = LayerAdmission(driver, SimpleNamespace(), forecast)
        admission.begin([])
        return driver, admission

    yield make
    for machine in made:
        machine.close()


def request(rid, num_pages):
    """Return what admission reads of a request that is computed, and no more."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * (num_pages * TOKENS),
        output_ids=[],
        prefix_len=0,
        sampling_params=SimpleNamespace(max_new_tokens=0),
    )


def passes(driver, *sizes):
    """Return which requests of so many pages each are refused."""
    batch, first = [], 1
    for n, size in enumerate(sizes):
        pages = np.arange(first, first + size)
        batch.append(PassRequest(f"r{n}", pages, 0, size * TOKENS, NOTHING))
        first += size
    refused = driver.manager.begin_pass(batch).refused
    if not refused:
        driver.manager.end_pass(ok=False)
        for one in batch:
            driver.manager.finished(one.key)
        driver.manager.freed(np.arange(1, first))
    return refused


@pytest.mark.parametrize(
    ("num_layer_pages", "fits"), [(17, False), (16 + 4 * LAYERS, True)]
)
def test_a_prompt_whose_pages_would_stay_is_held(make, num_layer_pages, fits):
    """Two layers of all pages would fit either way; without rows four stay in all."""
    driver, admission = make(num_layer_pages)
    assert driver.manager.needed(0, 8 * TOKENS, NOTHING) == 16
    assert admission.admit(request("a", 2), 0, 2 * TOKENS, is_alone=False)
    admission.commit()
    assert admission.admit(request("b", 6), 0, 6 * TOKENS, is_alone=False) == fits
    assert (passes(driver, 2, 6) == ()) == fits


@pytest.mark.parametrize(
    ("num_layer_pages", "fits"), [(17, False), (16 + 4 * LAYERS, True)]
)
def test_the_next_part_of_a_prompt_is_held(make, num_layer_pages, fits):
    """What was admitted into the same pass counts."""
    driver, admission = make(num_layer_pages)
    assert admission.admit(request("a", 2), 0, 2 * TOKENS, is_alone=False)
    admission.commit()
    driver.manager.held = lambda rid: NOTHING
    assert admission.goes_on(request("b", 6), 6 * TOKENS, is_alone=False) == fits


def test_where_nobody_else_runs_a_prompt_is_let_in(make):
    """It may have all there is, and somebody goes on."""
    _, admission = make(17)
    assert admission.admit(request("b", 6), 0, 6 * TOKENS, is_alone=True)
