"""``--tiered-calibration``: what the file says is what the planner starts from."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sgl_tiered.core.clock import SystemClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibrated import read_fitting
from sgl_tiered.cost.calibration import (
    Calibration,
    FitQuality,
    LinkFit,
    MachineFacts,
    PrefillFit,
    RebuildFit,
    TokensFit,
    write_calibration,
)
from sgl_tiered.engines.device.probe import measure_costs
from sgl_tiered.engines.sglang.served import (
    machine_facts,
    model_facts,
    projection_facts,
    report,
)
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.option_reader import read_options

LAYOUT = PageLayout(num_layers=2, page_tokens=16, token_bytes=64)
QUALITY = FitQuality(5, 1.0, 0.0, 0.0)
MODEL = torch.nn.ModuleDict(
    {"embed": torch.nn.Embedding(100, 32), "up": torch.nn.Linear(32, 64)}
)


class NotToBeTouched:
    """Stands where nothing may be measured."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was used although the file says it")


def context(page_dtype=torch.bfloat16, chunk=-1):
    """What the factory reads of SGLang's build context."""
    pool = SimpleNamespace(
        dtype=page_dtype, k_buffer=[torch.zeros(4, 1, 32, dtype=page_dtype)]
    )
    allocator = SimpleNamespace(get_kvcache=lambda: pool, size=4096)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
            dtype=torch.bfloat16,
            num_attention_heads=4,
            head_dim=8,
            vocab_size=100,
            context_len=2048,
        ),
        # What was given has no backend; what SGLang resolved has.
        server_args=SimpleNamespace(
            attention_backend=None,
            resolved_dict=lambda: {
                "served_model_name": "/models/secret/tiny",
                "model_path": "/models/secret/tiny",
                "attention_backend": "tiered_cpu",
                "chunked_prefill_size": chunk,
            },
        ),
        params=SimpleNamespace(token_to_kv_pool_allocator=allocator),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=MODEL)),
    )


@pytest.fixture
def calibration():
    """Everything measured, with figures that no probe would find."""
    return Calibration(
        created="2026-01-01T00:00:00+00:00",
        method="server",
        engine="sglang",
        model=model_facts(context(), LAYOUT),
        machine=MachineFacts("none", 2, 8 * 10**9, "Linux"),
        prefill=PrefillFit(0.5, 0.25, 0.125, None, QUALITY),
        decode=None,
        request_overhead_s=None,
        links=(
            LinkFit("host", "device", 3.0, 100.0, False, None, QUALITY),
            LinkFit("cxl", "device", 5.0, 50.0, True, None, QUALITY),
            LinkFit("disk", "host", 7.0, 10.0, False, None, QUALITY),
        ),
    )


def measure(calibration, **parts):
    given = {
        "model": NotToBeTouched(),
        "device": NotToBeTouched(),
        "host": NotToBeTouched(),
        "cxl": NotToBeTouched(),
        "disk": NotToBeTouched(),
        **parts,
    }
    return measure_costs(
        layout=LAYOUT,
        attention_width=32,
        num_device_pages=8,
        num_host_slots=8,
        num_cxl_slots=8,
        clock=SystemClock(),
        calibration=calibration,
        **given,
    )


def test_a_whole_file_leaves_nothing_to_measure(calibration):
    """The cost model has the file's figures, and no probe touches model or tiers."""
    cost, figures = measure(calibration)
    assert figures == {}
    assert cost.tiers == {TierId.HOST, TierId.CXL, TierId.DISK}
    assert cost.load_s(TierId.HOST, 200) == pytest.approx(5.0)
    assert cost.load_s(TierId.CXL, 200) == pytest.approx(9.0)
    assert cost.load_s(TierId.DISK, 20) == pytest.approx(9.0)
    assert cost.recompute_s(10, 2) == pytest.approx(0.5 + 0.5 + 0.125 * (11 + 12))


def test_what_the_file_lacks_is_measured(calibration):
    """Without a prefill in the file, the device is probed and the links are kept."""
    cost, figures = measure(replace(calibration, prefill=None), model=MODEL)
    assert set(figures) == {"flops_per_s"}
    assert cost.load_s(TierId.HOST, 200) == pytest.approx(5.0)
    assert cost.recompute_s(10, 2) < 1.0


def test_rebuilding_is_the_files_or_the_probes(calibration):
    """A file that has it leaves nothing to sample; else the link is the host's."""
    sampled = TokensFit(1e-3, 1e-4, QUALITY)
    cost, figures = measure(calibration, kv_gen=lambda: sampled)
    assert figures == {
        "kv_gen_overhead_s": 1e-3,
        "kv_gen_token_s": 1e-4,
        "kv_gen_r2": 1.0,
    }
    assert cost.rebuild.kv_gen.seconds(10) == pytest.approx(2e-3)
    # 2 x 64 bytes of a token and layer at 100 bytes/s; two layers share 3 s.
    assert cost.rebuild.load_kv.seconds(10) == pytest.approx(1.5 + 12.8)
    line = TokensFit(5.0, 2.0, QUALITY)
    whole = replace(calibration, rebuild=RebuildFit(line, line))
    cost, figures = measure(whole, kv_gen=NotToBeTouched())
    assert figures == {}
    assert cost.rebuild.kv_gen.seconds(10) == pytest.approx(25.0)
    assert measure(calibration)[0].rebuild is None


def test_a_server_without_a_tier_takes_no_link_of_it(calibration):
    """A link of a tier that is not there is left out."""
    cost, _ = measure(calibration, cxl=None, disk=None)
    assert cost.tiers == {TierId.HOST}


def test_the_flag_leads_to_the_file(calibration, tmp_path):
    """A good file is accepted as a flag and as a key, and is read for the model."""
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    settings = tmp_path / "tiers.toml"
    settings.write_text(f'calibration = "{path}"\n')
    for values in ({"calibration": str(path)}, {"config": str(settings)}):
        config = read_options(
            {"host_size": "1MB", "config": None, "calibration": None, **values}
        )
        assert config.loads.calibration == path
        read = read_fitting("--f", config.loads.calibration, calibration.model)
        assert read == calibration
    config = read_options({"host_size": "1MB", "config": None, "calibration": None})
    assert config.loads.calibration is None
    assert read_fitting("--f", config.loads.calibration, calibration.model) is None


@pytest.mark.parametrize("text", [None, "{}", "no json"])
def test_a_bad_file_is_refused_by_its_flag(tmp_path, text):
    """A file that is not there or no calibration stops the start, naming the flag."""
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_options({"host_size": "1MB", "calibration": str(path)})
    assert caught.value.setting == "--tiered-calibration"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "OPTForCausalLM"},
        {"page_tokens": 64},
        {"dtype": "float32"},
        {"kv_dtype": "float16"},
        {"num_layers": 3},
        {"num_params": 5},
        {"attention_backend": "torch_native"},
    ],
)
def test_a_file_of_another_model_is_refused(calibration, tmp_path, change):
    """Another model, page size or type is named, with both values."""
    (name, value), *_ = change.items()
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    served = replace(calibration.model, **change)
    with pytest.raises(ConfigError, match=f"{name} .*{value}") as caught:
        read_fitting("--f", path, served)
    assert caught.value.setting == "--f"
    assert "\n" not in str(caught.value)


def test_names_and_unknowns_are_not_compared(calibration, tmp_path):
    """Another name is no other model, and what the file lacks is no difference."""
    served = calibration.model
    loose = replace(served, name="other", dtype="", num_params=None)
    path = tmp_path / "calibration.json"
    write_calibration(path, replace(calibration, model=loose))
    assert read_fitting("--f", path, served) is not None


def test_the_projection_is_told_where_kv_is_plain():
    """Sizes of the pool, rotation and bias by the model; other KV has none."""
    ctx = context()
    assert projection_facts(ctx) is None
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    pool.head_num, pool.head_dim = 4, 8
    ctx.model_config.hidden_size = 32
    told = projection_facts(ctx)
    assert (told["hidden"], told["num_kv_heads"], told["head_dim"]) == (32, 4, 8)
    assert (told["has_rotary"], told["has_bias"]) == (False, False)
    layer = torch.nn.Module()
    layer.qkv_proj = torch.nn.Linear(32, 96)
    layer.register_buffer("cos_sin_cache", torch.zeros(4, 8))
    ctx.tp_worker.model_runner.model = torch.nn.Sequential(layer)
    told = projection_facts(ctx)
    assert (told["has_rotary"], told["has_bias"]) == (True, True)
    pool.dtype = torch.float16
    assert projection_facts(ctx) is None


def test_what_is_served_is_told_without_its_path():
    """The report has sizes and limits; the model's folder stays private."""
    ctx = context()
    facts = model_facts(ctx, LAYOUT)
    assert facts.name == "tiny"
    assert facts.attention_backend == "tiered_cpu"
    assert facts.chunk_tokens is None
    assert model_facts(context(chunk=512), LAYOUT).chunk_tokens == 512
    assert facts.num_params == 32 * 64 + 64
    assert facts.kv_bytes_per_token == 2 * 2 * 64
    told = report(ctx, facts, machine_facts(torch.device("cpu")), "sglang 1")
    assert "secret" not in str(told)
    assert told["vocab_tokens"] == 100
    assert told["pool_tokens"] == 4096
    assert told["machine"]["accelerator"] == "none"
