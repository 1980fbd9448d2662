"""Model shapes, profiles and the times that follow from them."""

from __future__ import annotations

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.hardware import HARDWARE, find_hardware
from sgl_tiered.sim.models import MODELS, find_model
from sgl_tiered.sim.times import DeviceTimes, times_of_profile

PUBLISHED = {
    "Llama-2-7B": 6.74e9,
    "Llama-2-13B": 13.0e9,
    "Yi-34B-200K": 34.4e9,
    "Llama-3.1-8B": 8.03e9,
    "Llama-3.1-70B": 70.6e9,
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
