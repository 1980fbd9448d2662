"""Activations in SGLang: what the flags mean, what they refuse, sizes and choices."""

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.activations.choosing import Links, page_chooser
from sgl_tiered.engines.sglang.layered.activations.reports import (
    activation_report,
    count_report,
)
from sgl_tiered.engines.sglang.layered.capacity import plan_layers
from sgl_tiered.errors import ConfigError
from sgl_tiered.layered.base import LayerReport
from sgl_tiered.policies.activations.base import PageLine
from sgl_tiered.serving.layered.act_sizes import Demand, share_bytes
from sgl_tiered.serving.layered.batches import Packing
from sgl_tiered.serving.option_clashes import refuse_clashes
from sgl_tiered.serving.option_reader import read_options
from sgl_tiered.serving.options import Activations, LayerKv, Options

ON = {"layerkv": "on"}
LAYOUT = PageLayout(num_layers=12, page_tokens=16, token_bytes=512)
ACT_TOKEN_BYTES = 512
"""As in an MHA model: half of a token's K and V."""
DEVICE_TOKENS = 8192
HOST_BYTES = 256 << 20


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, None),
        ("off", None),
        ("0", None),
        (0.0, None),
        ("auto", Activations(None)),
        ("1", Activations(1.0)),
        (0.25, Activations(0.25)),
    ],
)
def test_a_share_is_a_number_or_a_word(value, told):
    """Of 0, nothing is built."""
    settings = ON if value is None else {**ON, "activations": value}
    assert read_options(settings).layerkv.activations == told


def test_a_size_goes_with_a_share():
    """It is read where there is something to hold."""
    settings = {**ON, "activations": "auto", "activations_device_size": "1MiB"}
    assert read_options(settings).layerkv.activations == Activations(None, 1 << 20)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"activations": "0.5"}, "--tiered-activations: keeps single layers"),
        ({**ON, "activations": "1.5"}, "--tiered-activations"),
        ({**ON, "activations": "nan"}, "--tiered-activations"),
        ({**ON, "activations": "all"}, "--tiered-activations"),
        (
            {**ON, "activations_device_size": "1MB"},
            "--tiered-activations-device-size",
        ),
        (
            {**ON, "activations": "1", "activations_device_size": "0"},
            "--tiered-activations-device-size",
        ),
    ],
)
def test_a_wrong_flag_is_named(settings, flag):
    """One sentence about the first setting that is wrong."""
    with pytest.raises(ConfigError) as caught:
        read_options(settings)
    assert str(caught.value).startswith(flag)


def test_weights_are_emulated_on_an_emulated_link_only():
    """Bytes for each layer; without such a link they would be free."""
    told = {**ON, "emulate_weights": "2MB"}
    with pytest.raises(ConfigError, match="emulate-weights"):
        read_options({"emulate_weights": "2MB"})
    slow = {**told, "emulate": "host:bandwidth=1GB"}
    assert read_options(slow).layerkv.weight_bytes == 2_000_000
    for emulate in ("", "host:delay=0.2@0.01"):
        with pytest.raises(ConfigError, match="emulated link"):
            read_options({**told, "emulate": emulate})


def layered(share):
    """Return the settings of a server with activations."""
    return Options(layerkv=LayerKv(activations=Activations(share)))


def test_what_it_was_not_shown_to_work_with_is_refused():
    """Other devices, and whatever changes weights behind our back."""
    told = layered(None)
    refuse_clashes(told, SimpleNamespace(enable_lora=None, tp_size=2), "cpu")
    with pytest.raises(ConfigError, match="xpu"):
        refuse_clashes(told, SimpleNamespace(), "xpu")
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="enable-lora"):
            refuse_clashes(layered(0.5), SimpleNamespace(enable_lora=True), device)


@pytest.mark.parametrize("share", [0.5, None])
def test_on_cuda_one_rank_is_taken(share):
    """With a share or auto; ranks there were tried by nobody."""
    told = layered(share)
    refuse_clashes(told, SimpleNamespace(tp_size=1), "cuda")
    with pytest.raises(ConfigError, match="tp-size"):
        refuse_clashes(told, SimpleNamespace(tp_size=2), "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_in_host_memory_are_taken_from_one_offloader(device):
    """The other one is for models whose KV is no K and V."""
    given = SimpleNamespace(cpu_offload_gb=4, offload_group_size=-1, tp_size=1)
    refuse_clashes(layered(0.5), given, device)
    given.offload_group_size = 2
    with pytest.raises(ConfigError, match="--cpu-offload-gb"):
        refuse_clashes(layered(0.5), given, device)


def planned(share, **changed):
    """Return the plan of a pool with and without activations."""
    settings = read_options({**ON, "layerkv_host_size": str(HOST_BYTES)}).layerkv
    demand = Demand(share, changed.pop("token_bytes", ACT_TOKEN_BYTES), 8, 64)
    if changed:
        demand = Demand(share, ACT_TOKEN_BYTES, 8, 64, **changed)
    args = (LAYOUT, DEVICE_TOKENS, 1024, settings)
    free = {"available_bytes": 1 << 30}
    return plan_layers(*args, **free), plan_layers(*args, **free, demand=demand)


def test_room_for_weights_comes_out_of_the_pool():
    """What is brought from host memory for rebuilds takes no more of the device."""
    size = 10 * LAYOUT.layer_page_bytes + 3
    _, without = planned(0.5)
    _, plan = planned(0.5, weight_bytes=size)

    def taken(one):
        acts = one.acts.num_acts * one.acts.act_layer_page_bytes
        return one.num_layer_pages * LAYOUT.layer_page_bytes + acts

    assert size - LAYOUT.layer_page_bytes < taken(without) - taken(plan)
    assert taken(without) - taken(plan) < size + 2 * LAYOUT.layer_page_bytes


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 1.0])
def test_the_same_bytes_hold_more_pages(share):
    """Device and host take what they took; a row of activations is half as large."""
    plain, plan = planned(share)
    acts = plan.acts
    page_bytes = ACT_TOKEN_BYTES * LAYOUT.page_tokens
    assert acts.act_layer_page_bytes == page_bytes
    on_device = plan.num_layer_pages * LAYOUT.layer_page_bytes
    on_device += acts.num_acts * page_bytes
    total = plain.num_layer_pages * LAYOUT.layer_page_bytes
    assert total - LAYOUT.layer_page_bytes < on_device <= total
    on_host = plan.num_kv_rows * LAYOUT.slot_bytes
    on_host += acts.num_act_rows * LAYOUT.num_layers * page_bytes
    assert HOST_BYTES - LAYOUT.slot_bytes < on_host <= HOST_BYTES
    assert plan.num_pages == plan.num_kv_rows - 1 + acts.num_act_rows
    assert plan.num_pages >= int(plain.num_pages * (1 + share / 2))
    assert abs(acts.num_act_rows / plan.num_pages - min(share, 0.94)) < 0.01
    # What has no room while it is captured is KV.
    assert plan.num_kv_rows > 1
    assert acts.half_acts == plan.half_pages == plain.half_pages


def test_without_a_demand_nothing_is_taken():
    """The plan is that of a server without activations."""
    plain, _ = planned(1.0)
    assert plain.acts is None
    assert plain.num_kv_rows == plain.num_pages + 1


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"token_bytes": 1025}, "as activations and"),
        ({"device_bytes": 1 << 10}, "device-size"),
        ({"device_bytes": 1 << 26}, "device-size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, word):
    """In a sentence; a page must not be the larger one for it."""
    with pytest.raises(ConfigError, match=word):
        planned(1.0, **changed)


def test_a_named_size_is_what_the_area_has():
    """To the page."""
    halves = 10
    size = 200 * ACT_TOKEN_BYTES * LAYOUT.page_tokens
    demand = Demand(1.0, ACT_TOKEN_BYTES, 8, 64, device_bytes=size)
    told = share_bytes(LAYOUT, 1200, halves, HOST_BYTES, demand)
    assert told.acts.num_acts == 200
    assert told.num_layer_pages == 1100


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_new_pages_keep_the_ratio(share):
    """All at once or one by one."""
    choose = page_chooser(share)
    at_once = choose(0, 0, 16)
    assert at_once.sum() == 16 * share
    one_by_one = []
    for n in range(16):
        num_act = int(np.sum(one_by_one))
        one_by_one += choose(num_act, n - num_act, 1).tolist()
    assert one_by_one == at_once.tolist()


def test_mini_batches_are_brought_together():
    """Requests of one kind only alternate; each half of the buffers gets both."""
    kinds = np.array([8, 8, 0, 0]), np.array([0, 0, 8, 8])
    line = PageLine(0.0, 1e-3)
    packing = Packing(lambda requests: kinds, 16, 0.5, line, line)
    requests = [object()] * 4
    assert packing.order(requests) == [0, 2, 1, 3]
    # What fits at once, or has nothing to be rebuilt, stays as it is.
    whole = Packing(lambda requests: kinds, 32, 0.5, line, line)
    assert whole.order(requests) == [0, 1, 2, 3]
    kv = np.zeros(4, np.int64), np.full(4, 9)
    plain = Packing(lambda requests: kv, 16, 0.5, line, line)
    assert plain.order(requests) == [0, 1, 2, 3]


def test_reports_say_what_was_hidden():
    """Overlap is the share of rebuilding that loads have covered."""
    report = LayerReport(0, 4, 0, 0, 0, 0.0, 1, 6, 2, 4096, 2.0, 0.5)
    assert activation_report(report) == {
        "act_pages": 6,
        "kv_pages": 2,
        "bytes_saved": 4096,
        "rebuild_s": 2.0,
        "overlap": 0.75,
    }
    totals = {
        "layerkv_act_pages": 1.0,
        "layerkv_kv_pages": 0.0,
        "layerkv_bytes_saved": 0.0,
    }
    count_report(totals, report)
    assert list(totals.values()) == [7, 2, 4096]


def test_the_emulated_link_is_the_link():
    """Of both directions or of reads, whichever is slower; else a guess."""
    told = {**ON, "emulate": "host:bandwidth=2GB,read-bandwidth=1GB,latency=0.001"}
    link = Links.known(read_options(told), None)
    assert link.is_emulated
    assert link.line(1_000_000) == PageLine(0.001, 0.001)
    assert not Links.known(read_options(ON), None).is_emulated
