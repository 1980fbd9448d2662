"""Model shapes, profiles and the times that follow from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.hardware import HARDWARE, find_hardware
from sgl_tiered.sim.models import MODELS, find_model
from sgl_tiered.sim.spec import SimSpec
from sgl_tiered.sim.times import DeviceTimes, times_of_profile

PUBLISHED = {
    "Llama-2-7B": 6.74e9,
    "Llama-2-13B": 13.0e9,
    "Yi-34B-200K": 34.4e9,
    "Llama-3.1-8B": 8.03e9,
    "Llama-3.1-70B": 70.6e9,
    "Llama-3.1-405B": 405.9e9,
    "Llama-3.2-1B": 1.24e9,
    "Llama-3.2-3B": 3.21e9,
    "Llama-3.3-70B": 70.6e9,
    "Qwen3-0.6B": 0.6e9,
    "Qwen3-1.7B": 1.7e9,
    "Qwen3-4B": 4.0e9,
    "Qwen3-8B": 8.2e9,
    "Qwen3-14B": 14.8e9,
    "Qwen3-32B": 32.8e9,
    "Qwen3-30B-A3B": 30.5e9,
    "Qwen3-235B-A22B": 235e9,
    "DeepSeek-V2-Lite": 15.7e9,
    "DeepSeek-V2": 236e9,
    "DeepSeek-V3": 671e9,
    "DeepSeek-R1": 671e9,
    "OPT-6.7B": 6.7e9,
    "OPT-13B": 13.0e9,
    "OPT-30B": 30.0e9,
    "OPT-66B": 66.0e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_agree_with_the_published_number(name: str) -> None:
    """Within 3 %: the matrices are counted, norms and biases are not."""
    assert find_model(name).num_params == pytest.approx(PUBLISHED[name], rel=0.03)
    assert find_model(name).source


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("Qwen3-235B-A22B", 22e9),
        ("DeepSeek-V2-Lite", 2.4e9),
        ("DeepSeek-V2", 21e9),
        ("DeepSeek-V3", 37e9),
    ],
)
def test_a_token_passes_only_its_experts(name: str, active: float) -> None:
    """The published parameters of a token, again within 3 %."""
    assert find_model(name).num_compute_params == pytest.approx(active, rel=0.03)


def test_latent_attention_keeps_one_vector_on_every_rank() -> None:
    """DeepSeek-V3: 576 numbers a layer (its paper, section 2.1), however many ranks."""
    model = find_model("DeepSeek-V3")
    assert model.kv_token_bytes == 61 * 576 * 2
    assert model.kv_copies(8) == 8
    server = SimSpec(model="DeepSeek-V3", hardware="H200", tensor_parallel=8).server()
    assert server.kv_token_bytes == model.kv_token_bytes


def test_a_head_of_keys_is_the_least_that_a_rank_has() -> None:
    """8 heads of keys on 16 ranks: each is there twice."""
    model = find_model("Llama-3.1-70B")
    assert (model.kv_copies(4), model.kv_copies(8), model.kv_copies(16)) == (1, 1, 2)
    server = SimSpec(model="Llama-3.1-70B", tensor_parallel=16).server()
    assert server.kv_token_bytes == model.kv_token_bytes // 8


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4_096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2_048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("config", "name"), [(CONFIG, "Qwen3-8B"), (DEEPSEEK, "DeepSeek-V3")]
)
def test_a_config_file_gives_the_shape_of_the_table(
    tmp_path: Path, config: dict[str, object], name: str
) -> None:
    """By the file or by its folder; the same model, so the same times and bytes."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    known = find_model(name)
    for path in (tmp_path, tmp_path / "config.json"):
        read = find_model(str(path))
        assert read.num_params == known.num_params
        assert read.num_compute_params == known.num_compute_params
        assert read.kv_token_bytes == known.kv_token_bytes
        assert read.weight_bytes == known.weight_bytes
        assert read.attention_width == known.attention_width


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not understood"),
        ("[]", "not understood"),
        ('{"hidden_size": 4}', "num_attention_heads"),
        (json.dumps(CONFIG | {"num_hidden_layers": -1}), "num_hidden_layers"),
        (json.dumps(CONFIG | {"hidden_size": "big"}), "hidden_size"),
        (json.dumps(CONFIG | {"num_experts": 4, "num_experts_per_tok": 9}), "experts"),
    ],
)
def test_a_config_file_that_says_too_little_is_refused(
    tmp_path: Path, text: str, word: str
) -> None:
    """In a sentence with the key."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        find_model(str(path))


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
        "LLAMA-3.1-8b",
    ],
)
def test_a_repository_name_is_the_model(name: str) -> None:
    """Its owner, and what it was trained for, do not change the shape."""
    assert find_model(name).name == "Llama-3.1-8B"


@pytest.mark.parametrize(
    "name", ["H100", "H200", "B200", "A100-80", "MI300X", "L40S", "H800"]
)
def test_the_devices_people_have_are_there(name: str) -> None:
    """And hold a model of 8B."""
    assert SimSpec(hardware=name, model="Qwen3-8B").server().device_tokens > 10_000


def test_kv_bytes_are_those_that_the_papers_print() -> None:
    """131,072 B per token of Llama-3.1-8B; 2.6 GB per 2k tokens of OPT-30B (CaR)."""
    assert find_model("Llama-3.1-8B").kv_token_bytes == 131_072
    assert find_model("OPT-30B").kv_token_bytes * 2_000 == pytest.approx(
        2.6e9, rel=0.06
    )


def test_every_number_has_a_source() -> None:
    """A profile without one could not be checked."""
    assert len(MODELS) == len(PUBLISHED)
    for profile in HARDWARE.values():
        assert profile.source
        assert profile.host.source
        assert profile.peer.source


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    """So that a typing error costs one try."""
    with pytest.raises(ConfigError, match="H800"):
        find_hardware("H900")
    with pytest.raises(ConfigError, match="OPT-13B"):
        find_model("OPT-14B")


def test_a_prefill_follows_eq_3_of_layerkv() -> None:
    """2 operations per parameter and token, attention over (query, key) pairs."""
    hardware, model = find_hardware("L20"), find_model("Llama-2-7B")
    times = times_of_profile(hardware, model)
    flops = 2 * model.num_compute_params * 4_096
    flops += 4 * model.num_layers * model.attention_width * 4_096 * 4_097 / 2
    alone_s = flops / (hardware.flops_per_s * hardware.compute_share)
    assert times.prefill_s([(0, 4_096)]) - times.prefill_overhead_s == pytest.approx(
        alone_s
    )


def test_a_small_batch_reads_all_weights() -> None:
    """One token cannot be faster than the memory, in decode and in prefill."""
    hardware, model = find_hardware("H200"), find_model("Llama-3.1-8B")
    times = times_of_profile(hardware, model)
    read_s = model.weight_bytes / (hardware.memory_bytes_per_s * hardware.memory_share)
    assert times.decode_step_s(1, 0) >= read_s
    assert times.prefill_s([(0, 1)]) >= read_s


def test_tensor_parallelism_divides_and_costs_an_all_reduce() -> None:
    """Four devices are faster than one, and less than four times."""
    hardware, model = find_hardware("L20"), find_model("Llama-3.1-70B")
    one, four = (
        times_of_profile(hardware, model, tensor_parallel=num).prefill_s([(0, 2_048)])
        for num in (1, 4)
    )
    assert one / 4 < four < one


def test_times_of_nothing_are_refused() -> None:
    """A simulation without time would not end in order."""
    with pytest.raises(ConfigError, match="no time"):
        DeviceTimes(0, 0, 0, 0, 0, 0)
