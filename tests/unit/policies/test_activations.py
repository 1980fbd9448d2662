"""Activations: Algorithm 1, ratios, mini-batches and refusals, by numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sgl_tiered.core.ids import Representation, TierId
from sgl_tiered.policies.activations.allocation import (
    Allocation,
    HostFacts,
    allocate,
    initial_allocation,
    remaining_allocation,
)
from sgl_tiered.policies.activations.balance import (
    DevicePages,
    balanced_split,
    device_pages,
    split_at,
)
from sgl_tiered.policies.activations.base import LayerFacts, PageLine
from sgl_tiered.policies.activations.batches import (
    BufferPages,
    RequestPages,
    imbalance,
    mini_batches,
)
from sgl_tiered.policies.activations.ratio import PagePlace, PageRatio, next_page
from sgl_tiered.policies.activations.refusal import (
    refusal_of_load,
    refusal_of_model,
)

GEN, LOAD = PageLine(0.0, 2.0), PageLine(0.0, 1.0)
"""Rebuilding a page takes as long as loading two as KV."""
HOST = HostFacts(
    room_bytes=1_000,
    kv_page_bytes=4,
    act_page_bytes=2,
    num_device_act=10,
    load_weights_s=50.0,
    kv_gen=GEN,
    load_kv=LOAD,
)
LAYER = LayerFacts(
    num_pages=100,
    device_bytes=40,
    kv_page_bytes=4,
    act_page_bytes=2,
    kv_gen=GEN,
    load_kv=LOAD,
    load_act=PageLine(0.0, 0.5),
    load_weights_s=30.0,
    compute_s=10.0,
)


# -- Algorithm 1 -------------------------------------------------------------------


def test_a_line_and_back():
    """Seconds of pages, pages of seconds; none take none."""
    line = PageLine(1.0, 0.5)
    assert (line.seconds(0), line.seconds(4)) == (0.0, 3.0)
    assert [line.most(s) for s in (0.0, 1.0, 2.9, 3.0)] == [0, 0, 3, 4]


def test_time_left_under_the_weights_is_filled_with_activations():
    """50 s of weights, 10 device pages rebuilt in 20 s: 30 s are 15 pages more."""
    assert initial_allocation(HOST) == Allocation(15, 0)


def test_time_that_rebuilding_takes_longer_is_filled_with_kv():
    """40 device pages take 80 s, 30 s longer than the weights: 30 pages of KV."""
    assert initial_allocation(replace(HOST, num_device_act=40)) == Allocation(0, 30)


def test_the_rest_is_in_balance():
    """Of 1,000 B 30 are taken; 2 A + 4 K = 970 and 2 A = K: A = 97, K = 194."""
    assert remaining_allocation(HOST, Allocation(15, 0)) == Allocation(97, 194)
    assert allocate(HOST) == Allocation(112, 194)


def test_overheads_shift_the_balance():
    """44 + 2 A = 1 + K and 2 A + 4 K = 672: A = 50, K = 143."""
    facts = replace(
        HOST, kv_gen=PageLine(44.0, 2.0), load_kv=PageLine(1.0, 1.0), room_bytes=672
    )
    assert remaining_allocation(facts, Allocation(0, 0)) == Allocation(50, 143)


def test_memory_that_is_short():
    """What balances would take more than there is: no byte twice, none negative."""
    assert allocate(replace(HOST, room_bytes=20)) == Allocation(10, 0)
    assert allocate(replace(HOST, room_bytes=3, num_device_act=40)) == Allocation(0, 0)
    assert allocate(replace(HOST, room_bytes=-5)) == Allocation(0, 0)
    # An overhead of rebuilding that all KV together does not take: KV alone.
    slow = replace(HOST, kv_gen=PageLine(1e6, 2.0), load_weights_s=0.0)
    assert allocate(replace(slow, num_device_act=0)) == Allocation(0, 250)


# -- Ratios ------------------------------------------------------------------------


def test_the_papers_example():
    """At 3 : 1, after five of activations and two of KV, activations come next."""
    place = next_page(PageRatio(3, 1), 5, 2, num_device_free=0)
    assert place == PagePlace(Representation.ACT, TierId.HOST)


def test_activations_go_to_the_device_first():
    """While it has room; KV never does."""
    ratio = PageRatio(1, 1)
    first = next_page(ratio, 0, 0, num_device_free=1)
    assert first == PagePlace(Representation.ACT, TierId.DEVICE)
    second = next_page(ratio, 1, 0, num_device_free=1)
    assert second == PagePlace(Representation.KV, TierId.HOST)


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [
        (PageRatio(1, 2), [0, 0, 1, 1, 1, 2, 2]),
        (PageRatio(1, 1), [0, 1, 1, 2, 2, 3, 3]),
        (PageRatio(0, 1), [0] * 7),
        (PageRatio(5, 0), [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_counts_of_the_first_pages(ratio, counts):
    """The nearest whole number, a half rounded up."""
    assert [ratio.act_of(num) for num in range(7)] == counts


def test_a_share_as_a_ratio():
    """The flag's number: a third is one to two."""
    assert PageRatio.of_share(1 / 3) == PageRatio(1, 2)
    assert PageRatio.of_share(0.0) == PageRatio(0, 1)
    assert PageRatio.of_share(1.0) == PageRatio(1, 0)
    assert PageRatio.of_share(0.4).act_share == pytest.approx(0.4)


# -- Mini-batches ------------------------------------------------------------------


def test_f_b():
    """Eq. 13: the longer over the shorter; one kind alone is never balanced."""
    assert imbalance(4, 8, GEN, LOAD) == 1.0
    assert imbalance(8, 8, GEN, LOAD) == 2.0
    assert imbalance(2, 8, GEN, LOAD) == 2.0
    assert imbalance(0, 8, GEN, LOAD) == math.inf
    assert imbalance(8, 0, GEN, LOAD) == math.inf
    assert imbalance(0, 0, GEN, LOAD) == 1.0


def test_equal_requests_fill_the_buffers():
    """Ten of 2 + 4 pages, room for 7 + 12: three at a time."""
    batches = mini_batches([RequestPages(2, 4)] * 10, BufferPages(7, 12), GEN, LOAD)
    assert batches == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9,))


def test_equal_requests_out_of_balance_fill_the_buffers_too():
    """Overheads change F_b with each request; that does not part them."""
    gen = PageLine(5.0, 2.0)
    for pages in (RequestPages(4, 1), RequestPages(1, 9)):
        batches = mini_batches([pages] * 6, BufferPages(100, 100), gen, LOAD)
        assert batches == (tuple(range(6)),)


def test_unequal_requests_are_paired():
    """Two of activations (F_b infinite) and two of KV: one of each at a time."""
    requests = [
        RequestPages(4, 0),
        RequestPages(4, 0),
        RequestPages(0, 8),
        RequestPages(0, 8),
    ]
    batches = mini_batches(requests, BufferPages(6, 10), GEN, LOAD)
    assert batches == ((0, 2), (1, 3))
    for batch in batches:
        num_act = sum(requests[n].num_act for n in batch)
        num_kv = sum(requests[n].num_kv for n in batch)
        assert imbalance(num_act, num_kv, GEN, LOAD) == 1.0


def test_what_unbalances_waits_for_another_mini_batch():
    """1 + 2 is balanced, as all together are; 5 + 0 would undo that before 0 + 10."""
    requests = [RequestPages(1, 2), RequestPages(5, 0), RequestPages(0, 10)]
    batches = mini_batches(requests, BufferPages(5, 10), GEN, LOAD)
    assert batches == ((0,), (1, 2))


def test_a_request_larger_than_a_buffer_is_alone():
    """It cannot be split here."""
    requests = [RequestPages(1, 2), RequestPages(9, 9), RequestPages(1, 2)]
    batches = mini_batches(requests, BufferPages(4, 8), GEN, LOAD)
    assert batches == ((0, 2), (1,))
    assert mini_batches([], BufferPages(4, 8), GEN, LOAD) == ()


# -- Balance and refusal -----------------------------------------------------------


def test_a_layer_by_hand():
    """30 of 100 pages as activations, 20 of them on the device.

    Link: 30 of weights, 70 of KV, 10 * 0.5 of activations. Compute: 10 + 60.
    """
    assert device_pages(LAYER, 30) == DevicePages(20, 0)
    split = split_at(LAYER, 30)
    assert (split.num_act, split.num_kv) == (30, 70)
    assert (split.link_s, split.compute_s) == (105.0, 70.0)
    assert split.seconds == 105.0


def test_kv_takes_what_activations_leave_of_the_device():
    """Ten pages of activations leave 20 B: five pages of KV."""
    assert device_pages(LAYER, 10) == DevicePages(10, 5)
    assert split_at(LAYER, 10).link_s == 30 + 85
    assert device_pages(replace(LAYER, num_pages=12), 10) == DevicePages(10, 2)


def test_the_best_share():
    """30 + 100 - A + (A - 20) / 2 = 10 + 2 A: A = 44, in 98."""
    best = balanced_split(LAYER)
    assert best.num_act == 44
    assert best.seconds == pytest.approx(98.0)
    assert split_at(LAYER, 0).seconds == 120.0
    assert split_at(LAYER, 100).seconds == 210.0


def test_grouped_queries_are_refused():
    """Llama-3.1-8B: 4,096 values against 2 x 8 x 128; OPT-30B is not refused."""
    said = refusal_of_model(4_096, 8, 128)
    assert said is not None
    assert "4096" in said
    assert "2048" in said
    assert refusal_of_model(7_168, 56, 128) is None
    # Two ranks have 28 heads each: as many bytes either way.
    assert refusal_of_model(7_168, 28, 128) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute_s": 120.0}, "the link is idle"),
        ({"kv_gen": PageLine(500.0, 2.0)}, "is the least worth it"),
        ({"compute_s": 119.0}, "is the least worth it"),
    ],
)
def test_a_load_that_cannot_pay_is_refused(changes, words):
    """An idle link, an overhead that eats the gain, a gain of nothing."""
    said = refusal_of_load(replace(LAYER, **changes))
    assert said is not None
    assert words in said
    assert said.startswith("activations are refused: ")
    assert said.count(".") >= 1
    assert said.endswith(".")
    assert "\n" not in said


def test_a_load_that_pays_is_not():
    """98 instead of 120 is 18 %: worth 2 %, and not worth 20 %."""
    assert refusal_of_load(LAYER) is None
    assert refusal_of_load(LAYER, least_gain=0.2) is not None
