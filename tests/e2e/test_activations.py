"""Pages kept as activations on a real server, in full batches: plain SGLang's bits.

The waves of ``test_layerkv_waves.py`` on a model whose activations are half of its KV,
with room for a fraction of its prompts. First of all a rebuild that leaves pages out.
"""

from dataclasses import replace

import numpy as np
import pytest
from sgl_tiered_workloads.gate import negative_control
from sgl_tiered_workloads.model import PRESETS, make_model
from sgl_tiered_workloads.server import ServerStartError
from sgl_tiered_workloads.systems import MB, Device, Tiers, tiered_spec
from sgl_tiered_workloads.waves import draw_episode

from tests.e2e.e2e_support import MODELS, stats, wait_until
from tests.e2e.test_layerkv_waves import (
    DOOMED,
    FLAGS,
    HALF_TOKENS,
    MIX,
    NUM_FORCED,
    PAGE,
    play_plain,
    played,
)

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

POOL_TOKENS = 2_080
"""A third of it is for activations."""
LAYERKV = (
    "--tiered-layerkv=on",
    # Few logical pages, so that much comes back from the tier below.
    "--tiered-layerkv-host-size=16MB",
    # Keys and values of four heads of 32, two bytes each, two halves.
    f"--tiered-layerkv-staging-size={HALF_TOKENS * 2 * 4 * 32 * 2 * 2}",
    "--tiered-load-policy=always",
    "--tiered-layerkv-decode=stream",
    "--tiered-layerkv-retain=0",
    # So that other threads copy than the one that computes.
    "--tiered-emulate=host:bandwidth=100MB",
    # A layer's weights come with each forward, over the same link.
    "--tiered-emulate-weights=64KB",
)


@pytest.fixture(scope="module")
def mha():
    """The folder of the tiny Llama with as many KV heads as heads."""
    return make_model(replace(PRESETS["tiny"], num_kv_heads=4), MODELS)


@pytest.fixture(scope="module")
def episodes():
    """An episode whose batches are forced, and one with requests to be aborted."""
    generator = np.random.default_rng(83)
    mixes = [MIX] * NUM_FORCED + [DOOMED]
    return [draw_episode(mix, generator, f"a{n}") for n, mix in enumerate(mixes)]


@pytest.fixture(scope="module")
def plain(servers, mha, episodes):
    """Plain SGLang's answers to each episode, and how to compare with them."""
    return play_plain(servers, mha, episodes)


def layered(model, share, *flags, name=None, env=None):
    """Return a server that keeps a share of its pages as activations."""
    device = Device(model, POOL_TOKENS, PAGE, FLAGS)
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", **(env or {})}
    flags = (*LAYERKV, f"--tiered-activations={share}", *flags)
    return tiered_spec(device, Tiers(32 * MB), name or f"act-{share}", flags, env)


@pytest.mark.full
def test_a_broken_rebuild_is_caught(servers, mha, episodes, plain):
    """The gate is red where one page in four is left out of what is rebuilt."""
    server = servers.get(
        layered(
            mha,
            1,
            "--tiered-fault-corrupt=staging",
            name="act-broken",
            env={"SGL_TIERED_ALLOW_FAULTS": "1"},
        )
    )
    answers = played(server, episodes[:1], plain.runs[:1], forced=True)
    negative_control({"rebuild": plain.forced(answers)})


@pytest.mark.parametrize("share", [0.5, pytest.param(1, marks=pytest.mark.full)])
def test_rebuilt_pages_give_equal_bits_in_equal_batches(
    servers, mha, episodes, plain, share
):
    """Every bit of the answers is plain's; what was kept as activations is told."""
    server = servers.get(layered(mha, share))
    result = plain.forced_on(server, episodes[:NUM_FORCED])
    assert result.passed, result.summary()
    layers = stats(server)["layerkv"]
    told = layers["activations"]
    assert told["share"] == share
    assert told["rebuild_s"] > 0
    assert 0 <= told["overlap"] <= 1
    assert layers["layerkv_act_pages"] > 0
    assert layers["layerkv_bytes_saved"] > 0
    if share < 1:
        assert layers["layerkv_kv_pages"] > layers["layerkv_act_pages"] / 4


@pytest.mark.parametrize("share", [0.5])
def test_aborts_leave_nothing_behind(servers, mha, episodes, plain, share):
    """Others go on as if nothing had been, and all places come back."""
    server = servers.get(layered(mha, share))
    reference = plain.runs[NUM_FORCED:]
    answers = played(server, episodes[NUM_FORCED:], reference)
    result = plain.free(reference, answers)
    assert result.passed, result.summary()
    gone = [one for runs in answers for run in runs for one in run.doomed]
    assert any(record.error is not None for record in gone)
    server.flush_cache()

    def is_empty():
        pages = stats(server)["layerkv"]["layer_pages"]
        return pages["free"] == pages["total"]

    wait_until(is_empty, "all layer-pages are free")


def test_a_request_is_told_of_its_activations(servers, mha):
    """Its pages by kind, and the bytes that the link did not carry."""
    server = servers.get(layered(mha, 0.5))
    prompt = list(range(10, 10 + 12 * PAGE))
    (told,) = server.generate(prompt, 4)["meta_info"]["tiered"]
    acts = told["layerkv"]["activations"]
    # Twelve full pages and the one that the answer begins.
    assert (acts["act_pages"], acts["kv_pages"]) == (7, 6)
    assert 0 <= acts["overlap"] <= 1


def test_auto_says_why_not(servers, model):
    """With grouped queries nothing would be saved; the server runs without."""
    server = servers.get(layered(model, "auto"))
    told = stats(server)["layerkv"]["activations"]
    assert told["share"] == 0
    assert "refused" in told["reason"]
    assert server.generate([5, 6, 7], 4)["meta_info"]["completion_tokens"] == 4


def test_auto_uses_a_slow_link(servers, mha):
    """Rebuilding a tiny page is nothing beside 0.8 ms for its bytes."""
    slow = "--tiered-emulate=host:bandwidth=10MB"
    server = servers.get(layered(mha, "auto", slow, name="act-slow"))
    told = stats(server)["layerkv"]["activations"]
    assert 0.25 < told["share"] <= 1
    assert told["host_rows"] > 0
    assert server.generate([5, 6, 7], 4)["meta_info"]["completion_tokens"] == 4


def test_a_share_is_refused_where_pages_would_grow(servers):
    """In one sentence, at the start."""
    narrow = make_model(replace(PRESETS["tiny"], num_kv_heads=1), MODELS)
    with pytest.raises(ServerStartError):
        servers.get(layered(narrow, 1, name="act-narrow"))
    log = next(servers.log_dir.glob("*/act-narrow-*.log")).read_text(errors="replace")
    assert "--tiered-activations: a token has 256 bytes" in log
