"""Sums of attention inside the server: what is added, what is left out, who may ask."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.sglang
torch = pytest.importorskip("torch")

from sgl_tiered_kernels.attention_mass.reference import (  # noqa: E402
    mass_reference,
    small_reference,
)

from sgl_tiered.cli.profiled_server import read_report  # noqa: E402

LAYERS, START, HEADS, KV_HEADS, DIM, LOCAL = 2, 3, 4, 2, 16, 5
SCALE = 0.6


@pytest.fixture(scope="module")
def profiling():
    """The module; imports the model stack once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, where there is no CUDA
        from sgl_tiered.engines.sglang import profiling

    return profiling


@pytest.fixture(scope="module")
def attention():
    """The backend's module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sgl_tiered.engines.sglang import cpu_attention

    return cpu_attention


class Prompt:
    """A prompt's queries and keys of all layers, its keys on scattered slots."""

    def __init__(self, num_tokens=40):
        generator = torch.Generator().manual_seed(0)
        shape = (LAYERS, num_tokens, HEADS, DIM)
        self.query = 1.5 * torch.randn(shape, generator=generator)
        self.slots = torch.randperm(60, generator=generator)[:num_tokens]
        self.cache = torch.full((LAYERS, 60, KV_HEADS, DIM), float("nan"))
        shape = (LAYERS, num_tokens, KV_HEADS, DIM)
        self.keys = torch.randn(shape, generator=generator)
        self.cache[:, self.slots] = self.keys

    def add(self, sums, begin, end, more=()):
        """Add one pass over these tokens, beside more requests."""
        from sgl_tiered_kernels.paged_attention import RequestRows

        rows = RequestRows.from_table(0, end - begin, self.slots[:end])
        for number in range(LAYERS):
            layer = SimpleNamespace(layer_id=START + number, scaling=SCALE)
            query, keys = self.query[number, begin:end], self.cache[number]
            sums.add(layer, query, keys, [rows, *more])


@pytest.fixture
def prompt():
    return Prompt()


@pytest.fixture
def sums(profiling):
    return profiling.AttentionSums(LAYERS, START, LOCAL)


def check(report, prompt, begin, end):
    """Compare a report with the references over these queries."""
    assert (report.first, report.num_queries) == (begin, end - begin)
    assert report.num_kv_heads == KV_HEADS
    for number in range(LAYERS):
        args = (prompt.query[number, begin:end], prompt.keys[number, :end])
        small, visible = small_reference(*args, begin, SCALE)
        mass = mass_reference(*args, begin, SCALE, local=LOCAL).sum(dim=0)
        assert report.visible == visible
        np.testing.assert_array_equal(report.small[number], small.numpy())
        np.testing.assert_allclose(report.mass[number], mass.numpy(), atol=1e-4)


@pytest.mark.parametrize("cuts", [[0, 40], [0, 16, 17, 40], [24, 32, 40]], ids=str)
def test_chunks_sum_up_to_the_prompt(sums, prompt, cuts):
    """Whole, in chunks, or behind a cached prefix, over JSON and back."""
    for begin, end in pairwise(cuts):
        prompt.add(sums, begin, end)
    report = read_report(json.loads(json.dumps(sums.report())))
    assert report.num_skipped == 0
    check(report, prompt, cuts[0], cuts[-1])


def test_passes_of_others_are_left_out_and_counted(sums, prompt):
    """Two requests in a pass, or one that does not go on where the last ended."""
    prompt.add(sums, 0, 16)
    prompt.add(sums, 16, 32, more=[None])
    prompt.add(sums, 20, 30)
    prompt.add(sums, 16, 40)
    report = read_report(sums.report())
    assert report.num_skipped == 2
    check(report, prompt, 0, 40)


def test_nothing_was_seen_yet(sums):
    """Sums of no pass are zero, and can be told."""
    report = read_report(sums.report())
    assert report.num_queries == report.visible == 0
    assert report.mass.shape == (LAYERS, 0)


def backend_with(attention, prompt):
    """A backend over a pool of one layer that holds the prompt's keys."""
    pool = SimpleNamespace(
        get_key_buffer=lambda number: prompt.cache[0],
        get_value_buffer=lambda number: prompt.cache[1],
        layer_num=LAYERS,
        start_layer=START,
    )
    table = SimpleNamespace(req_to_token=prompt.slots[None].to(torch.int32))
    return attention.TieredCpuAttention(table, pool)


def forward(backend, prompt, mode):
    """Run one layer's attention of the last token, or of all."""
    num_tokens = prompt.query.shape[1]
    new = 1 if mode.is_decode_or_idle() else num_tokens
    batch = SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([num_tokens]),
        extend_seq_lens=torch.tensor([new]),
    )
    backend.init_forward_metadata(batch)
    layer = SimpleNamespace(
        layer_id=START, scaling=SCALE, tp_q_head_num=HEADS, qk_head_dim=DIM
    )
    return backend.forward_extend(prompt.query[0, -new:], None, None, layer, batch)


def test_the_answers_are_the_same_while_sums_are_on(attention, profiling, prompt):
    """Attention gives the same bits; prefills are summed up, decoding is not."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = backend_with(attention, prompt)
    assert backend.sums is None
    off = forward(backend, prompt, ForwardMode.EXTEND)
    backend.sums = profiling.AttentionSums(LAYERS, START, LOCAL)
    forward(backend, prompt, ForwardMode.DECODE)
    assert backend.sums.report()["num_queries"] == 0
    on = forward(backend, prompt, ForwardMode.EXTEND)
    assert torch.equal(on, off)
    assert backend.sums.report()["num_queries"] == 40


def scheduler_with(backend, num_ranks=1, weights="ab"):
    parts = SimpleNamespace(agreement=SimpleNamespace(num_ranks=num_ranks))
    tiered = SimpleNamespace(parts=parts, weights=SimpleNamespace(value=weights))
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
        tree_cache=SimpleNamespace(tiered=tiered),
    )


def test_sums_begin_anew_and_end(attention, profiling, prompt):
    """Each beginning forgets what was; -1 ends them, and the state says so."""
    backend = backend_with(attention, prompt)
    scheduler = scheduler_with(backend)
    assert profiling.profile_state(scheduler)["sums"] is None
    profiling.switch_profile(scheduler, LOCAL)
    prompt.add(backend.sums, 0, 16)
    state = profiling.profile_state(scheduler)
    assert (state["refused"], state["fingerprint"]) == ("", "ab")
    assert (state["sums"]["num_queries"], state["sums"]["local_tokens"]) == (16, LOCAL)
    profiling.switch_profile(scheduler, 0)
    state = profiling.profile_state(scheduler)
    assert (state["sums"]["num_queries"], state["sums"]["local_tokens"]) == (0, 0)
    profiling.switch_profile(scheduler, -1)
    assert backend.sums is None


def test_servers_that_cannot_be_profiled_say_why(attention, profiling, prompt):
    """Another backend, a backend that reads keys elsewhere, several ranks."""
    ours = backend_with(attention, prompt)

    class Other(attention.TieredCpuAttention):
        """Reads keys in another way."""

    others = {
        "CPU backend": scheduler_with(object()),
        "NoneType": scheduler_with(None),
        "layerkv": scheduler_with(Other(None, None)),
        "tp-size": scheduler_with(ours, num_ranks=2),
    }
    for words, scheduler in others.items():
        state = profiling.profile_state(scheduler)
        assert words in state["refused"]
        assert state["sums"] is None
    assert profiling.refused_profile(scheduler_with(ours)) == ""
