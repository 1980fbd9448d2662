"""Layer-wise KV built as on CUDA: hooks, pool, placing, copies, attention, tiers."""

import pytest

from sgl_tiered.pipelines.stream_pool import LoadWay
from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

STORIES = ["pinned 0", "pinned 1", "pinned 2", "pageable", "guarded"]
ACTS = [f"activations {how}" for how in (0, 1, 2, "pageable", "guarded")]
OFFLOADED = [f"activations offloaded {num_bytes}" for num_bytes in (1 << 30, 5_700)]
ROUNDING = 1e-4
"""float32; a wrong page holds numbers of another request."""


@pytest.fixture(scope="module")
def told():
    """What the program saw."""
    return output_of("cuda_build_program.py")


@pytest.mark.parametrize("name", STORIES + ACTS + OFFLOADED)
def test_every_layer_is_read_where_it_lies(told, name):
    """Prefills, chunks, decode steps, a prefix from the tiers; copies in any order."""
    assert told[name]["worst"]["extend"] < ROUNDING
    assert told[name]["worst"]["decode"] < ROUNDING
    assert told[name]["copies"] > 100
    assert max(told[name]["groups"]["decode"]) > 1


def test_broken_staging_is_seen(told):
    """The negative control: the fault that the flag asks for changes answers."""
    assert told["broken"] > 100 * ROUNDING
    assert told["broken with activations"] > 100 * ROUNDING


@pytest.mark.parametrize("name", ACTS + OFFLOADED)
def test_pages_are_kept_as_activations(told, name):
    """Captured, sent down, rebuilt on a stream of their own; other stories do not."""
    assert told[name]["act_pages"] > 0
    assert told[name]["rebuilds"] > 10
    assert told["pinned 0"]["rebuilds"] == told["pinned 0"]["act_pages"] == 0


def test_activations_on_cuda_say_that_nobody_has_run_them(told):
    """Once for each server, and nothing where there are none."""
    said = [one for one in told["warnings of activations"] if "activations" in one]
    assert len(said) == 3
    assert all("not been validated on a GPU" in one for one in said)


@pytest.mark.parametrize("name", STORIES + ACTS)
def test_pages_go_down_from_where_their_layers_lie(told, name):
    """Some layers on the device, some in memory; all are in the tier's rows."""
    assert told[name]["mixed"]
    assert told[name]["stored"]


@pytest.mark.parametrize(
    ("name", "away"), list(zip(OFFLOADED, ([0, 1, 2], [0, 1]), strict=True))
)
def test_weights_that_sglang_keeps_on_the_host_are_brought_for_rebuilds(
    told, name, away
):
    """SGLang's offloader moves layers; what is brought ahead is what it computes with.

    A layer may have a part of its parameters on the device. What is lent to SGLang's
    call goes home again.
    """
    found = told[name]["offload"]
    assert found["away"] == away
    assert found["off"] < ROUNDING
    assert found["at_home"]
    assert found["from_elsewhere"] > 0
    assert found["moved"] > 0
    assert found["weight_bytes"] > 0
    assert found["from_slots"] > 0


@pytest.mark.parametrize("name", STORIES + ACTS + OFFLOADED)
def test_nothing_is_lost(told, name):
    """All ended, every layer-page and every slot is free again."""
    assert told[name]["free"] == told[name]["total"]
    assert told[name]["free_slots"] == told[name]["slots"]


def test_the_host_region_is_pinned_where_it_can_be(told):
    """Where it cannot, the log says so, and answers are the same."""
    assert told["pinned 0"]["pinned"]
    assert not told["pageable"]["pinned"]
    assert told["warnings where it is pinned"] == []
    (sentence,) = told["warnings where it is not"]
    assert "cannot pin" in sentence


def test_the_parts_are_those_of_cuda(told):
    """The start measures the link to the device, and not memory."""
    assert told["pinned 0"]["pool"] == "CudaLayeredPool"
    assert told["pinned 0"]["device"] == "LayeredStreamPool"
    assert told["pinned 0"]["measured_over_the_link"]
    assert told["pinned 0"]["served"] in [{"loads_by": way.value} for way in LoadWay]


@pytest.mark.parametrize("name", STORIES + ACTS + OFFLOADED)
def test_no_kernel_runs_for_the_first_time_under_a_forward(told, name):
    """Loads have run theirs at the start, and rebuilds where there are any."""
    wanted = {"choose", "load"} | ({"rebuild"} if name in ACTS + OFFLOADED else set())
    assert set(told[name]["warmed"]) == wanted
    assert told[name]["not_warmed"] == []


def test_copies_are_not_queued_ahead_of_a_guard(told):
    """What it has let go has ended before it is asked again."""
    assert told["pinned 0"]["ahead"]
    assert not told["guarded"]["ahead"]
    assert told["asked"] > 10


def test_another_attention_backend_is_refused(told):
    """A pool that no backend of ours has attached to is not placed."""
    for name in STORIES + ACTS:
        assert told[name]["too_early"].startswith("EngineCompatibilityError")
        assert "FlashInfer" in told[name]["too_early"]
