"""Attention over rows: plain bits where nothing is dropped, else over what is kept."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.sglang
torch = pytest.importorskip("torch")

from sgl_tiered.sparse.gauge import MassGauge  # noqa: E402
from sgl_tiered.sparse.rows import RowBinding  # noqa: E402

LAYERS, TOKENS, PAGES = 2, 16, 40
HEADS, KV_HEADS, DIM = 4, 2, 16


@pytest.fixture(scope="module")
def module():
    """The backend's module; imports the model stack once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, where there is no CUDA
        from sgl_tiered.engines.sglang.sparse import attention

    return attention


class Pools:
    """One request's KV in a plain pool and in rows; other rows hold NaN."""

    def __init__(self, num_tokens, kept=None, pages=None):
        torch.manual_seed(num_tokens)
        num_pages = -(-num_tokens // TOKENS)
        self.pages = np.arange(num_pages)[::-1] * 3 + 2 if pages is None else pages
        self.binding = RowBinding(LAYERS, 4 * PAGES, TOKENS, PAGES * LAYERS * TOKENS)
        self.binding.bind(np.array([1, 4 * PAGES]))
        if kept is None:
            self.binding.bind(self.pages)
        else:
            self.binding.bind_kept(self.pages, kept)
        slots = self.binding.slots(self.pages)[:num_tokens]
        self.slots = torch.from_numpy(slots)
        shape = (LAYERS, 2, 4 * PAGES * TOKENS + TOKENS, KV_HEADS, DIM)
        self.plain = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        self.plain[:, :, self.slots] = torch.randn(
            LAYERS, 2, num_tokens, KV_HEADS, DIM
        ).to(torch.bfloat16)
        both = torch.full((2, PAGES * LAYERS * TOKENS + 1, KV_HEADS, DIM), float("nan"))
        both = both.to(torch.bfloat16)
        for layer in range(LAYERS):
            rows = torch.from_numpy(self.binding.table[layer, slots]).long()
            both[:, rows[rows >= 0]] = self.plain[layer][:, self.slots[rows >= 0]]
        table = torch.zeros(2, 2048, dtype=torch.int32)
        table[1, :num_tokens] = self.slots
        self.tables = SimpleNamespace(req_to_token=table)
        self.sparse = SimpleNamespace(
            binding=self.binding,
            rows=torch.from_numpy(self.binding.table),
            gauge=None,
            measured=set(),
            start_layer=0,
            get_key_buffer=lambda layer: both[0],
            get_value_buffer=lambda layer: both[1],
        )
        self.dense = SimpleNamespace(
            get_key_buffer=lambda layer: self.plain[layer, 0],
            get_value_buffer=lambda layer: self.plain[layer, 1],
        )


def batch(num_tokens, num_new, *, decode=False):
    mode = SimpleNamespace(is_decode_or_idle=lambda: decode)
    return SimpleNamespace(
        forward_mode=mode,
        seq_lens=torch.tensor([num_tokens]),
        extend_seq_lens=torch.tensor([num_new]),
        req_pool_indices=torch.tensor([1]),
        rids=["r"],
    )


def attended(backend, forward_batch, query, layer):
    backend.init_forward_metadata(forward_batch)
    asked = SimpleNamespace(
        layer_id=layer, tp_q_head_num=HEADS, qk_head_dim=DIM, scaling=0.25
    )
    return backend.forward_extend(
        query.view(len(query), -1), None, None, asked, forward_batch
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_new", "decode"),
    [(40, 40, False), (300, 100, False), (300, 1, True), (129, 128, False)],
)
def test_whole_pages_give_plain_bits(module, num_tokens, num_new, decode):
    """Wherever the rows lie."""
    pools = Pools(num_tokens)
    query = torch.randn(num_new, HEADS, DIM).to(torch.bfloat16)
    forward = batch(num_tokens, num_new, decode=decode)
    for layer in range(LAYERS):
        ours = attended(
            module.SparseCpuAttention(pools.tables, pools.sparse), forward, query, layer
        )
        theirs = attended(
            module.TieredCpuAttention(pools.tables, pools.dense), forward, query, layer
        )
        assert torch.equal(ours, theirs)
        assert not ours.isnan().any()


@pytest.mark.parametrize(("num_new", "decode"), [(70, False), (1, True)])
def test_dropped_tokens_are_not_read(module, num_new, decode):
    """New rows attend to what each layer has kept, and causally to each other."""
    from sgl_tiered_kernels.paged_attention import attend_reference

    num_tokens = 19 * TOKENS
    prefix = num_tokens - num_new
    rng = np.random.default_rng(0)
    kept = []
    for _ in range(LAYERS):
        stays = rng.random(num_tokens) < 0.5
        stays[prefix:] = True
        kept.append(np.flatnonzero(stays))
    pools = Pools(num_tokens, kept)
    query = torch.randn(num_new, HEADS, DIM).to(torch.bfloat16)
    forward = batch(num_tokens, num_new, decode=decode)
    backend = module.SparseCpuAttention(pools.tables, pools.sparse)
    for layer in range(LAYERS):
        ours = attended(backend, forward, query, layer)
        wanted = attend_reference(
            query, *pools.plain[layer], pools.slots[torch.from_numpy(kept[layer])], 0.25
        )
        found = ours.view(num_new, HEADS, DIM).float()
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)


def gauge(pools, *, needs=True, window=0, local=64, power=1, most=2048):
    """Return the gauge of a selection that looks at this."""
    asked = SimpleNamespace(
        needs_mass=needs, window_tokens=window, local_tokens=local, mass_power=power
    )
    return MassGauge(
        asked,
        num_layers=LAYERS,
        num_heads=KV_HEADS,
        num_slots=pools.binding.table.shape[1],
        page_tokens=TOKENS,
        max_bytes=1 << 20,
        most_queries=most,
    )


def reference_mass(pools, query, layer, num_tokens, kept, asked):
    """Each asked query's softmax over all that it sees, written out."""
    prefix, group = num_tokens - len(query), HEADS // KV_HEADS
    keys = pools.plain[layer, 0][pools.slots].float()
    mass, reads = np.zeros((KV_HEADS, num_tokens)), np.zeros(num_tokens)
    for begin, end, weight in asked.runs:
        for row in range(begin, end):
            seen = kept[kept <= prefix + row]
            far = seen[prefix + row - seen >= asked.local]
            for head in range(HEADS):
                scores = keys[seen, head // group] @ query[row, head].float()
                share = torch.softmax(scores * 0.25, dim=0).numpy() ** asked.power
                mass[head // group, far] += weight * share[: len(far)]
            reads[far] += weight
    return mass, reads


WAYS = {
    "all": {},
    "a sample": {"most": 128},
    "from near": {"local": 0},
    "squares": {"power": 2, "local": 16},
    "the window": {"needs": False, "window": 64, "local": 0},
}


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_mass_is_what_queries_gave(module, way, share):
    """Per layer and KV head, over what it has; nothing of who is not measured."""
    num_tokens, num_new = 20 * TOKENS, 200
    rng = np.random.default_rng(1)
    stays = rng.random(num_tokens) < share
    stays[num_tokens - num_new :] = True
    kept = np.flatnonzero(stays)
    pools = Pools(num_tokens, [kept] * LAYERS if share < 1.0 else None)
    backend = module.SparseCpuAttention(pools.tables, pools.sparse)
    query = torch.randn(num_new, HEADS, DIM).to(torch.bfloat16)
    forward = batch(num_tokens, num_new)
    slots = pools.slots.numpy()
    pools.sparse.gauge = made = gauge(pools, **way)
    (book,) = made.books
    attended(backend, forward, query, 1)
    assert not book.slots.read(slots)[1].any()
    pools.sparse.measured.add("r")
    attended(backend, forward, query, 1)
    mean, reads = book.slots.read(slots)
    asked = SimpleNamespace(
        runs=book.runs(num_new), local=made.local_tokens, power=made.power
    )
    wanted, wanted_reads = reference_mass(pools, query, 1, num_tokens, kept, asked)
    np.testing.assert_allclose(reads[1], wanted_reads, rtol=1e-5)
    known = wanted_reads > 0
    assert known.sum() > 50
    np.testing.assert_allclose(
        mean[1][:, known], wanted[:, known] / wanted_reads[known], rtol=1e-4, atol=1e-6
    )
    assert np.isnan(mean[1][:, ~known]).all()
    assert not reads[0].any(), "another layer's"
    # A decode asks nobody.
    attended(backend, batch(num_tokens, 1, decode=True), query[:1], 1)
    np.testing.assert_array_equal(book.slots.read(slots)[1], reads)


@pytest.mark.parametrize("window", [0, 64])
def test_chunks_add_up_to_a_prompt(module, window):
    """Passes of one prefill: all queries count, or of the window the last 64."""
    num_tokens, cuts = 18 * TOKENS, [200, 264, 288]
    pools = Pools(num_tokens)
    backend = module.SparseCpuAttention(pools.tables, pools.sparse)
    pools.sparse.measured.add("r")
    query = torch.randn(num_tokens, HEADS, DIM).to(torch.bfloat16)
    slots = pools.slots.numpy()

    def measured(begin, *ends):
        made = gauge(pools, needs=not window, window=window, local=0)
        pools.sparse.gauge = made
        for end in ends:
            attended(backend, batch(end, end - begin), query[begin:end], 0)
            begin = end
        return made.books[0].slots.read(slots)

    mean, reads = measured(0, *cuts)
    whole, whole_reads = measured(0, num_tokens)
    if not window:
        np.testing.assert_allclose(reads, whole_reads)
        np.testing.assert_allclose(mean[0], whole[0], rtol=1e-4, atol=1e-6)
        return
    # The last pass has 24 queries: the others of the window stand in the pass before.
    early = slice(0, 200)
    assert (reads[0, early] == 64.0).all()
    before, last = measured(0, *cuts[:2])[0], measured(cuts[1], num_tokens)[0]
    mixed = (24 * last[0][:, early] + 40 * before[0][:, early]) / 64
    np.testing.assert_allclose(mean[0][:, early], mixed, rtol=1e-4, atol=1e-6)
    assert (whole_reads[0, early] == 64.0).all()
