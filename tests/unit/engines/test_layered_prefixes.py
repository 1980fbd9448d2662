"""Who is admitted has room in the pass: admission and the layer manager count alike."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.admission import LayerAdmission
from sgl_tiered.engines.sglang.layered.capacity import LayerPlan
from sgl_tiered.engines.sglang.layered.driver import LayerDriver
from sgl_tiered.engines.sglang.layered.forecasting import LayerForecast
from sgl_tiered.layered.base import PassRequest
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.serving.options import LayerKv
from sgl_tiered.testing.fake_layers import FakeLayerCopier

LAYERS, TOKENS, HALF, ROOM = 4, 16, 4, 32
NUM_PAGES = 64


@pytest.fixture
def driver():
    """A driver whose prompts are to keep all their layers."""
    physical = ROOM + 2 * HALF
    copier = FakeLayerCopier(LAYERS, NUM_PAGES + 1, physical + 1, TOKENS)
    binding = LayerBinding(LAYERS, NUM_PAGES + 1, physical, first_physical=1)
    mover = LayerMover(copier, 8 * TOKENS)
    plan = LayerPlan(
        PageLayout(LAYERS, TOKENS, 4),
        NUM_PAGES,
        physical,
        HALF,
        LayerKv(retain=LAYERS),
    )
    driver = LayerDriver(LayerManager(binding, mover, TOKENS, HALF), plan)
    yield driver
    driver.manager.close()


def run_pass(driver, *requests):
    """Compute a pass over (name, pages, tokens in the cache, new tokens)."""
    plan = driver.begin_pass(
        [
            PassRequest(name, np.array(pages), context, new, driver.decided(name))
            for name, pages, context, new in requests
        ]
    )
    manager = driver.manager
    for layer in range(LAYERS):
        # All new pages of the pass: what the cache holds is not written.
        fresh = [pages[context // TOKENS :] for _, pages, context, _ in requests]
        manager.pages_for_write(layer, np.concatenate(fresh))
        manager.layer_written(layer)
        for group in range(len(plan.groups)):
            manager.wait_unit(layer, group)
            manager.unit_done(layer, group)
    driver.end_pass()


def request(rid, num_tokens):
    """Return what admission reads of a request, whose answer is one token."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[0] * num_tokens,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=1),
    )


def test_a_cached_prefix_that_a_prompt_keeps_is_room_no_more(driver):
    """Its layers on the device are promised to nobody else in the same pass."""
    prefix, prompt = [1, 2, 3], [4, 5, 6, 7, 8]
    driver.decide("before", np.zeros(LAYERS, np.bool_))
    run_pass(driver, ("before", prefix, 0, 3 * TOKENS))
    driver.finished("before")
    forecast = LayerForecast(driver, lambda req: 1)
    admission = LayerAdmission(driver, SimpleNamespace(), forecast)
    admission.begin([])
    assert admission.room() == ROOM

    # The first keeps 3 pages of the cache and a new one, in all layers: 16 of 32.
    hit, fresh = request("hit", 4 * TOKENS - 1), request("fresh", 5 * TOKENS)
    assert admission.admit(hit, 3 * TOKENS, TOKENS - 1, is_alone=True)
    admission.commit()
    assert not admission.admit(fresh, 0, 5 * TOKENS, is_alone=False)

    run_pass(driver, ("hit", [*prefix, 9], 3 * TOKENS, TOKENS - 1))
    driver.finished("hit")
    admission.begin([])
    assert admission.admit(fresh, 0, 5 * TOKENS, is_alone=False)
    run_pass(driver, ("fresh", prompt, 0, 5 * TOKENS))
