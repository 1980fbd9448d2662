"""Throttled, delayed and faulty tiers."""

import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.serving.emulation import Delay, Fault
from sgl_tiered.testing.delayed import DelayedTier, DelaySwitch
from sgl_tiered.testing.fakes import FakeTier
from sgl_tiered.testing.fault_switch import FaultSwitch
from sgl_tiered.testing.faulty import FaultyTier
from sgl_tiered.testing.throttled import Link, ThrottledTier
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.base import MemoryTier, TierIO
from sgl_tiered.tiers.host import HostTier

SLOT = 4096
PATIENCE_S = 10.0


@pytest.fixture
def host():
    tier = HostTier(SLOT, 16)
    tier.region[:8] = make_pages(8, SLOT, seed=1)
    yield tier
    tier.close()


def io(num_pages):
    rows = np.arange(num_pages, dtype=np.int64)
    return TierIO(rows, make_pages(num_pages, SLOT, seed=2), rows)


def throttled(tier, link, latency=0.0):
    clock = ManualClock()
    return ThrottledTier(tier, link, latency, clock, clock.advance), clock


def test_wrappers_stay_what_they_wrap(host):
    """A wrapped memory tier is one; a wrapped disk is none; all say their id."""
    disk = FakeTier(SLOT, 16)
    for wrap in (
        lambda tier: ThrottledTier(tier, 1e9),
        lambda tier: DelayedTier(tier, DelaySwitch()),
        FaultyTier,
    ):
        assert isinstance(wrap(host), MemoryTier)
        assert not isinstance(wrap(disk), MemoryTier)
        assert isinstance(wrap(wrap(host)), MemoryTier)
        assert wrap(disk).tier_id == TierId.DISK


def test_transfers_take_the_time_of_the_link(host):
    """A transfer lasts bytes over bandwidth, plus the latency."""
    tier, clock = throttled(host, SLOT * 10.0, 0.5)
    assert tier.load(io(5)).seconds == pytest.approx(5 / 10 + 0.5)
    assert clock.now() == pytest.approx(1.0)
    tier.store(io(10))
    assert clock.now() == pytest.approx(1.0 + 1.0 + 0.5)


def test_charge_pays_for_copies_in_place(host):
    """A copy done in place takes the link's time through ``charge``."""
    tier, clock = throttled(host, SLOT * 10.0)
    tier.charge(3 * SLOT)
    assert clock.now() == pytest.approx(0.3)


def waits_of(link, *transfers):
    """Return how long transfers that begin at one time take on one link."""
    clock, waits = ManualClock(), []
    for tier, is_store in transfers:
        wrapped = ThrottledTier(tier, link, 0.0, clock, waits.append)
        (wrapped.store if is_store else wrapped.load)(io(5))
    return waits


def test_transfers_share_the_link():
    """Two transfers at once take as long as one of both sizes."""
    disk = FakeTier(SLOT, 16)
    waits = waits_of(Link(SLOT * 10.0), (disk, True), (disk, False))
    assert waits == pytest.approx([0.5, 1.0])


def test_tiers_share_a_link(host):
    """What one tier moves, the other waits for."""
    waits = waits_of(Link(SLOT * 10.0), (host, True), (FakeTier(SLOT, 16), True))
    assert waits == pytest.approx([0.5, 1.0])


def test_directions_of_their_own_do_not_wait_for_each_other():
    """Each direction has its bandwidth, and both have the shared one besides."""
    disk = FakeTier(SLOT, 16)
    link = Link(read_bytes_per_s=SLOT * 10.0, write_bytes_per_s=SLOT * 5.0)
    waits = waits_of(link, (disk, True), (disk, False), (disk, False))
    assert waits == pytest.approx([1.0, 0.5, 1.0])
    link = Link(SLOT * 2.0, read_bytes_per_s=SLOT * 10.0)
    assert waits_of(link, (disk, False)) == pytest.approx([2.5])


def test_emulation_is_marked(host):
    """Health says that the figures are not of real hardware."""
    assert ThrottledTier(host, 1e9).health().emulated
    assert FaultyTier(ThrottledTier(host, 1e9)).health().emulated
    assert FaultyTier(host, [Fault("error")]).health().emulated
    assert DelayedTier(host, DelaySwitch([Delay(1.0, 1.0)])).health().emulated
    assert not FaultyTier(DelayedTier(host, DelaySwitch())).health().emulated
    assert not host.health().emulated


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (1, -1)])
def test_impossible_links_are_refused(host, bandwidth, latency):
    """A link without bandwidth or with negative latency is refused."""
    with pytest.raises(ValueError, match="is none"):
        ThrottledTier(host, bandwidth, latency)


def test_delays_add_up_and_can_be_switched(host):
    """Each operation waits for every delay; without delays nothing waits."""
    waits = []
    switch = DelaySwitch([Delay(0.5, 0.5), Delay(0.25, 0.25)])
    tier = DelayedTier(host, switch, waits.append)
    assert tier.load(io(1)).seconds >= 0.75
    tier.charge(SLOT)
    assert waits == [0.75, 0.75]
    switch.set([])
    tier.store(io(1))
    assert len(waits) == 2


def test_random_delays_replay_and_spikes_are_rare():
    """The same seed draws the same; a spike comes about as often as asked."""

    def draw():
        switch = DelaySwitch([Delay(1.0, 2.0), Delay(50.0, 50.0, 0.1)], seed=3)
        return [switch.draw_s() for _ in range(300)]

    first = draw()
    assert first == draw()
    spikes = [seconds for seconds in first if seconds > 50.0]
    assert 10 < len(spikes) < 60
    assert all(1.0 <= seconds <= 52.0 for seconds in first)


def succeeded(results):
    return [bool(result.ok.all()) for result in results]


def test_faults_strike_after_and_so_often():
    """``after`` operations pass, then ``times`` are struck, then all is well."""
    faults = [Fault("error", direction="store", after=1, times=2)]
    tier = FaultyTier(FakeTier(SLOT, 16), faults)
    stores = succeeded(tier.store(io(3)) for _ in range(5))
    assert stores == [True, False, False, True, True]
    assert succeeded([tier.load(io(3))]) == [True]
    assert tier.switch.num_struck == {"error": 2}


def test_errors_by_chance_replay():
    """The same seed gives the same failures; the rate is about as asked."""

    def run():
        faults = [Fault("error", 0.3, "load")]
        tier = FaultyTier(FakeTier(SLOT, 16), faults, seed=5)
        tier.store(io(1))
        return succeeded(tier.load(io(1)) for _ in range(200))

    first = run()
    assert first == run()
    assert 30 < first.count(False) < 90


def test_a_fault_ends_by_the_clock():
    """A fault lasts as long as asked from the moment that it is switched on."""
    clock = ManualClock()
    switch = FaultSwitch(clock=clock)
    tier = FaultyTier(FakeTier(SLOT, 16), switch)
    clock.advance(3.0)
    switch.set([Fault("error", duration_s=2.0)])
    assert succeeded([tier.store(io(1))]) == [False]
    clock.advance(2.0)
    assert succeeded([tier.store(io(1))]) == [True]


@pytest.mark.parametrize("end", ["switch", "close"])
def test_what_hangs_goes_on_when_the_fault_ends(end):
    """A hanging operation ends once the fault is switched off or the tier closed."""
    tier = FaultyTier(FakeTier(SLOT, 16), [Fault("hang")])
    results = []
    thread = threading.Thread(target=lambda: results.append(tier.store(io(2))))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it did not hang"
    if end == "switch":
        tier.switch.set([])
    else:
        tier.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(results) == 1


def test_a_part_of_a_transfer():
    """The first half is moved, the rest is not ok."""
    inner = FakeTier(SLOT, 16)
    tier = FaultyTier(inner, [Fault("partial", times=2)])
    assert tier.store(io(4)).ok.tolist() == [True, True, False, False]
    assert inner.load(io(4)).ok.tolist() == [True, True, False, False]
    assert tier.load(io(2)).ok.tolist() == [True, False]


def test_copies_in_place_fail_by_charge(host):
    """The copy that is charged for counts as failed, in the direction asked for."""
    tier = FaultyTier(host, [Fault("error", direction="load")])
    tier.charge(SLOT, is_store=True)
    with pytest.raises(OSError, match="injected"):
        tier.charge(SLOT)
    tier.switch.set([Fault("partial")])
    tier.charge(SLOT)
    with pytest.raises(OSError, match="injected"):
        tier.charge(SLOT)


@pytest.mark.parametrize("kind", ["corrupt", "zero", "swap"])
def test_one_page_of_a_view_is_wrong(host, kind):
    """One read in place sees one wrong page; the slots themselves stay right."""
    before = host.region.copy()
    tier = FaultyTier(host, [Fault(kind, times=1)], seed=3)
    addresses = np.array([1, 4, 2])
    region, rows = tier.read_view(addresses)
    seen, wanted = region[rows], before[addresses]
    wrong = np.flatnonzero((seen != wanted).any(axis=1))
    assert len(wrong) == 1
    bad = seen[wrong[0]]
    if kind == "corrupt":
        difference = np.unpackbits(bad ^ wanted[wrong[0]])
        assert difference.sum() == 1
    elif kind == "zero":
        assert not bad.any()
    else:
        others = np.setdiff1d(np.arange(8), addresses)
        assert any(np.array_equal(bad, before[slot]) for slot in others)
    assert np.array_equal(host.region, before)
    region, rows = tier.read_view(addresses)
    assert np.array_equal(region[rows], before[addresses]), "only one read was asked"
    assert tier.switch.num_struck == {kind: 1}


@pytest.mark.parametrize("kind", ["corrupt", "zero", "swap"])
def test_one_page_of_a_load_is_wrong_and_passes_for_ok(kind):
    """A load is damaged behind the tier's own check: only the gate can see it."""
    tier = FaultyTier(FakeTier(SLOT, 16))
    source = io(4)
    tier.store(source)
    tier.switch.set([Fault(kind, times=1)])
    target = io(4)
    target.buffer[:] = 9
    assert tier.load(target).ok.all()
    wrong = (target.buffer != source.buffer).any(axis=1)
    assert wrong.sum() == 1
    tier.load(target)
    assert np.array_equal(target.buffer, source.buffer)
