"""Attention that reads what its batch's loads have brought, and not the pool.

Layers of pages go from a host region to a real pool by real tickets, while a forward's
attention asks for layer after layer. Each answer has to be that of a device hit.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.sglang
torch = pytest.importorskip("torch")

from sgl_tiered.core.clock import SystemClock  # noqa: E402
from sgl_tiered.engines.device.pools import CpuDevicePool, page_layout  # noqa: E402
from sgl_tiered.metrics.registry import MetricsRegistry  # noqa: E402
from sgl_tiered.pipelines import layerwise_load  # noqa: E402
from sgl_tiered.pipelines.completions import CompletionQueue  # noqa: E402
from sgl_tiered.pipelines.layerwise_load import (  # noqa: E402
    LayerwiseLoader,
    LoadJob,
    LoadTicket,
    Segment,
)
from sgl_tiered.serving.layer_counter import LayerCounter  # noqa: E402
from tests.unit.pipelines.pipeline_support import PATIENCE_S, load_plan  # noqa: E402

LAYERS, HEADS, KV_HEADS, DIM, PAGE, PAGES, FIRST = 3, 4, 2, 64, 16, 64, 5


@pytest.fixture(scope="module")
def module():
    """The backend's module; imports the model stack once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's, where there is no CUDA
        from sgl_tiered.engines.sglang import cpu_attention

    return cpu_attention


class Pool:
    """SGLang's, as far as attention knows it: its getters wait for the layer."""

    def __init__(self):
        torch.manual_seed(0)
        shape = (PAGES * PAGE, KV_HEADS, DIM)
        self.k_buffer = [torch.randn(shape).bfloat16() for _ in range(LAYERS)]
        self.v_buffer = [torch.randn(shape).bfloat16() for _ in range(LAYERS)]
        self.start_layer = FIRST
        self.layer_transfer_counter = LayerCounter(LAYERS)

    def set_kv_buffer(self, layer, where, k, v):
        number = layer.layer_id - FIRST
        self.k_buffer[number][where.loc] = k
        self.v_buffer[number][where.loc] = v

    def get_key_buffer(self, layer_id):
        self.layer_transfer_counter.wait_until(layer_id - FIRST)
        return self.k_buffer[layer_id - FIRST]

    def get_value_buffer(self, layer_id):
        self.layer_transfer_counter.wait_until(layer_id - FIRST)
        return self.v_buffer[layer_id - FIRST]


class Server:
    """One backend over one pool, a host region, and requests.

    Args:
        module: the backend's.
        requests: pages and new tokens of each; all pages but the last are full, which
            has nine tokens.
    """

    def __init__(self, module, requests):
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.pool = Pool()
        self.counter = self.pool.layer_transfer_counter
        self.device = CpuDevicePool(self.pool, page_layout(self.pool, PAGE))
        table = torch.zeros((len(requests), PAGES * PAGE), dtype=torch.int32)
        lens, new, fresh = [], [], []
        for row, (pages, num_new) in enumerate(requests):
            slots = torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)
            kv_len = len(pages) * PAGE - 7
            table[row, :kv_len] = slots.flatten()[:kv_len]
            fresh.append(slots.flatten()[kv_len - num_new : kv_len])
            lens.append(kv_len)
            new.append(num_new)
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            req_pool_indices=torch.arange(len(requests)),
            seq_lens=torch.tensor(lens),
            extend_seq_lens=torch.tensor(new),
            out_cache_loc=torch.cat(fresh),
        )
        tables = SimpleNamespace(req_to_token=table)
        self.backend = module.TieredCpuAttention(tables, self.pool)
        self.layers = [
            RadixAttention(HEADS, DIM, 0.125, KV_HEADS, layer_id=FIRST + i)
            for i in range(LAYERS)
        ]
        shape = (LAYERS, sum(new), HEADS * DIM)
        self.queries = torch.randn(shape).bfloat16()
        self.new_kv = torch.randn((2, LAYERS, sum(new), KV_HEADS, DIM)).bfloat16()

    def forward(self, before=lambda number: None):
        """Return the attention of all layers; ``before`` each, its number is told."""
        self.backend.init_forward_metadata(self.batch)
        return torch.stack([self.layer(i, before) for i in range(LAYERS)])

    def layer(self, number, before=lambda number: None):
        """Return the attention of one."""
        before(number)
        new = self.new_kv[:, number]
        args = (self.queries[number], *new, self.layers[number], self.batch)
        return self.backend.forward_extend(*args)

    def to_host(self, pages, charge=None):
        """Move pages to a host region; return the job that brings them back."""
        rows = np.random.default_rng(1).permutation(len(pages)).astype(np.int64)
        numbers = np.array(pages, np.int64)
        region = np.zeros((len(pages), self.device.layout.slot_bytes), np.uint8)
        self.device.store_pages(region, rows, numbers, None)
        for buffer in self.pool.k_buffer + self.pool.v_buffer:
            buffer.view(PAGES, -1)[numbers] = float("nan")
        half = len(pages) // 2
        segments = tuple(
            Segment(region.copy(), rows[part], np.arange(len(pages))[part], charge)
            for part in (slice(half), slice(half, None))
        )
        return LoadJob(load_plan(rows), segments, numbers)

    def content(self):
        """Return all rows of the pool."""
        return [buffer.clone() for buffer in self.pool.k_buffer + self.pool.v_buffer]

    def load(self, job):
        """Let the next forward be that of a batch with this load."""
        ticket = LoadTicket([job], self.device, SystemClock())
        self.counter.set_consumer(self.counter.add(ticket))
        return ticket


@pytest.fixture
def num_twice(monkeypatch):
    """How often a layer's pages were copied to two places, as a list of counts."""
    from sgl_tiered_kernels import page_copy

    counts, copy = [], page_copy.copy_layer_twice

    def counted(*args, **words):
        counts.append(int((args[5] >= 0).sum()))
        copy(*args, **words)

    monkeypatch.setattr(page_copy, "copy_layer_twice", counted)
    return counts


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


ONE = [([9, 3, 30, 31, 32, 8, 50, 12], 9)]
CHUNK = [([9, 3, 30, 31, 32, 8, 50, 12], 50)]
IN_A_ROW = [(list(range(20, 28)), 9)]
SHARED = [([9, 3, 30, 31, 2], 20), ([9, 3, 40, 41, 42, 5], 9), ([60, 61], 25)]


@pytest.mark.parametrize(
    ("requests", "loaded", "twice"),
    [
        (ONE, [9, 3, 30, 31, 32, 8, 50], 7),
        (ONE, [30, 31, 8], 3),
        (ONE, [9, 40], 1),
        (CHUNK, [9, 3, 30, 31], 4),
        (IN_A_ROW, [22, 23, 26], 3),
        (SHARED, [9, 3, 30, 40, 42], 5),
    ],
)
def test_a_host_hit_is_a_device_hit_by_bits(module, num_twice, requests, loaded, twice):
    """What is attended is the same, and what the pool holds afterwards."""
    server = Server(module, requests)
    expected = server.forward()
    content = server.content()
    ticket = server.load(server.to_host(loaded))
    assert_same(server.forward(), expected)
    assert_same(server.content(), content)
    assert sum(num_twice) == twice * LAYERS
    assert not ticket.failed
    # Without loads, nothing but the pool is read or written.
    server.counter.set_consumer(-1)
    num_twice.clear()
    assert_same(server.forward(), expected)
    assert num_twice == []
    assert server.device.read_rows is None


@pytest.mark.parametrize("taken", [{0}, {1}, {2}, {0, 1, 2}])
def test_layers_that_the_loader_copies_are_read_from_the_pool(module, num_twice, taken):
    """Those of a layer before it are not taken for them."""
    server = Server(module, ONE)
    expected = server.forward()
    ticket = server.load(server.to_host([3, 30, 31]))

    def before(number):
        if number in taken:
            ticket._copy(by_waiter=False)

    assert_same(server.forward(before), expected)
    assert sum(num_twice) == 3 * (LAYERS - len(taken))


def test_a_layer_whose_predecessor_was_never_attended_is_right(module, num_twice):
    """Both are copied by the one wait; the pages of the second are those read."""
    server = Server(module, ONE)
    expected = server.forward()
    server.load(server.to_host([3, 30, 31]))
    server.backend.init_forward_metadata(server.batch)
    assert_same([server.layer(1)], [expected[1]])
    assert sum(num_twice) == 3 * 2


def test_requests_beyond_the_room_are_read_from_the_pool(
    module, monkeypatch, num_twice
):
    """The one that does not fit; a shorter one behind it has room."""
    row = 2 * PAGE * KV_HEADS * DIM * 2
    monkeypatch.setattr(module, "_MAX_READ_BYTES", 130 // PAGE * row)
    server = Server(module, SHARED)
    expected = server.forward()
    server.load(server.to_host([9, 3, 30, 40, 42]))
    assert_same(server.forward(), expected)
    assert sum(num_twice) == 3 * LAYERS


def test_pages_that_are_no_pages_of_the_pool_are_read_token_by_token(module, num_twice):
    """Were a prompt's tokens in another order than a page's, no row would be right."""
    server = Server(module, ONE)
    table = server.backend._req_to_token_pool.req_to_token
    table[0, [17, 18]] = table[0, [18, 17]]
    expected = server.forward()
    server.load(server.to_host([3, 30]))
    assert_same(server.forward(), expected)
    assert sum(num_twice) == LAYERS


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_load_that_fails_is_found_and_the_next_forward_is_right(module, after):
    """At any copy; the model thread lives on and the pool is read again."""
    calls = []

    def charge(num_bytes):
        calls.append(num_bytes)
        if len(calls) > after:
            raise OSError("broke")

    server = Server(module, ONE)
    expected, content = server.forward(), server.content()
    loader = LayerwiseLoader(
        server.device, CompletionQueue(), SystemClock(), MetricsRegistry()
    )
    try:
        ticket = loader.submit([server.to_host([3, 30, 31, 8], charge)])
        server.counter.set_consumer(server.counter.add(ticket))
        server.forward()
        assert not ticket.wait(PATIENCE_S)
        assert "broke" in ticket.failed
        # As a repair computes them anew.
        for buffer, rows in zip(
            server.pool.k_buffer + server.pool.v_buffer, content, strict=True
        ):
            buffer.copy_(rows)
        assert_same(server.forward(), expected)
        assert server.device.read_rows is None
    finally:
        loader.close()


def test_rows_of_the_layer_before_are_not_there_any_more(module):
    """Also where a load brought less of this layer than of that."""
    from sgl_tiered_kernels.paged_attention import RequestRows

    from sgl_tiered.engines.device.read_rows import ReadRows, rows_needed

    request = RequestRows.from_table(0, 1, torch.arange(3 * PAGE, 5 * PAGE + 1))
    assert rows_needed([request], PAGE) == 4
    room = torch.zeros((2, 4 * PAGE, KV_HEADS, DIM))
    reads = ReadRows(room, [request], PAGE, PAGES)
    rows = reads.of_pages(np.array([4, 9, 3, 5]))
    assert rows.tolist() == [1, -1, 0, -1]
    assert reads.gathered(0, 0) is None
    reads.fill(0, rows)
    assert reads.gathered(0, 0).missing == [(2 * PAGE, 2 * PAGE + 1)]
    reads.fill(1, rows[:2])
    assert reads.gathered(0, 0) is None
    assert reads.gathered(1, 0).missing == [(0, PAGE), (2 * PAGE, 2 * PAGE + 1)]
    reads.fill(1, rows[2:])
    assert reads.gathered(1, 0).missing == [(2 * PAGE, 2 * PAGE + 1)]


def test_a_failure_that_comes_after_its_copies_meets_these_loads(
    module, monkeypatch, num_twice
):
    """Whatever stands in for the pool's copy is asked, layer by layer."""

    class Late:
        def order(self):
            pass

        def finish(self):
            raise RuntimeError("late")

        def stall_s(self):
            return 0.0

    copy = CpuDevicePool.load_layer

    def load_layer(*args, **words):
        copy(*args, **words)
        return Late()

    server = Server(module, ONE)
    expected = server.forward()
    monkeypatch.setattr(CpuDevicePool, "load_layer", load_layer)
    # On a busy machine the loader would take layers over that are left to the model.
    monkeypatch.setattr(layerwise_load, "_LEFT_TO_WAITER_S", PATIENCE_S)
    loader = LayerwiseLoader(
        server.device, CompletionQueue(), SystemClock(), MetricsRegistry()
    )
    try:
        ticket = loader.submit([server.to_host([3, 30, 31])])
        server.counter.set_consumer(server.counter.add(ticket))
        assert_same(server.forward(), expected)
        assert sum(num_twice) == 3 * LAYERS
        assert not ticket.wait(PATIENCE_S)
        assert ticket.failed == "late"
    finally:
        loader.close()


def test_a_load_that_sleeps_for_its_pace_stays_the_loader_s(module, num_twice):
    """An emulated link is as slow as it should be, and fills the pool alone."""
    server = Server(module, ONE)
    expected = server.forward()
    job = server.to_host([3, 30, 31])
    paced = tuple(
        Segment(s.region, s.rows, s.positions, is_paced=True) for s in job.segments
    )
    loader = LayerwiseLoader(
        server.device, CompletionQueue(), SystemClock(), MetricsRegistry()
    )
    try:
        ticket = loader.submit([LoadJob(job.plan, paced, job.device_pages)])
        server.counter.set_consumer(server.counter.add(ticket))
        assert_same(server.forward(), expected)
        assert num_twice == []
    finally:
        loader.close()
