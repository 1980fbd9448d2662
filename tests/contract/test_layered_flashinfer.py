"""SGLang's FlashInfer backend over layers: right answers from stand-in kernels."""

import pytest

from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

ROUNDING = 1e-4
"""float32; a wrong page holds numbers of another size altogether."""


@pytest.fixture(scope="module")
def told():
    """What the program saw."""
    # Fresh: what modules of ours hook when they are imported is looked at.
    return output_of("flashinfer_program.py", fresh=True)


def test_every_layer_is_read_where_it_lies(told):
    """Prefills with and without a prefix, and decode steps, layers on both sides."""
    assert told["worst"]["extend"] < ROUNDING
    assert told["worst"]["decode"] < ROUNDING
    assert told["streamed"] > told["streamed_in_prefill"] > 0


def test_stale_staging_is_caught(told):
    """The negative control: pages that are not copied change the answers."""
    assert told["broken"] > 1000 * ROUNDING


def test_batches_of_one_and_of_several_groups_were_run(told):
    """Both forms of a plan, in both kinds of forward."""
    for kind in ("extend", "decode"):
        assert max(told["groups"][kind]) > 1
    assert min(told["groups"]["extend"]) == 1


def test_mini_batches_are_read_where_they_lie(told):
    """Requests in another order than their rows, in several groups and in one."""
    packed = told["packed"]
    assert packed["orders"] == [[1, 2, 0], [1, 2, 0], [1, 0], [1, 0]]
    assert min(packed["groups"][:2]) > 1
    assert packed["groups"][2:] == [1, 1]
    for kind in ("extend", "decode"):
        assert packed["worst"][kind] < ROUNDING


def test_a_plan_serves_all_layers(told):
    """One plan per forward and group; the runs are as many as layers."""
    assert told["plans"] == len(told["groups"]["decode"])
    assert told["runs"] == 3 * told["plans"]


def test_cuda_graphs_are_refused_in_one_sentence(told):
    """The sentence says what to add."""
    assert told["refused"].startswith("EngineCompatibilityError")
    assert "--cuda-graph-backend-decode disabled" in told["refused"]
    assert "\n" not in told["refused"]


def test_it_says_at_start_that_no_gpu_has_seen_it(told):
    """Once, in one sentence."""
    (sentence,) = told["logged"]
    assert "has not been validated on a GPU" in sentence
    assert "\n" not in sentence


def test_the_pool_comes_in_on_cuda_where_layers_are_planned(told):
    """SGLang's CUDA platform answers as before everywhere else."""
    hooked = told["hooked"]
    assert hooked["before"] == [None, None, None]
    assert hooked["mla"] is None
    places, planned = hooked["pool"].index("CudaPlaces"), hooked["pool"]
    assert places < planned.index("LayeredPool") < planned.index("MHATokenToKVPool")
    assert "LayeredAllocator" in hooked["allocator"]
    assert "PagedTokenToKVPoolAllocator" in hooked["allocator"]
    assert hooked["base_is_untouched"] is True


def test_flashinfer_is_registered_and_chosen_where_layers_are(told):
    """The backend comes in with the pool; another pool gets SGLang's own."""
    hooked = told["hooked"]
    assert hooked["unregistered"]
    assert hooked["registered_once"]
    assert hooked["plain"] == "plain"
    assert hooked["defaults"] == [None, "flashinfer"]


def test_the_plugin_joins_it_where_sglang_runs_on_cuda(told):
    """Nothing stands around SGLang's platform anywhere else."""
    joined = told["joined"]
    assert joined["here"] == []
    assert set(joined["cuda"]) == {
        "apply_server_args_defaults",
        "get_kv_pool_cls",
        "get_paged_allocator_cls",
    }


def test_a_cuda_server_is_asked_for_what_it_needs(told):
    """One sentence with the flag to add, on CUDA and with layers only."""
    joined = told["joined"]
    assert "--cuda-graph-backend-decode disabled" in joined["graphs"]
    assert "--disable-overlap-schedule" in joined["overlap"]
    assert "--attention-backend flashinfer" in joined["backend"]
    for name in ("on_this", "without_layers", "right", "chosen"):
        assert joined[name] == "", name
    assert not any("\n" in str(sentence) for sentence in joined.values())


def test_methods_take_what_sglang_passes(told):
    """The signatures of what is overridden are SGLang's."""
    for theirs, ours in told["parameters"].values():
        assert ours == theirs
