"""Activations on SGLang's own attentions: what is rebuilt is what they would attend."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

REFUSED = "activations cannot be rebuilt for"


@pytest.fixture(scope="module")
def told():
    """What the program has found."""
    return output_of("projections_program.py")


@pytest.mark.parametrize(
    ("name", "kv_heads", "bias", "rotary"),
    [
        ("llama", 4, False, True),
        ("llama gqa", 2, False, True),
        ("llama gptj", 4, False, True),
        ("llama3", 4, False, True),
        ("qwen2", 2, True, True),
        ("opt", 4, True, False),
    ],
)
def test_plain_projections_are_found(told, name, kv_heads, bias, rotary):
    """Their own weights, in place; the trial has left no hooks."""
    found = told[name]
    assert isinstance(found, dict), found
    assert found.pop("layer_params") >= 3 * 64 * 64
    assert found.pop("table_is_new", True)
    assert found == {
        "layers": 2,
        "hidden": 64,
        "kv_heads": kv_heads,
        "head_dim": 16,
        "bias": bias,
        "rotary": rotary,
        "shares_weights": True,
        "hooks_left": 0,
        "kept": True,
    }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3", "keys that its projection's input does not give"),
        ("mrope", "rotary positions MRotaryEmbedding"),
        ("scaled keys", "keys that its projection's input does not give"),
        ("packed", "packed for AMX"),
        ("quantised", "quantised"),
        ("set aside", "keeps elsewhere (--offload-mode)"),
        ("other", "0 layers of Model"),
        ("kv dtype", "KV of torch.bfloat16"),
    ],
)
def test_anything_else_is_refused(told, name, why):
    """In one sentence that says what, and what to do."""
    assert told[name].startswith(REFUSED), told[name]
    assert why in told[name]
    assert told[name].endswith("leave --tiered-activations out.")


@pytest.mark.parametrize(
    ("name", "names"), [("llama", ["weight"]), ("opt", ["bias", "weight"])]
)
def test_layers_that_sglang_keeps_on_the_host_are_tried_as_well(told, name, names):
    """Of each layer what is away is known; the trial leaves everything where it was."""
    found = told["offloaded"][name]
    assert found["moved"] > 0
    assert found["away"] == {"0": names}
    assert 0 < found["slot_bytes"] < found["bytes"]
    assert found["layer_bytes"] == found["bytes"]
    assert found["at_home"]
    assert found["kept"] == [False, False]


def test_sglangs_other_offloader_takes_no_model_of_ours(told):
    """It asks the model for its experts; so its flag is refused in a sentence."""
    assert told["other offloader"].startswith("TypeError")


def test_on_a_cpu_sglang_offloads_nothing(told):
    """So the flag is taken there, and changes nothing."""
    assert told["untouched on a CPU"]


def test_a_share_that_is_named_is_taken(told):
    """Also what it asks for: bytes of a token, pages of a chunk."""
    chosen = told["chosen"]
    assert chosen["off"] is None
    assert chosen["half"]["share"] == 0.5
    assert chosen["half"]["asked"] == [64 * 4, 16]


def test_auto_weighs_link_and_cores(told):
    """Over a slow link activations are worth it; what saves nothing is refused."""
    chosen = told["chosen"]
    assert chosen["auto"]["share"] > 0.25, chosen["auto"]
    assert chosen["auto"]["asked"] == [64 * 4, 16]
    for name, why in (("auto gqa", "nothing would be saved"), ("auto unknown", "keys")):
        assert chosen[name]["share"] == 0
        assert chosen[name]["asked"] is None
        assert why in chosen[name]["reason"]


def test_a_share_that_cannot_be_is_an_error(told):
    """Of a model that is not known, and of pages that would grow."""
    chosen = told["chosen"]
    assert chosen["unknown"].startswith(REFUSED)
    assert "has 256 bytes in a layer as activations and 128 as KV" in chosen["larger"]
