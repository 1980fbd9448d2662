"""Activations on two ranks: each has all of the input, and rebuilds its own heads."""

from dataclasses import replace

import pytest
from sgl_tiered_workloads.gate import check_equality
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.sessions import replay
from sgl_tiered_workloads.systems import MB, Tiers, plain_spec, tiered_spec

from tests.e2e.e2e_support import (
    MODELS,
    REFERENCE_POOL_TOKENS,
    record_reference,
    sequential,
    settle,
)
from tests.e2e.test_tensor_parallel import (
    CASE,
    CORES,
    LAYER_POOL_TOKENS,
    LAYERKV,
    SHAPE,
    STREAM,
    many_equal_plain,
    mixed,
    on_two_ranks,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.e2e,
    pytest.mark.skipif(len(CORES) < 2, reason="each rank needs a core"),
]


@pytest.fixture(scope="module")
def mha():
    """The folder of the tiny Llama whose ranks have pages of one size of both kinds."""
    return make_model(replace(PRESETS["tiny"], num_kv_heads=4), MODELS)


@pytest.fixture(scope="module")
def plain(servers, mha):
    """Plain SGLang's answers with two ranks: the chats, and the mixed prompts alone."""
    device = CASE.device(mha, REFERENCE_POOL_TOKENS)
    server = servers.get(on_two_ranks(plain_spec(device, "plain-mha")))
    found = record_reference(server, SHAPE)
    server.flush_cache()
    alone = sequential(server, mixed())
    servers.stop()
    return found, alone


@pytest.mark.parametrize("share", [0.5, pytest.param(1, marks=pytest.mark.full)])
def test_both_ranks_rebuild_alike(servers, mha, plain, share, may_fork):
    """A rank that had parted would have stopped the server."""
    reference, alone = plain
    device = CASE.device(mha, LAYER_POOL_TOKENS)
    flags = (
        *LAYERKV[:-2],
        "--tiered-layerkv-host-size=24MB",
        # A half holds one layer of 640 tokens on a rank, which has two heads.
        "--tiered-layerkv-staging-size=327680",
        *STREAM,
        "--tiered-emulate=host:bandwidth=100MB",
        f"--tiered-activations={share}",
    )
    spec = tiered_spec(device, Tiers(16 * MB), f"act-ranks-{share}", flags)
    # By the command line they have hash seeds of their own.
    server = servers.get(replace(on_two_ranks(spec), fork=may_fork))
    if share < 1:
        # Chats take the longest; once is enough.
        answers = sequential(server, replay(reference.chat))
        result = check_equality(
            reference.chat,
            answers,
            page_size=CASE.page_size,
            spread=reference.spread,
            min_exact_fraction=0.1,
        )
        assert result.passed, result.summary()
    many_equal_plain(server, alone, reference.spread)
    layers = settle(server)["layerkv"]
    assert layers["activations"]["rebuild_s"] > 0
    assert layers["layerkv_act_pages"] > 0
