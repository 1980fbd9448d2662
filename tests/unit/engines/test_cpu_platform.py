"""The CPU platform's defaults fill what is open and keep what was given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

# SGLang warns while it is imported on a machine without CUDA.
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


def settle(given=None, locked=(), **ours):
    """Apply the defaults to arguments as SGLang hands them over."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from sgl_tiered.engines.sglang.cpu_platform import TieredCpuPlatform

    given = given or {}
    args = SimpleNamespace(
        _raw_input=given,
        _cuda_graph_config_locked=set(locked),
        attention_backend=given.get("attention_backend") or "intel_amx",
        mem_fraction_static=given.get("mem_fraction_static"),
        cuda_graph_config=CudaGraphConfig(
            decode=PhaseConfig(backend="full"), prefill=PhaseConfig(backend="full")
        ),
        disable_overlap_schedule=False,
        **ours,
    )
    TieredCpuPlatform().apply_server_args_defaults(args)
    return args


def test_a_plain_start_gets_what_a_cpu_needs():
    """Our attention, no graph capture, and memory left for the other tiers."""
    args = settle()
    assert args.attention_backend == "tiered_cpu"
    assert args.cuda_graph_config.decode.backend == "disabled"
    assert args.cuda_graph_config.prefill.backend == "disabled"
    assert args.mem_fraction_static == 0.4


@pytest.mark.parametrize(
    "field",
    ["attention_backend", "prefill_attention_backend", "decode_attention_backend"],
)
def test_a_given_attention_backend_is_kept(field):
    """Naming any of the three backends leaves the choice to the user."""
    args = settle({field: "torch_native"})
    assert args.attention_backend != "tiered_cpu"


def test_a_given_memory_fraction_is_kept():
    """An explicit fraction is not touched."""
    assert settle({"mem_fraction_static": 0.7}).mem_fraction_static == 0.7


def test_a_given_graph_backend_is_kept():
    """Only the phases that the user left open are disabled."""
    args = settle(locked={("decode", "backend")})
    assert args.cuda_graph_config.decode.backend == "full"
    assert args.cuda_graph_config.prefill.backend == "disabled"


def test_the_name_is_a_choice_of_the_command_line_once():
    """Constructing the platform twice offers the name once."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES

    from sgl_tiered.engines.sglang.cpu_platform import TieredCpuPlatform

    TieredCpuPlatform()
    TieredCpuPlatform()
    assert ATTENTION_BACKEND_CHOICES.count("tiered_cpu") == 1


def test_the_backend_is_registered_where_a_model_runs():
    """init_backend puts the factory under the name that the arguments carry."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sgl_tiered.engines.sglang.cpu_platform import TieredCpuPlatform

    TieredCpuPlatform().init_backend()
    assert "tiered_cpu" in ATTENTION_BACKENDS


@pytest.mark.parametrize("text", ['layerkv = "on"', '[sparsity]\nsparsity = "load"'])
def test_a_file_asks_for_no_overlap_as_a_flag_does(tmp_path, text):
    """Else a server with its settings in a file would be refused for want of a flag."""
    file = tmp_path / "tiered.toml"
    file.write_text(text)
    assert settle(tiered_config=str(file)).disable_overlap_schedule
    file.write_text('layerkv = "off"')
    assert not settle(tiered_config=str(file)).disable_overlap_schedule
    # What is wrong with it is said when the settings are read.
    file.write_text("]")
    assert not settle(tiered_config=str(file)).disable_overlap_schedule
