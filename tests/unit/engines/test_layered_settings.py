"""Layer-wise KV: what its flags mean, what they refuse, and the sizes that follow."""

from types import SimpleNamespace

import pytest

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.sglang.layered.capacity import HOST_FACTOR, plan_layers
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.option_clashes import refuse_clashes, refuse_on_cuda
from sgl_tiered.serving.option_reader import read_options
from sgl_tiered.serving.options import LayerKv, Options

LAYOUT = PageLayout(num_layers=12, page_tokens=16, token_bytes=512)
LAYERED = Options(layerkv=LayerKv())
DEVICE_TOKENS = 4096
PAGES = DEVICE_TOKENS // LAYOUT.page_tokens
ARGS = {
    "page_size": 16,
    "tp_size": 2,
    "device": "cpu",
    "disable_overlap_schedule": True,
    "enable_mixed_chunk": False,
}


def test_it_is_off_by_default():
    """Nothing is made of no flag, and of the word off."""
    assert read_options({}).layerkv is None
    assert read_options({"layerkv": "off"}).layerkv is None


def test_the_flags_are_read():
    """Sizes in bytes, auto as None and 0."""
    told = read_options(
        {
            "layerkv": "on",
            "layerkv_host_size": "64MiB",
            "layerkv_decode": "stream",
            "layerkv_retain": "3",
            "layerkv_staging_size": "1MiB",
            "layerkv_guard": "off",
        }
    ).layerkv
    assert told == LayerKv(64 << 20, "stream", 3, 1 << 20, False)
    assert read_options({"layerkv": "on"}).layerkv == LayerKv(0, "pause", None, 0)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"layerkv_retain": "2"}, "--tiered-layerkv-retain"),
        ({"layerkv": "perhaps"}, "--tiered-layerkv"),
        ({"layerkv": "on", "layerkv_retain": "-1"}, "--tiered-layerkv-retain"),
        ({"layerkv": "on", "layerkv_retain": "all"}, "--tiered-layerkv-retain"),
        ({"layerkv": "on", "layerkv_decode": "wait"}, "--tiered-layerkv-decode"),
        ({"layerkv": "on", "layerkv_host_size": "0"}, "--tiered-layerkv-host-size"),
    ],
)
def test_a_wrong_flag_is_named(settings, flag):
    """One sentence about the first setting that is wrong."""
    with pytest.raises(ConfigError) as caught:
        read_options(settings)
    assert str(caught.value).startswith(flag)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"page_size": 1}, "page-size"),
        ({"enable_mixed_chunk": True}, "mixed-chunk"),
        ({"disable_overlap_schedule": False}, "overlap"),
    ],
)
def test_what_it_was_not_shown_to_work_with_is_refused(changed, word):
    """Each in a sentence that names it; the rest passes."""
    refuse_clashes(LAYERED, SimpleNamespace(**ARGS))
    with pytest.raises(ConfigError, match=word):
        refuse_clashes(LAYERED, SimpleNamespace(**{**ARGS, **changed}))


def resolved(**changed):
    """Return what SGLang makes of flags that go with CUDA."""
    phases = {
        name: SimpleNamespace(backend=changed.pop(name, "disabled"))
        for name in ("decode", "prefill")
    }
    told = {
        "device": "cuda",
        "cuda_graph_config": SimpleNamespace(**phases),
        "disable_overlap_schedule": True,
        "attention_backend": "flashinfer",
    }
    return SimpleNamespace(**(told | changed))


def as_given(**changed):
    """Return flags as they were given; what nobody has named is None."""
    told = {"cuda_graph_config": None, "disable_cuda_graph": True}
    return SimpleNamespace(**(told | {"disable_overlap_schedule": True} | changed))


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"decode": "full"}, "--cuda-graph-backend-decode disabled"),
        ({"prefill": "breakable"}, "--cuda-graph-backend-prefill disabled"),
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
        ({"attention_backend": "triton"}, "--attention-backend flashinfer"),
        ({"decode_attention_backend": "fa3"}, "--attention-backend flashinfer"),
        ({"device": "cpu"}, "--device cpu"),
    ],
)
def test_what_cuda_cannot_do_yet_is_refused_in_one_sentence(changed, flag):
    """The sentence says what to add."""
    refuse_on_cuda(resolved())
    with pytest.raises(ConfigError) as refused:
        refuse_on_cuda(resolved(**changed))
    assert flag in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"attention_backend": "flashinfer"},
        {"disable_cuda_graph": False, "cuda_graph_config": '{"decode": {}}'},
        {
            "disable_cuda_graph": False,
            "disable_decode_cuda_graph": True,
            "cuda_graph_backend_prefill": "disabled",
        },
    ],
)
def test_flags_that_nobody_has_resolved_may_still_go_with_cuda(changed):
    """What is left open is looked at again once SGLang has filled it in."""
    refuse_on_cuda(as_given(**changed))


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"disable_cuda_graph": False}, "--cuda-graph-backend-decode disabled"),
        ({"cuda_graph_backend_decode": "full"}, "--cuda-graph-backend-decode disabled"),
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
        ({"prefill_attention_backend": "fa3"}, "--attention-backend flashinfer"),
    ],
)
def test_flags_are_refused_before_anything_is_resolved(changed, flag):
    """So that the command line ends with the sentence, and nothing is loaded."""
    with pytest.raises(ConfigError) as refused:
        refuse_on_cuda(as_given(**changed))
    assert flag in str(refused.value)


def test_the_host_region_says_how_many_tokens_are_admitted():
    """A row per logical page, one more for padding; the device keeps its size."""
    rows = 1000
    settings = LayerKv(host_bytes=rows * LAYOUT.slot_bytes)
    plan = plan_layers(LAYOUT, DEVICE_TOKENS, 1024, settings)
    assert plan.num_pages == rows - 1
    assert plan.num_layer_pages == PAGES * LAYOUT.num_layers
    assert plan.half_pages == 1024 // LAYOUT.page_tokens


def test_a_default_size_follows_the_pool():
    """Four pools, as there is memory for these few MB."""
    plan = plan_layers(LAYOUT, DEVICE_TOKENS, 1024, LayerKv())
    assert plan.num_pages == HOST_FACTOR * PAGES - 1


def test_staging_takes_a_tenth_of_the_pool_at_most():
    """A context that is longer keeps all its layers."""
    plan = plan_layers(LAYOUT, DEVICE_TOKENS, 1 << 20, LayerKv())
    assert plan.half_pages == plan.num_layer_pages // 20
    with pytest.raises(ConfigError, match="staging"):
        plan_layers(LAYOUT, DEVICE_TOKENS, 1024, LayerKv(staging_bytes=1 << 30))


def test_a_region_smaller_than_the_pool_is_refused():
    """It could not even hold what plain SGLang holds."""
    settings = LayerKv(host_bytes=PAGES * LAYOUT.slot_bytes)
    with pytest.raises(ConfigError, match="less than the device's pool"):
        plan_layers(LAYOUT, DEVICE_TOKENS, 1024, settings)


def test_a_prefetch_to_the_device_is_refused():
    """At the command line, in a sentence that says what to give."""
    values = {
        "host_size": "4MB",
        "layerkv": "on",
        "prefetch": "car",
        "prefetch_to": "device",
    }
    assert read_options({**values, "prefetch_to": "host"}).layerkv is not None
    with pytest.raises(ConfigError) as caught:
        read_options(values)
    assert str(caught.value) == (
        "--tiered-prefetch-to: device does not go with --tiered-layerkv yet; give host."
    )
