"""The page arithmetic of FlashInfer over layers, against a naive gather."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sgl_tiered.engines.device.indices import (  # noqa: E402
    fill_slots,
    leading_pages,
    new_token_pages,
    page_positions,
    page_starts,
    request_rows,
)

requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8
)
"""Per request: tokens of context, new tokens."""
PAGES = st.sampled_from([1, 2, 3, 16])


class Batch:
    """Requests with logical pages, and one layer's place of each page."""

    def __init__(self, shape, page_tokens, seed):
        rng = np.random.default_rng(seed)
        self.page_tokens = page_tokens
        self.context = np.array([context for context, _ in shape])
        self.new = np.array([new for _, new in shape])
        counts = -(-(self.context + self.new) // page_tokens)
        self.indptr = np.concatenate([[0], np.cumsum(counts)])
        total = int(counts.sum())
        logical = rng.permutation(3 * total)[:total] + 1
        self.places = rng.permutation(5 * total)[:total].astype(np.int32)
        self.place_of = dict(zip(logical.tolist(), self.places.tolist(), strict=True))
        self.pages = [
            logical[begin:end]
            for begin, end in zip(self.indptr, self.indptr[1:], strict=False)
        ]

    def logical_slots(self, request, begin, end):
        """Return SGLang's slots of a request's tokens."""
        tokens = np.arange(begin, end)
        pages = self.pages[request][tokens // self.page_tokens]
        return pages * self.page_tokens + tokens % self.page_tokens

    def naive(self, slots):
        """Return where tokens lie, one by one."""
        return [
            self.place_of[slot // self.page_tokens] * self.page_tokens
            + slot % self.page_tokens
            for slot in slots.tolist()
        ]


def filled(slots, places, page_tokens):
    """Return what the buffer of a plan over ``slots`` holds for a layer."""
    out = torch.from_numpy(slots.astype(np.int32))
    positions, offsets = page_positions(out, page_tokens), out % page_tokens
    starts = torch.from_numpy(page_starts(places, page_tokens))
    fill_slots(out, starts, positions, offsets)
    return out.tolist()


@given(shape=requests, page_tokens=PAGES, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_whole_requests_are_read_where_they_lie(shape, page_tokens, seed):
    """A decode's plan, or a prefill's over all tokens."""
    batch = Batch(shape, page_tokens, seed)
    slots = np.concatenate(
        [
            batch.logical_slots(request, 0, context + new)
            for request, (context, new) in enumerate(shape)
        ]
    )
    assert filled(slots, batch.places, page_tokens) == batch.naive(slots)


@given(shape=requests, page_tokens=PAGES, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_prefixes_are_read_where_they_lie(shape, page_tokens, seed):
    """A prefill's plan over what was there before; some requests may have nothing."""
    batch = Batch(shape, page_tokens, seed)
    slots = np.concatenate(
        [
            batch.logical_slots(request, 0, context)
            for request, (context, _) in enumerate(shape)
        ]
    )
    kept = leading_pages(batch.indptr, batch.context, page_tokens)
    assert filled(slots, batch.places[kept], page_tokens) == batch.naive(slots)


@given(shape=requests, page_tokens=PAGES, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_new_tokens_are_written_behind_their_context(shape, page_tokens, seed):
    """Also in the middle of a page that has tokens already."""
    batch = Batch(shape, page_tokens, seed)
    positions, offsets = new_token_pages(
        batch.indptr, batch.context, batch.new, page_tokens
    )
    slots = np.concatenate(
        [
            batch.logical_slots(request, context, context + new)
            for request, (context, new) in enumerate(shape)
        ]
    )
    where = page_starts(batch.places, page_tokens)[positions] + offsets
    assert where.tolist() == batch.naive(slots)


@given(shape=requests, page_tokens=PAGES, seed=st.integers(0, 2**32 - 1))
def test_layers_are_filled_from_what_was_told_apart_once(shape, page_tokens, seed):
    """The buffer holds the layer before; the next one does not depend on it."""
    batch = Batch(shape, page_tokens, seed)
    slots = np.concatenate(
        [batch.logical_slots(n, 0, sum(both)) for n, both in enumerate(shape)]
    )
    out = torch.from_numpy(slots.astype(np.int32))
    positions, offsets = page_positions(out, page_tokens), out % page_tokens
    for turn in range(3):
        places = np.roll(batch.places, turn)
        starts = torch.from_numpy(page_starts(places, page_tokens))
        fill_slots(out, starts, positions, offsets)
        assert out.tolist() == filled(slots, places, page_tokens)


def test_rows_come_request_by_request():
    """Of any order; a request without rows has none."""
    new = np.array([2, 0, 3, 1])
    assert request_rows(new, np.array([3, 0, 1, 2])).tolist() == [5, 0, 1, 2, 3, 4]
    assert request_rows(new, np.array([2, 3, 1, 0])).tolist() == [2, 3, 4, 5, 0, 1]
    assert request_rows(new, np.arange(4)).tolist() == list(range(6))
    with pytest.raises(AssertionError, match="other requests"):
        request_rows(new, np.array([0]))


def test_a_page_without_a_place_is_not_read():
    """Index -1 would be the tensor's last rows, without an error of the device."""
    with pytest.raises(RuntimeError, match="no place"):
        page_starts(np.array([3, -1], np.int32), 16)
    with pytest.raises(OverflowError, match="slots"):
        page_starts(np.array([2**27], np.int64), 16)
    assert page_starts(np.empty(0, np.int32), 16).tolist() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_device_fills_the_same_slots():
    """The same functions on CUDA, with lists that come through pinned buffers."""
    pytest.importorskip("sglang")
    from sgl_tiered.engines.sglang.layered.flashinfer import PinnedUpload

    upload = PinnedUpload(torch.device("cuda"))
    batch = Batch([(33, 7), (0, 5), (128, 1)], 16, 0)
    slots = np.concatenate(
        [batch.logical_slots(n, 0, total) for n, total in enumerate((40, 5, 129))]
    )
    out = torch.from_numpy(slots.astype(np.int32)).cuda()
    positions, offsets = page_positions(out, 16), out % 16
    for turn in range(300):
        places = np.roll(batch.places, turn)
        fill_slots(out, upload(page_starts(places, 16)), positions, offsets)
        if turn % 50 == 0:
            assert out.tolist() == filled(slots, places, 16)
