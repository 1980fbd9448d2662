"""A streamed batch: the pipeline by hand, its limits, and who decides what."""

from __future__ import annotations

from dataclasses import replace

import pytest
from batch_model import (
    BatchSetup,
    Context,
    LayerTimes,
    MiniBatch,
    layer_pipeline,
    simulate_batch,
)
from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.policies.activations.ratio import PageRatio
from sgl_tiered.sim.hardware import find_hardware
from sgl_tiered.sim.models import find_model

DEVICE = find_hardware("RTX-4090")
OPT_30B = find_model("OPT-30B")
SETUP = BatchSetup(DEVICE, OPT_30B, 128, 1_920, 128, 882e9)

seconds = st.floats(0.0, 10.0)
batches = st.lists(
    st.builds(MiniBatch, seconds, seconds, seconds, st.floats(0.01, 10.0)),
    min_size=1,
    max_size=6,
)


# -- The pipeline ------------------------------------------------------------------


def test_one_mini_batch_by_hand():
    """Layer 1: activations at 1, KV at 3, rebuilt at 5, done at 6; weights at 7.

    Layer 2: activations at 8 and KV at 10, while the device is idle from 6 to 8;
    rebuilt at 10, done at 11.
    """
    one = MiniBatch(load_act_s=1.0, load_kv_s=2.0, kv_gen_s=4.0, forward_s=1.0)
    assert layer_pipeline([one], 4.0, 2) == [6.0, 13.0]
    # Without weights its loads run ahead: the device is never idle again.
    assert layer_pipeline([one], 0.0, 3) == [6.0, 11.0, 16.0]


def test_two_mini_batches_by_hand():
    """The second loads (1 to 2) while the first computes (1 to 4); it is done at 7."""
    one = MiniBatch(load_act_s=0.0, load_kv_s=1.0, kv_gen_s=0.0, forward_s=3.0)
    assert layer_pipeline([one, one], 0.0, 2) == [7.0, 13.0]


def test_a_third_waits_for_a_half_of_the_buffers():
    """Loads of 1 and computation of 0.5: nothing waits; of 5: the buffers do."""
    fast = MiniBatch(0.0, 1.0, 0.0, 0.5)
    assert layer_pipeline([fast] * 3, 0.0, 1) == [3.5]
    uneven = [MiniBatch(0.0, 0.0, 0.0, 5.0), fast, MiniBatch(0.0, 4.0, 0.0, 1.0)]
    # The third loads from 5 on, when the first has left its half, and ends at 10.
    assert layer_pipeline(uneven, 0.0, 1) == [10.0]


def test_weights_wait_for_the_half_of_the_layer_before():
    """In layer 2 they may come from 11 on, when layer 1 is done.

    So its second mini-batch loads from 13 to 16, when the first is done since 15.
    """
    rows = [MiniBatch(0.0, 0.0, 0.0, 4.0), MiniBatch(0.0, 3.0, 0.0, 6.0)]
    assert layer_pipeline(rows, 4.0, 2) == [11.0, 22.0]
    assert layer_pipeline(rows, 0.0, 2) == [10.0, 20.0]


@given(batches, seconds)
def test_no_layer_is_faster_than_either_side(rows: list[MiniBatch], weights_s: float):
    """In the long run; and none is slower than both after each other."""
    link_s = weights_s + sum(one.load_act_s + one.load_kv_s for one in rows)
    device_s = sum(one.kv_gen_s + one.forward_s for one in rows)
    ends = layer_pipeline(rows, weights_s, 40)
    assert ends == sorted(ends)
    per_layer_s = (ends[-1] - ends[9]) / 30
    # Half of the buffers lets a side run ahead by a mini-batch at most.
    slack_s = (link_s + device_s) / 30
    assert per_layer_s >= max(link_s, device_s) - slack_s
    assert per_layer_s <= link_s + device_s + 1e-9


@given(batches, seconds)
def test_a_few_layers_stand_for_all(rows: list[MiniBatch], weights_s: float):
    """What nine layers say of one is within 5 % of what sixty say."""
    few, many = (layer_pipeline(rows, weights_s, num) for num in (9, 60))
    here_s, all_s = (few[-1] - few[2]) / 6, (many[-1] - many[2]) / 57
    assert here_s == pytest.approx(all_s, rel=0.05)


# -- What one layer takes ----------------------------------------------------------


def test_regressions_are_the_devices_lines():
    """4 h^2 operations and 4 h bytes per token of OPT-30B; both lines are straight."""
    layer = LayerTimes(DEVICE, OPT_30B)
    hidden = OPT_30B.hidden_size
    flops = DEVICE.flops_per_s * DEVICE.compute_share
    assert layer.kv_gen.token_s == pytest.approx(4 * hidden**2 / flops, rel=0.01)
    assert layer.kv_token_bytes == 4 * hidden == 2 * layer.act_token_bytes
    link = DEVICE.host.bytes_per_s
    assert layer.load_kv.token_s == pytest.approx(4 * hidden / link, rel=0.01)
    assert layer.weight_bytes == pytest.approx(24 * hidden**2, rel=0.01)
    assert min(layer.kv_gen.quality.r2, layer.load_kv.quality.r2) > 0.999
    assert (layer.kv_gen_s(0), layer.load_s(0)) == (0.0, 0.0)


def test_rebuilding_reads_and_writes_at_least():
    """A device that computes at once still moves weights, activations, K and V."""
    eager = replace(DEVICE, flops_per_s=1e20)
    memory = DEVICE.memory_bytes_per_s * DEVICE.memory_share
    hidden = OPT_30B.hidden_size
    moved = 2 * (2 * hidden**2 + 1_000 * 3 * hidden)
    found_s = LayerTimes(eager, OPT_30B).kv_gen_s(1_000)
    assert found_s == pytest.approx(1e-5 + moved / memory)


# -- A batch -----------------------------------------------------------------------


def test_kv_only_is_bound_by_the_link():
    """Weights that do not stay and all KV of every step, at the link's rate."""
    found = simulate_batch(SETUP, Context.KV)
    assert found.ratio == PageRatio(0, 1)
    assert found.act_bytes == 0
    assert 0.2 < found.resident_share < 0.35
    tokens = 128 * (1_920 + 64)
    kv_bytes = 127 * tokens * OPT_30B.kv_token_bytes
    assert found.kv_bytes == pytest.approx(kv_bytes, rel=0.01)
    moved = found.kv_bytes + found.weight_bytes
    wanted_s = moved / DEVICE.host.bytes_per_s
    assert found.decode_s == pytest.approx(wanted_s, rel=0.03)
    assert found.busy_share < 0.1


def test_activations_only_are_bound_by_rebuilding():
    """The device never rests, and rebuilds every token in every step and layer."""
    found = simulate_batch(SETUP, Context.ACT)
    assert found.kv_bytes == 0
    assert found.busy_share > 0.98
    layer = LayerTimes(DEVICE, OPT_30B)
    tokens = 127 * 128 * (1_920 + 64) * OPT_30B.num_layers
    assert found.decode_s > tokens * layer.kv_gen.token_s
    assert found.decode_s < 1.1 * tokens * layer.kv_gen.token_s
    # What the device holds is not loaded.
    on_host = 1 - found.device_act / (128 * (1_920 + 128) / 16)
    total = 127 * 128 * (1_920 + 64) * OPT_30B.kv_token_bytes / 2
    assert found.act_bytes == pytest.approx(on_host * total, rel=0.02)


def test_both_are_faster_than_either():
    """And the balanced split no slower than Algorithm 1's ratio or one to one."""
    speed = {c: simulate_batch(SETUP, c).tokens_per_s for c in Context}
    assert speed[Context.HYBRID] > max(speed[Context.KV], speed[Context.ACT])
    others = (Context.HYBRID, Context.EVEN, Context.KV, Context.ACT)
    for context in others:
        assert speed[Context.BALANCED] >= 0.98 * speed[context]


def test_algorithm_1_finds_the_papers_ratio_for_opt_30b():
    """2 : 1 within 25 %, on a device by data sheet."""
    found = simulate_batch(SETUP, Context.HYBRID).ratio
    assert found.kv / found.act == pytest.approx(2.0, rel=0.25)


def test_what_the_device_has_room_for():
    """80 % of 24 GB, less the embedding and two layers' weights, for activations."""
    hidden, layers = OPT_30B.hidden_size, OPT_30B.num_layers
    room = 0.8 * 24e9 - 2 * OPT_30B.vocab * hidden - 2 * 24 * hidden**2
    pages = room / layers / (16 * 2 * hidden)
    found = simulate_batch(SETUP, Context.ACT).device_act
    assert found == pytest.approx(pages, abs=1)


def test_weights_that_fit_stay():
    """KV only keeps OPT-6.7B on the device, with KV beside it; the paper's streams."""
    small = replace(SETUP, model=find_model("OPT-6.7B"))
    kv = simulate_batch(small, Context.KV)
    assert (kv.resident_share, kv.weight_bytes) == (1.0, 0.0)
    assert kv.device_kv > 0
    hybrid = simulate_batch(small, Context.HYBRID)
    assert hybrid.resident_share == 0.0
    assert hybrid.weight_bytes > 0


def test_device_holds_activations_first():
    """A small batch has all of them there, and KV in what is left."""
    found = simulate_batch(replace(SETUP, batch=8, prompt_tokens=256), Context.HYBRID)
    assert found.act_bytes == 0
    pages = 8 * (256 + 127 + 15) // 16
    assert found.device_act == pytest.approx(found.ratio.act_share * pages, abs=8)
    assert found.device_kv > 0


@pytest.mark.parametrize("context", list(Context))
def test_equal_runs_and_a_faster_link(context):
    """The same again; and with twice the link no slower."""
    once = simulate_batch(SETUP, context)
    assert simulate_batch(SETUP, context) == once
    link = replace(DEVICE.host, bytes_per_s=2 * DEVICE.host.bytes_per_s)
    fast = replace(SETUP, hardware=replace(DEVICE, host=link))
    assert simulate_batch(fast, context).tokens_per_s >= 0.999 * once.tokens_per_s


def test_mini_batches_grow_in_number_as_buffers_shrink():
    """Half the buffers, twice the mini-batches, give or take one."""
    num = simulate_batch(SETUP, Context.KV).num_mini_batches
    halved = replace(SETUP, buffer_share=SETUP.buffer_share / 2)
    more = simulate_batch(halved, Context.KV).num_mini_batches
    assert abs(more - 2 * num) <= 1
