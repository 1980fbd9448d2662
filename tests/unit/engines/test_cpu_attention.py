"""The attention backend's glue: what it plans, what it refuses, what it fills."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.sglang
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def module():
    """The backend's module; imports the model stack once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, where there is no CUDA
        from sgl_tiered.engines.sglang import cpu_attention

    return cpu_attention


def layer(**changes):
    """A layer as SGLang describes a dense decoder's, with changes."""
    from sglang.srt.layers.radix_attention import RadixAttention

    made = RadixAttention(8, 64, 0.125, 4, layer_id=0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_requests_are_cut_in_batch_order(module):
    """Rows follow each other, empty requests take none, slots come from the table."""
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    plan = module.plan_requests(table, [2, 0, 3], [5, 4, 10], [2, 0, 10])
    assert [(r.start, r.num_queries) for r in plan] == [(0, 2), (2, 10)]
    assert plan[0].slots.tolist() == [20, 21, 22, 23, 24]
    assert plan[1].slots.tolist() == list(range(30, 40))


def test_a_plan_outlives_a_change_of_the_table(module):
    """The slots are a copy, so that a retraction cannot change a running forward."""
    table = torch.arange(10, dtype=torch.int32).view(1, 10)
    (request,) = module.plan_requests(table, [0], [3], [1])
    table.zero_()
    assert request.slots.tolist() == [0, 1, 2]


def test_a_dense_decoder_layer_is_served(module):
    """Nothing is refused of a plain layer."""
    assert module.refused_layer(layer()) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"is_cross_attention": True}, "cross-attention"),
        ({"sliding_window_size": 128}, "sliding-window"),
        ({"logit_cap": 30.0}, "soft-cap"),
        ({"v_head_dim": 32}, "differ in size"),
        ({"xai_temperature_len": 1024}, "temperature"),
    ],
)
def test_what_is_not_served_is_named(module, changes, word):
    """Each kind of layer that would come out wrong has its own words."""
    assert word in module.refused_layer(layer(**changes))


def test_an_encoder_layer_is_named(module):
    """Bidirectional attention is not causal attention."""
    from sglang.srt.layers.radix_attention import AttentionType

    made = layer(attn_type=AttentionType.ENCODER_ONLY)
    assert "encoder_only" in module.refused_layer(made)


def runner(module_layers, **changes):
    """A model runner's facts as the factory reads them."""
    facts = {
        "model": torch.nn.ModuleList(module_layers),
        "token_to_kv_pool": object(),
        "req_to_token_pool": object(),
        "use_mla_backend": False,
        "is_hybrid_swa": False,
        "kv_cache_dtype": torch.bfloat16,
    }
    return SimpleNamespace(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "quantised"),
    ],
)
def test_a_model_that_is_not_served_stops_the_start(module, changes, word):
    """The factory refuses in one sentence that says what to use instead."""
    from sgl_tiered.errors import EngineCompatibilityError

    with pytest.raises(EngineCompatibilityError, match=word) as caught:
        module.create_cpu_attention(runner([layer()], **changes))
    assert "torch_native" in str(caught.value)


def test_one_refused_layer_among_many_stops_the_start(module):
    """All layers of the model are looked at."""
    from sgl_tiered.errors import EngineCompatibilityError

    layers = [layer(), layer(sliding_window_size=64)]
    with pytest.raises(EngineCompatibilityError, match="sliding-window"):
        module.create_cpu_attention(runner(layers))


class Pool:
    """A pool of one layer that records the order of calls."""

    def __init__(self, slots):
        self.keys = torch.full((slots, 4, 64), float("nan"))
        self.values = self.keys.clone()
        self.calls = []

    def set_kv_buffer(self, layer, where, k, v):
        self.calls.append("set")
        self.keys[where.loc], self.values[where.loc] = k, v

    def get_key_buffer(self, layer_id):
        self.calls.append("key")
        return self.keys

    def get_value_buffer(self, layer_id):
        self.calls.append("value")
        return self.values


def test_new_keys_are_stored_before_the_pool_is_read(module):
    """A forward writes, reads through the getters, and zeroes rows of padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    pool, table = Pool(8), torch.tensor([[3, 6, 1]], dtype=torch.int32)
    backend = module.TieredCpuAttention(SimpleNamespace(req_to_token=table), pool)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([3]),
        extend_seq_lens=torch.tensor([3]),
        out_cache_loc=torch.tensor([3, 6, 1]),
    )
    backend.init_forward_metadata(batch)
    q, k, v = torch.randn(5, 512), torch.randn(3, 4, 64), torch.randn(3, 4, 64)
    out = backend.forward_extend(q, k, v, layer(), batch)
    assert pool.calls == ["set", "key", "value"]
    torch.testing.assert_close(out[0].view(8, 64), v[0].repeat_interleave(2, 0))
    assert not out[3:].any()


@pytest.mark.parametrize("threads", [1, 64])
def test_a_decode_step_is_that_of_each_request_alone(module, threads):
    """By bits, in every layer; where one product leaves threads idle, one by one."""
    from sgl_tiered_kernels.paged_attention import PagedAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    kv_lens, pool = [700, 20, 21, 3, 1800], Pool(4000)
    # Requests may share slots, as those with one prefix do.
    table = torch.stack([torch.randperm(4000)[:2000] for _ in kv_lens]).to(torch.int32)
    pool.keys.normal_()
    pool.values.normal_()
    backend = module.TieredCpuAttention(SimpleNamespace(req_to_token=table), pool)
    backend._attention = PagedAttention(threads)

    def decode(rows):
        lens = torch.tensor([kv_lens[row] for row in rows])
        last = [int(table[row, kv_lens[row] - 1]) for row in rows]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor(rows),
            seq_lens=lens,
            out_cache_loc=torch.tensor(last),
        )
        backend.init_forward_metadata(batch)
        padded = torch.cat([queries[rows], queries[:1]])
        first = backend.forward_decode(padded, None, None, layer(), batch)
        again = backend.forward_decode(padded, None, None, layer(), batch)
        assert torch.equal(first, again)
        assert not first[len(rows) :].any()
        return first[: len(rows)]

    queries = torch.randn(5, 512)
    alone = torch.cat([decode([row]) for row in range(5)])
    assert torch.equal(decode(list(range(5))), alone)
    assert torch.equal(decode([4, 2, 0]), alone[[4, 2, 0]])


def test_an_unknown_attention_input_is_refused(module):
    """Sinks and the like would change the result, so they are not ignored."""
    from sgl_tiered.errors import EngineCompatibilityError

    backend = module.TieredCpuAttention(None, Pool(1))
    with pytest.raises(EngineCompatibilityError, match="sinks"):
        backend.forward_extend(None, None, None, layer(), None, sinks=torch.ones(8))
