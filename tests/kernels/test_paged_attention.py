"""Paged attention on a CPU equals the float32 reference, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sgl_tiered_kernels.paged_attention import (
    DecodeBatch,
    Gathered,
    PagedAttention,
    RequestRows,
    attend_reference,
    cpu,
    padded_length,
    plan_decode,
)

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
HEADS = {"mha": (4, 4), "gqa": (8, 4), "mqa": (8, 1)}


class Case:
    """A pool whose unused slots hold NaN, and the requests that live in it."""

    def __init__(self, lengths, heads, head_dim, dtype, *, page_size=16, seed=0):
        gen = torch.Generator().manual_seed(seed)
        num_heads, num_kv_heads = heads
        tables, pages = (
            [],
            torch.randperm(
                sum(-(-n // page_size) for n, _ in lengths) + 3, generator=gen
            ).tolist(),
        )
        for kv_len, _ in lengths:
            mine = [pages.pop() for _ in range(-(-kv_len // page_size))]
            slots = [p * page_size + i for p in mine for i in range(page_size)]
            tables.append(torch.tensor(slots[:kv_len], dtype=torch.int32))
        num_slots = (sum(-(-n // page_size) for n, _ in lengths) + 3) * page_size
        shape = (num_slots, num_kv_heads, head_dim)
        self.keys = torch.full(shape, float("nan"), dtype=dtype)
        self.values = self.keys.clone()
        for table in tables:
            where = table.long()
            size = (len(where), num_kv_heads, head_dim)
            self.keys[where] = torch.randn(size, generator=gen).to(dtype)
            self.values[where] = torch.randn(size, generator=gen).to(dtype)
        total = sum(n for _, n in lengths)
        self.query = torch.randn((total, num_heads, head_dim), generator=gen).to(dtype)
        self.requests, start = [], 0
        for table, (_, n) in zip(tables, lengths, strict=True):
            self.requests.append(RequestRows.from_table(start, n, table))
            start += n
        self.scale = head_dim**-0.5
        self.dtype = dtype

    def run(self, attention=None):
        out = torch.full_like(self.query, float("nan"))
        attention = attention or PagedAttention(num_threads=2)
        for request in self.requests:
            attention.attend(
                self.query, self.keys, self.values, request, self.scale, out
            )
        return out

    def check(self):
        out = self.run()
        for r in self.requests:
            rows = slice(r.start, r.start + r.num_queries)
            expected = attend_reference(
                self.query[rows], self.keys, self.values, r.slots, self.scale
            )
            torch.testing.assert_close(
                out[rows].float(), expected, rtol=0, atol=TOLERANCE[self.dtype]
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 63, 130])
def test_a_whole_prompt_matches_the_reference(kv_len, heads, head_dim, dtype):
    """Without a prefix every row sees itself and what came before it."""
    Case([(kv_len, kv_len)], heads, head_dim, dtype).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(
    ("prefix", "new"), [(1, 1), (15, 17), (16, 16), (17, 63), (63, 1), (1000, 16)]
)
def test_new_rows_behind_a_prefix_match_the_reference(prefix, new, heads, dtype):
    """With a cached prefix the mask is rectangular and aligned to the last row."""
    Case([(prefix + new, new)], heads, 64, dtype).check()


def test_more_rows_than_one_product_holds_match_the_reference(monkeypatch):
    """A chunk of more rows than one masked product holds is cut without a seam."""
    monkeypatch.setattr(cpu, "_MAX_ROWS", 128)
    Case([(430, 300), (200, 70)], (4, 2), 64, torch.bfloat16).check()


def test_queries_may_be_a_slice_of_a_wider_projection():
    """Rows of q that are not next to each other in memory are read as they lie."""
    for lengths in ([(90, 90)], [(90, 5)]):
        case = Case(lengths, (8, 4), 64, torch.bfloat16)
        wide = torch.full((len(case.query), 16, 64), float("nan"), dtype=case.dtype)
        wide[:, 4:12] = case.query
        case.query = wide[:, 4:12]
        case.check()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_a_mixed_batch_matches_the_reference(page_size, head_dim):
    """Decoding, whole and chunked requests of one batch are all computed right."""
    lengths = [(1, 1), (17, 17), (1000, 16), (63, 1), (16, 1), (131, 68)]
    Case(lengths, (8, 4), head_dim, torch.bfloat16, page_size=page_size).check()


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    """A request's output is the same bits alone and among others."""
    case = Case([(300, 40), (77, 77), (513, 1)], (8, 4), 64, torch.bfloat16)
    together = case.run()
    for request in case.requests:
        alone = torch.full_like(together, float("nan"))
        PagedAttention(num_threads=2).attend(
            case.query, case.keys, case.values, request, case.scale, alone
        )
        rows = slice(request.start, request.start + request.num_queries)
        assert torch.equal(alone[rows], together[rows])
        assert torch.isnan(alone).sum() == alone.numel() - alone[rows].numel()


def test_scratch_of_a_longer_request_does_not_leak_into_a_shorter_one():
    """NaN left in the scratch buffer by one request never reaches the next."""
    case = Case([(200, 1), (33, 33)], (8, 4), 64, torch.bfloat16)
    case.keys[case.requests[0].slots] = float("nan")
    case.values[case.requests[0].slots] = float("nan")
    out = case.run()
    assert torch.isnan(out[0]).all()
    assert not torch.isnan(out[1:]).any()


def test_consecutive_slots_take_the_copy_path_with_the_same_result():
    """Slots in a row are recognised, and give the same bits as a gather."""
    case = Case([(128, 16)], (8, 4), 64, torch.bfloat16, page_size=128)
    (request,) = case.requests
    assert request.first_slot == int(request.slots[0])
    by_copy = case.run()
    case.requests = [RequestRows(0, 16, request.slots, -1)]
    assert torch.equal(by_copy, case.run())


def test_scattered_slots_with_matching_ends_are_not_taken_for_a_run():
    """First and last slot alone do not make a run."""
    row = torch.tensor([4, 6, 5, 7], dtype=torch.int32)
    assert RequestRows.from_table(0, 1, row).first_slot == -1


@pytest.mark.parametrize("num_threads", [1, 2, 64])
def test_the_number_of_threads_only_changes_who_does_the_work(num_threads):
    """However the heads are split, the reference is met."""
    case = Case([(150, 3)], (8, 2), 64, torch.float32)
    out = case.run(PagedAttention(num_threads=num_threads))
    expected = attend_reference(
        case.query, case.keys, case.values, case.requests[0].slots, case.scale
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_the_mask_table_grows_with_the_context():
    """A longer context after a short one is masked as on a fresh instance."""
    attention = PagedAttention(num_threads=2)
    Case([(40, 4)], (8, 4), 64, torch.bfloat16).run(attention)
    case = Case([(2500, 4)], (8, 4), 64, torch.bfloat16)
    assert torch.equal(case.run(attention), case.run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("head_dim", [64, 80])
def test_a_decode_step_in_one_product_gives_the_bits_of_single_ones(
    heads, head_dim, dtype
):
    """Whatever the others' lengths; slots that are no one's are not looked at."""
    kv_lens = [1, 16, 63, 64, 65, 500, 513, 1300, 700, 2]
    case = Case([(n, 1) for n in kv_lens], heads, head_dim, dtype)
    case.check()
    alone = case.run()
    attention = PagedAttention(num_threads=2)
    out = torch.full_like(case.query, float("nan"))
    batch = DecodeBatch.from_requests(case.requests, dtype)
    attention.attend_decode(case.query, case.keys, case.values, batch, case.scale, out)
    assert torch.equal(out, alone)


@given(kv_lens=st.lists(st.integers(1, 9000), max_size=60))
def test_decode_steps_are_grouped_by_length(kv_lens):
    """Each request once; little padding, and no product that is too large."""
    requests = [
        RequestRows(start, 1, torch.zeros(kv_len, dtype=torch.int64), -1)
        for start, kv_len in enumerate(kv_lens)
    ]
    groups = plan_decode(requests)
    assert sorted(one.start for group in groups for one in group) == list(
        range(len(kv_lens))
    )
    for group in groups:
        lengths = [one.slots.numel() for one in group]
        padding = max(lengths) * len(group) - sum(lengths)
        assert padding <= cpu._CALL_TOKENS
        assert len(group) == 1 or max(lengths) * len(group) <= cpu._BATCH_TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(
    ("kv_len", "num_new", "runs"),
    [(300, 5, [(16, 288)]), (300, 300, []), (130, 2, [(0, 64), (96, 112)])],
)
def test_what_is_gathered_already_is_read_in_place(dtype, heads, kv_len, num_new, runs):
    """By bits as from the cache, which is not read there; padding may hold anything."""
    case = Case([(kv_len, num_new)], heads, 64, dtype)
    expected = case.run()
    (request,) = case.requests
    shape = (2, padded_length(kv_len) + 64, *case.keys.shape[1:])
    pair = torch.full(shape, float("nan"), dtype=dtype)
    missing, at = [], 0
    for begin, end in runs:
        slots = request.slots[begin:end]
        for cache, target in zip((case.keys, case.values), pair, strict=True):
            target[begin:end] = cache[slots]
            cache[slots] = float("nan")
        missing.append((at, begin))
        at = end
    missing.append((at, kv_len))
    out = torch.full_like(case.query, float("nan"))
    PagedAttention(num_threads=2).attend(
        case.query,
        case.keys,
        case.values,
        request,
        case.scale,
        out,
        Gathered(pair, missing),
    )
    assert torch.equal(out, expected)
    assert pair[:, padded_length(kv_len) :].isnan().all()
