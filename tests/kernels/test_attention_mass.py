"""Attention mass, row statistics and small entries equal their references."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered_kernels.attention_mass import (  # noqa: E402
    attention_mass,
    cpu,
    row_statistics,
    small_entries,
)
from sgl_tiered_kernels.attention_mass.reference import (  # noqa: E402
    mass_reference,
    small_reference,
    statistics_reference,
)

HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (5, 1)}
SHAPES = [(1, 0), (1, 40), (7, 0), (33, 31), (64, 64), (65, 1), (16, 150)]
"""New rows, and tokens before them."""
LOCALS = (0, 1, 20)
TOLERANCE = 2e-4
"""Of a mass that is the sum of up to 65 probabilities times three heads."""


class Case:
    """One request whose rows beyond its own hold NaN."""

    def __init__(self, shape, heads, head_dim=32, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        new, before = shape
        num_heads, num_kv_heads = heads
        self.kv_len, self.first = new + before, before
        # Scores with a spread of about 3: small entries and large ones, as models have.
        self.query = 1.7 * torch.randn((new, num_heads, head_dim), generator=generator)
        keys = 1.7 * torch.randn(
            (self.kv_len, num_kv_heads, head_dim), generator=generator
        )
        self.query, self.keys = self.query.to(dtype), keys.to(dtype)
        self.scale = head_dim**-0.5
        self.positions = None

    def keep(self, generator):
        """Drop a third of the keys that were there before."""
        kept = torch.rand(self.kv_len, generator=generator) > 0.33
        kept[self.first :] = True
        self.positions = kept.nonzero().flatten()
        self.keys = self.keys[self.positions]
        return self

    @property
    def args(self):
        return self.query, self.keys, self.first, self.scale

    def move(self, device):
        self.query, self.keys = self.query.to(device), self.keys.to(device)
        if self.positions is not None:
            self.positions = self.positions.to(device)
        return self

    def new(self, *shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=self.query.device)


def check(case, device="cpu", form=None):
    """Compare all three with the references; raises on a difference.

    Args:
        case: what to compute.
        device: where.
        form: a module with the kernels, instead of the entry's choice.
    """
    query, keys, first, scale = case.args
    where = case.positions
    expected = statistics_reference(query, keys, first, scale, positions=where)
    small, visible = small_reference(query, keys, first, scale, positions=where)
    masses = {
        local: mass_reference(query, keys, first, scale, local=local, positions=where)
        for local in LOCALS
    }
    case.move(device)
    query, keys, first, scale = case.args
    where = case.positions
    shape = (query.shape[1], query.shape[0])
    maximum, lse = (torch.full(shape, math.nan, device=device) for _ in "ml")
    counts = case.new(query.shape[1], dtype=torch.int64)
    if form is None:
        maximum, lse = row_statistics(query, keys, first, scale, positions=where)
        found = small_entries(
            query, keys, maximum, first, scale, counts, positions=where
        )
        assert found == visible
    else:
        form.row_statistics(query, keys, first, scale, where, maximum, lse)
        log_share = math.log(0.01)
        form.small_entries(query, keys, None, first, scale, counts, log_share, where)
    torch.testing.assert_close(maximum.cpu(), expected[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lse.cpu(), expected[1], atol=1e-4, rtol=1e-5)
    # An entry at the very limit may fall to either side.
    assert (counts.cpu() - small).abs().max() <= 1
    for local, wanted in masses.items():
        for given in (lse, None):
            out = case.new(keys.shape[1], keys.shape[0])
            if form is None:
                attention_mass(
                    query,
                    keys,
                    given,
                    first,
                    scale,
                    out,
                    local=local,
                    positions=where,
                )
            else:
                form.attention_mass(query, keys, given, first, scale, out, local, where)
            torch.testing.assert_close(out.cpu(), wanted, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_cpu_form_equals_the_reference(shape, heads):
    """Whole prompts, chunks and single rows; with near keys and without."""
    check(Case(shape, heads))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_inputs_are_computed_in_float32(shape):
    """From bfloat16 and float16 the same comes out as from the same numbers wide."""
    for dtype in (torch.bfloat16, torch.float16):
        check(Case(shape, (4, 2), head_dim=80, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kept_keys_are_seen_by_position(shape):
    """Of a prefix with holes, a query sees what is not after it, and nothing else."""
    generator = torch.Generator().manual_seed(3)
    check(Case(shape, (4, 2), seed=5).keep(generator))


@pytest.mark.parametrize("entries", [64, 300, 1 << 20])
@pytest.mark.parametrize("shape", [(65, 1), (40, 150), (16, 150)], ids=str)
def test_blocks_have_no_seams(monkeypatch, shape, entries):
    """However small the blocks, and whether or not scores are computed once."""
    monkeypatch.setattr(cpu, "_BLOCK_ENTRIES", entries)
    monkeypatch.setattr(cpu, "_BLOCK_KEYS", 13)
    monkeypatch.setattr(cpu, "_WHOLE_ENTRIES", 0)
    check(Case(shape, (6, 2)))
    check(Case(shape, (6, 2)).keep(torch.Generator().manual_seed(4)))


def test_queries_before_all_kept_keys_see_nothing():
    """Rows without a key have -inf, add no mass, and count no entry; NaN is nowhere."""
    case = Case((4, 0), (4, 2))
    case.positions = torch.tensor([2, 3])
    case.keys = case.keys[2:]
    query, keys, first, scale = case.args
    maximum, lse = row_statistics(query, keys, first, scale, positions=case.positions)
    assert torch.isinf(maximum[:, :2]).all()
    assert torch.isinf(lse[:, :2]).all()
    assert torch.isfinite(lse[:, 2:]).all()
    check(case)


def test_sums_are_added_to_what_is_there():
    """Two halves of the queries give the mass and the counts of all of them."""
    case = Case((40, 9), (4, 2))
    query, keys, first, scale = case.args
    whole, halves = case.new(2, case.kv_len), case.new(2, case.kv_len)
    counted, summed = (case.new(4, dtype=torch.int64) for _ in "ab")
    attention_mass(query, keys, None, first, scale, whole)
    visible = small_entries(query, keys, None, first, scale, counted)
    for begin, end in ((0, 17), (17, 40)):
        rows = (query[begin:end], keys, None, first + begin, scale)
        attention_mass(*rows, halves)
        visible -= small_entries(*rows, summed)
    torch.testing.assert_close(halves, whole, atol=1e-5, rtol=1e-5)
    assert torch.equal(counted, summed)
    assert visible == 0


def test_mass_is_all_that_the_queries_give():
    """With nothing left out a row gives 1 per head; what is near is missing else."""
    case = Case((50, 30), (6, 2), dtype=torch.bfloat16)
    query, keys, first, scale = case.args
    out = case.new(2, case.kv_len)
    attention_mass(query, keys, None, first, scale, out)
    assert out.sum().item() == pytest.approx(50 * 6, rel=1e-4)
    far = case.new(2, case.kv_len)
    attention_mass(query, keys, None, first, scale, far, local=10_000)
    assert not far.any()


def test_queries_and_keys_may_be_slices_of_wider_tensors():
    """Rows that are not next to each other in memory are read as they lie; what lies
    between is NaN."""
    case = Case((33, 31), (4, 2))
    for name in ("query", "keys"):
        tensor = getattr(case, name)
        rows, heads, dim = tensor.shape
        wide = torch.full((rows, heads + 3, dim + 5), math.nan)
        wide[:, 1 : heads + 1, 2 : dim + 2] = tensor
        setattr(case, name, wide[:, 1 : heads + 1, 2 : dim + 2])
    check(case)


def test_the_share_is_of_the_largest():
    """With equal scores nothing is small; with one key far above all others are."""
    query = torch.ones((1, 1, 16))
    keys = torch.zeros((8, 1, 16))
    counts = torch.zeros(1, dtype=torch.int64)
    assert small_entries(query, keys, None, 7, 1.0, counts) == 8
    assert counts.item() == 0
    keys[3] = 1.0
    small_entries(query, keys, None, 7, 1.0, counts)
    assert counts.item() == 7
    counts.zero_()
    small_entries(query, keys, None, 7, 4.0 / 16, counts)
    assert counts.item() == 0  # exp(-4) is 1.8 %
    small_entries(query, keys, None, 7, 4.0 / 16, counts, share=0.02)
    assert counts.item() == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": torch.zeros(4, 8)}, "3 dimensions"),
        ({"query": torch.zeros(4, 3, 8)}, "do not share"),
        ({"query": torch.zeros(4, 4, 16)}, "differ in size"),
        ({"keys": torch.zeros(9, 2, 8, dtype=torch.int32)}, "must not be"),
        ({"first_position": -1}, "first_position"),
        ({"local": -1}, "local"),
        ({"out": torch.zeros(9, 2)}, "out must be"),
        ({"out": torch.zeros(2, 9, dtype=torch.float64)}, "out must be"),
        ({"out": torch.zeros(9, 2).T}, "contiguous"),
        ({"lse": torch.zeros(4, 5)}, "lse must be"),
        ({"positions": torch.arange(8)}, "positions must be"),
        ({"positions": torch.arange(9).flip(0)}, "ascend"),
        ({"positions": torch.zeros(9, dtype=torch.int64)}, "ascend"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    """One sentence says which; nothing is added."""
    out = torch.zeros(2, 9)
    args = {
        "query": torch.zeros(4, 4, 8),
        "keys": torch.zeros(9, 2, 8),
        "lse": None,
        "first_position": 5,
        "scale": 1.0,
        "out": out,
    } | changes
    with pytest.raises(ValueError, match=words):
        attention_mass(**args)
    assert not out.any()


def test_shares_and_counts_that_do_not_fit_are_refused():
    """Shares outside (0, 1], counts of another type."""
    rows = (torch.zeros(4, 4, 8), torch.zeros(9, 2, 8), None, 5, 1.0)
    for share in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="share"):
            small_entries(*rows, torch.zeros(4, dtype=torch.int64), share=share)
    with pytest.raises(ValueError, match="out must be"):
        small_entries(*rows, torch.zeros(4))


def test_nothing_gives_nothing():
    """No queries, or no keys: no mass, no entries, rows that see nothing."""
    for new, kv_len in ((0, 9), (4, 0)):
        query, keys = torch.zeros(new, 4, 8), torch.zeros(kv_len, 2, 8)
        attention_mass(query, keys, None, 5, 1.0, torch.zeros(2, kv_len))
        counts = torch.zeros(4, dtype=torch.int64)
        assert small_entries(query, keys, None, 5, 1.0, counts) == 0
        maximum, lse = row_statistics(query, keys, 5, 1.0)
        assert maximum.shape == lse.shape == (4, new)
        assert torch.isneginf(lse).all()


def check_triton(device):
    """Compare the Triton form on one device; raises on a difference."""
    from sgl_tiered_kernels.attention_mass import triton as form

    generator = torch.Generator().manual_seed(7)
    cases = [
        ((1, 0), "mha", torch.float32),
        ((33, 31), "mqa", torch.bfloat16),
        ((65, 70), "gqa", torch.float32),
        ((7, 150), "gqa", torch.float16),
    ]
    for seed, (shape, heads, dtype) in enumerate(cases):
        check(Case(shape, HEADS[heads], 40, dtype, seed), device, form)
    check(Case((70, 90), (4, 2), 64).keep(generator), device, form)
    blind = Case((4, 0), (4, 2))
    blind.positions, blind.keys = torch.tensor([2, 3]), blind.keys[2:]
    check(blind, device, form)


def test_the_interpreted_kernel_equals_the_reference(interpreted):
    """All cases, on any machine that has Triton."""
    assert interpreted == ["triton"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_compiled_kernel_equals_the_reference():
    """On a real device, through the kernels and through the entry."""
    check_triton("cuda")
    check(Case((130, 200), (8, 2), 128, torch.bfloat16), "cuda")


if __name__ == "__main__":
    check_triton("cpu")
    print("triton")
