"""``sgl-tiered calibrate``: T_kv_gen at the model's shape, T_load_kv by the link."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.cli.calibrate import calibrate_process, calibrate_server, render
from sgl_tiered.cli.local_links import projection_of_config, read_model_config
from sgl_tiered.cli.machine import memory_facts
from sgl_tiered.cli.measure_rebuild import layer_loads, measure_rebuild
from sgl_tiered.cost.calibration import (
    FitQuality,
    MachineFacts,
    TokensFit,
    calibration_from_dict,
    calibration_to_dict,
)
from sgl_tiered.cost.fitting import LinkSample
from tests.unit.cli import synthetic_server as synthetic

CREATED = "2026-01-01T00:00:00+00:00"
PROJECTION = {
    "hidden": 256,
    "num_kv_heads": 4,
    "head_dim": 64,
    "has_rotary": True,
    "has_bias": False,
    "num_threads": 1,
}
KV_GEN = TokensFit(1e-4, 2e-6, FitQuality(6, 0.999, 0.01, 0.02))
HERE = MachineFacts("none", 2, 10**9, "Linux")
LOADS = [LinkSample(4096.0 * num, 1e-3 + num * 4e-6) for num in (16, 64, 256)]


@pytest.fixture
def asked(monkeypatch):
    """What the probe was asked for; it takes no time."""
    calls = []

    def probe(*sizes, **wishes):
        import torch

        calls.append((sizes, wishes, torch.get_num_threads()))
        return KV_GEN

    monkeypatch.setattr("sgl_tiered.engines.device.rebuild_probe.probe_kv_gen", probe)
    return calls


def test_a_server_gives_both_lines(asked):
    """The kernel's at the served shape, the link's shared out to the layers."""
    import torch

    server = synthetic.SyntheticServer(projection=PROJECTION)
    server.memory_bytes = memory_facts().total_bytes
    rng = np.random.default_rng(0)
    found, notes = calibrate_server(server, rng, 170.0, CREATED)
    assert notes == []
    assert found.rebuild.kv_gen == KV_GEN
    (sizes, wishes, num_threads), *_ = asked
    assert sizes == (256, 4, 64, torch.bfloat16, 16)
    assert wishes == {"has_rotary": True, "has_bias": False}
    assert num_threads == 1
    latency_s, bandwidth = synthetic.LINKS["host->device"]
    load = found.rebuild.load_kv
    assert load.overhead_s == pytest.approx(latency_s / 4, rel=1e-3)
    assert load.token_s == pytest.approx(4096 / 4 / bandwidth, rel=1e-3)
    assert load.quality.r2 > 0.999
    assert calibration_from_dict(calibration_to_dict(found)) == found
    text = "\n".join(render(found, notes))
    assert "rebuild layer" in text
    assert "load layer" in text


@pytest.mark.parametrize(
    ("machine", "loads", "words"),
    [
        (replace(HERE, accelerator="a GPU"), LOADS, "on CPUs only"),
        (replace(HERE, memory_bytes=5), LOADS, "another one"),
        (HERE, LOADS[:1], "two sizes"),
    ],
)
def test_what_cannot_be_measured_is_said(asked, machine, loads, words):
    """Neither line is written without the other, and the note says why."""
    found, notes = measure_rebuild(PROJECTION, synthetic.MODEL, machine, HERE, loads)
    assert found is None
    assert words in notes[0]
    assert not asked


def test_other_kv_has_no_rebuilding(asked):
    """Latent or encoded KV is left out without a word."""
    for projection, model in (
        (None, synthetic.MODEL),
        (PROJECTION, replace(synthetic.MODEL, kv_dtype="float8_e4m3fn")),
    ):
        found, notes = measure_rebuild(projection, model, HERE, HERE, LOADS)
        assert (found, notes) == (None, [])


def test_a_load_of_all_layers_is_that_of_one():
    """The tokens stay, the time is a layer's."""
    (first, *_) = layer_loads(LOADS, synthetic.MODEL)
    assert first.num_tokens == 16
    assert first.seconds == pytest.approx((1e-3 + 16 * 4e-6) / 4)


def test_without_a_server_by_the_models_folder(tmp_path, asked, monkeypatch):
    """The shape is the config's; loads are copies of memory."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "rope_theta": 1e4,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sgl_tiered.cli.calibrate._machine", lambda: HERE)
    model = read_model_config(tmp_path, 16, "auto")
    projection = projection_of_config(tmp_path)
    found, _ = calibrate_process(model, None, CREATED, projection)
    assert found.rebuild.kv_gen == KV_GEN
    assert found.rebuild.load_kv.token_s > 0
    ((sizes, wishes, _),) = asked
    assert sizes[:3] == (64, 4, 16)
    assert wishes == {"has_rotary": True, "has_bias": False}
    latent = {**config, "kv_lora_rank": 8}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    assert projection_of_config(tmp_path) is None
