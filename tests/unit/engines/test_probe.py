"""The probe of a start takes a bounded time, however slow the machine is."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.core.clock import ManualClock  # noqa: E402
from sgl_tiered.core.ids import TierId  # noqa: E402
from sgl_tiered.core.layout import PageLayout  # noqa: E402
from sgl_tiered.engines.device import probe  # noqa: E402
from sgl_tiered.pipelines.stream_pool import StreamPool  # noqa: E402
from sgl_tiered.testing.fake_streams import FakeCopyOps, FakeDevice  # noqa: E402
from sgl_tiered.tiers.host import HostTier  # noqa: E402

LAYOUT = PageLayout(num_layers=3, page_tokens=4, token_bytes=16)
NUM_ROWS, NUM_PAGES = 3000, 1000


class StepClock(ManualClock):
    """A clock by which everything takes the same time."""

    def __init__(self, step_s):
        super().__init__()
        self._step_s = step_s

    def now(self):
        self.advance(self._step_s)
        return super().now()


@pytest.fixture
def widths(monkeypatch):
    """The widths of the matrices that are made."""
    made = []
    ones = torch.ones

    def record(*shape, **kind):
        made.append(shape[-1])
        return ones(*shape, **kind)

    monkeypatch.setattr(torch, "ones", record)
    return made


def test_a_slow_machine_multiplies_small_matrices(widths):
    """Where the smallest product takes longer than the budget, none is larger."""
    rate = probe._matmul_flops(torch.zeros(1), StepClock(1.0))
    assert max(widths) == 128
    assert rate == 2.0 * 32 * 128 * 128


def test_a_fast_machine_multiplies_large_matrices(widths):
    """Where each product fits into the budget, the last is of the full size."""
    rate = probe._matmul_flops(torch.zeros(1), StepClock(0.02))
    assert max(widths) == widths[-1] == 2048
    assert rate == pytest.approx(2.0 * 512 * 2048 * 2048 / 0.02)


class PacedOps(FakeCopyOps):
    """A link of 20 us a copy and 2 us a page; the kernel is twice as slow."""

    def load_by_engines(self, stream, layer, memory, rows, *rest):
        self.engines_ms = 0.02 + 0.002 * len(rows)
        super().load_by_engines(stream, layer, memory, rows, *rest)

    def load_by_kernel(self, stream, layer, memory, rows, *rest):
        self.kernel_ms = 0.04 + 0.004 * len(rows)
        super().load_by_kernel(stream, layer, memory, rows, *rest)


class Machine:
    """A device with streams whose time passes apart from the host's, and host rows.

    The host's passes where it queues: 10 ms a layer.
    """

    def __init__(self, num_rows=NUM_ROWS, num_pages=NUM_PAGES):
        self.clock = ManualClock()
        self.device = FakeDevice(np.random.default_rng(0))
        self.ops = PacedOps(self.device, LAYOUT, num_pages + 1)
        self.pool = StreamPool(self.ops)
        self.host = HostTier(LAYOUT.slot_bytes, num_rows)
        self.num_pages = num_pages
        self.loads = []
        load = self.pool.load_layer

        def record(layer, region, rows, pages, **how):
            self.clock.advance(0.01)
            self.loads.append((rows.copy(), pages.copy()))
            return load(layer, region, rows, pages, **how)

        self.pool.load_layer = record

    def measure(self, num_host_slots=None):
        return probe.measure_costs(
            model=torch.nn.Linear(4, 4),
            layout=LAYOUT,
            attention_width=8,
            device=self.pool,
            num_device_pages=self.num_pages,
            host=self.host,
            num_host_slots=num_host_slots or self.host.num_slots,
            cxl=None,
            num_cxl_slots=0,
            disk=None,
            clock=self.clock,
        )


@pytest.fixture
def make_machine(monkeypatch):
    """Makes machines; what a product takes is no matter of loads."""
    monkeypatch.setattr(probe, "_matmul_flops", lambda like, clock: 1e12)
    made = []

    def make(*sizes):
        made.append(Machine(*sizes))
        return made[-1]

    yield make
    for machine in made:
        machine.host.close()


@pytest.fixture
def machine(make_machine):
    return make_machine()


def test_a_device_is_tuned_over_scattered_pages(machine):
    """256 of all rows and of all free pages, in random order, not neighbours."""
    _, figures = machine.measure()
    many = [numbers for numbers in machine.loads if len(numbers[0]) > 1]
    assert {len(rows) for rows, _ in many} == {256}
    for rows, pages in many:
        for numbers, first, end in ((rows, 0, NUM_ROWS), (pages, 1, NUM_PAGES)):
            assert len(set(numbers.tolist())) == 256
            assert numbers.min() >= first
            assert numbers.max() < end
            assert np.ptp(numbers) > 0.9 * (end - first)
            assert (np.abs(np.diff(numbers)) == 1).mean() < 0.1
    assert figures["load_layer_by_engines_s"] == pytest.approx(532e-6)
    assert figures["load_layer_by_kernel_s"] == pytest.approx(1064e-6)
    assert not machine.pool.loads_by_kernel


def test_a_link_of_a_device_is_what_its_events_say(machine):
    """What the host takes to queue copies is in no figure."""
    cost, figures = machine.measure()
    page_s = LAYOUT.num_layers * 2e-6
    wanted = LAYOUT.page_bytes / page_s
    assert figures["host_bandwidth_bytes_per_s"] == pytest.approx(wanted)
    assert figures["host_latency_s"] == pytest.approx(LAYOUT.num_layers * 20e-6)
    assert cost.tiers == {TierId.HOST}


def test_kernels_are_ready_before_anything_is_measured(machine):
    """A first run would be one that compiles; and stores come in service only."""
    machine.measure()
    assert machine.ops.kernels[:4] == ["choose", "load", "gather 0", "gather 1"]


def test_only_slots_that_are_ready_are_measured(machine):
    """The memory behind them is not pinned yet."""
    machine.measure(num_host_slots=100)
    rows = np.concatenate([rows for rows, _ in machine.loads])
    assert set(rows.tolist()) == set(range(100))


@pytest.mark.parametrize(("num_rows", "num_pages"), [(5, 100), (100, 3), (1, 2)])
def test_a_small_device_has_fewer_pages(make_machine, num_rows, num_pages):
    """What there is is used, but for the last page."""
    machine = make_machine(num_rows, num_pages)
    machine.measure()
    counts = {len(rows) for rows, _ in machine.loads}
    assert max(counts) == min(num_rows, num_pages - 1)


class Accelerator:
    """Multiplies at a rate, in a queue of its own; its events tell when.

    Tensors are torch's without data, so that reading a number is an error.
    """

    def __init__(self, monkeypatch, flops_per_s, *, fits=8192):
        self.now_s, self.rate = 0.0, flops_per_s
        self.sides, self.between, self.fits = [], [], fits
        self.num_waits = 0
        accelerator, randn = self, torch.randn

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                self.at_s = accelerator.now_s
                accelerator.between.append(0)

            def synchronize(self):
                accelerator.num_waits += 1

            def elapsed_time(self, end):
                return (end.at_s - self.at_s) * 1e3

        def matmul(left, right, *, out):
            (side,) = set(left.shape + right.shape + out.shape)
            self.sides.append(side)
            self.now_s += 5e-6 + 2.0 * side**3 / self.rate
            if self.between:
                self.between[-1] += 1
            return out

        def make(*shape, **kind):
            if shape[-1] > self.fits:
                raise torch.OutOfMemoryError("out of memory")
            return randn(*shape, **kind)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch, "matmul", matmul)
        monkeypatch.setattr(torch, "randn", make)
        self.like = torch.zeros(1, device="meta", dtype=torch.bfloat16)

    def flops(self):
        """Return what the probe finds; the host's clock is of no use to it."""
        return probe._matmul_flops(self.like, StepClock(1e9))


def test_a_fast_accelerator_is_measured_by_its_largest_product(monkeypatch):
    """By events around several that are queued; nobody waits between them."""
    accelerator = Accelerator(monkeypatch, 800e12)
    assert accelerator.flops() == pytest.approx(800e12, rel=0.01)
    assert max(accelerator.sides) == accelerator.sides[-1] == 8192
    timed = accelerator.between[::2]
    assert min(timed) >= 4
    assert accelerator.num_waits == len(timed)


def test_a_slow_accelerator_multiplies_what_it_can_in_the_time(monkeypatch):
    """And its rate is that of the largest product which it came to."""
    accelerator = Accelerator(monkeypatch, 2e12)
    assert accelerator.flops() == pytest.approx(2e12, rel=0.01)
    assert 1024 <= max(accelerator.sides) < 8192
    assert accelerator.now_s < 1.0


@pytest.mark.parametrize("fits", [512, 4096])
def test_an_accelerator_without_room_has_the_last_size_that_fitted(monkeypatch, fits):
    """At a start most memory is taken."""
    accelerator = Accelerator(monkeypatch, 800e12, fits=fits)
    launch_share = 5e-6 / (2.0 * fits**3 / 800e12)
    assert accelerator.flops() == pytest.approx(800e12 / (1 + launch_share))
    assert max(accelerator.sides) == fits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_real_accelerator_multiplies_by_the_trillion():
    """More than a product that is bound by its launch would tell."""
    like = torch.zeros(1, device="cuda", dtype=torch.bfloat16)
    assert 1e12 < probe._matmul_flops(like, ManualClock()) < 1e17
