"""Throttled and faulty tiers."""

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.ids import TierId
from sgl_tiered.testing.fakes import FakeTier
from sgl_tiered.testing.tier_kit import make_pages
from sgl_tiered.tiers.base import MemoryTier, TierIO
from sgl_tiered.tiers.host import HostTier
from sgl_tiered.tiers.wrappers import Faults, FaultyTier, ThrottledTier

SLOT = 4096


@pytest.fixture
def host():
    tier = HostTier(SLOT, 16)
    tier.region[:8] = make_pages(8, SLOT, seed=1)
    yield tier
    tier.close()


def io(num_pages):
    rows = np.arange(num_pages, dtype=np.int64)
    return TierIO(rows, make_pages(num_pages, SLOT, seed=2), rows)


def throttled(tier, bandwidth, latency=0.0):
    clock = ManualClock()
    return ThrottledTier(tier, bandwidth, latency, clock, clock.advance), clock


def test_wrappers_stay_what_they_wrap(host):
    """A wrapped memory tier is one; a wrapped disk is none; both say their id."""
    disk = FakeTier(SLOT, 16)
    for wrap in (lambda t: ThrottledTier(t, 1e9), lambda t: FaultyTier(t, Faults())):
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


def test_transfers_share_the_link():
    """Two transfers at once take as long as one of both sizes."""
    clock = ManualClock()
    waits = []
    tier = ThrottledTier(FakeTier(SLOT, 16), SLOT * 10.0, 0.0, clock, waits.append)
    tier.store(io(5))
    tier.store(io(5))
    assert waits == pytest.approx([0.5, 1.0])


def test_emulation_is_marked(host):
    """Health says that the figures are not of real hardware."""
    assert ThrottledTier(host, 1e9).health().emulated
    assert FaultyTier(ThrottledTier(host, 1e9), Faults()).health().emulated
    assert not host.health().emulated


@pytest.mark.parametrize(("bandwidth", "latency"), [(0, 0), (-1, 0), (1, -1)])
def test_impossible_links_are_refused(host, bandwidth, latency):
    """A link without bandwidth or with negative latency is refused."""
    with pytest.raises(ValueError, match="is none"):
        ThrottledTier(host, bandwidth, latency)


def test_counted_errors_come_first_and_end():
    """Exactly so many calls fail, then all is well."""
    tier = FaultyTier(FakeTier(SLOT, 16), Faults(load_errors=1, store_errors=2))
    assert [bool(tier.store(io(3)).ok.all()) for _ in range(3)] == [False, False, True]
    assert [bool(tier.load(io(3)).ok.all()) for _ in range(2)] == [False, True]


def test_errors_by_chance_replay():
    """The same seed gives the same failures; the rate is about as asked."""

    def run():
        faults = Faults(load_error_rate=0.3, seed=5)
        tier = FaultyTier(FakeTier(SLOT, 16), faults)
        tier.store(io(1))
        return [bool(tier.load(io(1)).ok.all()) for _ in range(200)]

    first = run()
    assert first == run()
    assert 30 < first.count(False) < 90


def test_hang_waits_before_each_transfer():
    """A hanging tier makes each call wait."""
    waits = []
    tier = FaultyTier(FakeTier(SLOT, 16), Faults(hang_s=2.5), sleep=waits.append)
    tier.store(io(1))
    tier.load(io(1))
    assert waits == [2.5, 2.5]


@pytest.mark.parametrize("corrupt", ["flip", "zero", "swap"])
def test_one_page_of_a_view_is_wrong(host, corrupt):
    """One read in place sees one wrong page; the slots themselves stay right."""
    before = host.region.copy()
    tier = FaultyTier(host, Faults(corrupt=corrupt, corrupt_reads=1, seed=3))
    addresses = np.array([1, 4, 2])
    region, rows = tier.read_view(addresses)
    seen, wanted = region[rows], before[addresses]
    wrong = np.flatnonzero((seen != wanted).any(axis=1))
    assert len(wrong) == 1
    bad = seen[wrong[0]]
    if corrupt == "flip":
        difference = np.unpackbits(bad ^ wanted[wrong[0]])
        assert difference.sum() == 1
    elif corrupt == "zero":
        assert not bad.any()
    else:
        others = np.setdiff1d(np.arange(8), addresses)
        assert any(np.array_equal(bad, before[slot]) for slot in others)
    assert np.array_equal(host.region, before)
    region, rows = tier.read_view(addresses)
    assert np.array_equal(region[rows], before[addresses]), "only one read was asked"
    assert tier.num_corrupted == 1


@pytest.mark.parametrize("corrupt", ["flip", "zero", "swap"])
def test_one_page_of_a_load_is_wrong_and_passes_for_ok(corrupt):
    """A load is damaged behind the tier's own check: only the gate can see it."""
    inner = FakeTier(SLOT, 16)
    tier = FaultyTier(inner, Faults())
    source = io(4)
    tier.store(source)
    tier.set_faults(Faults(corrupt=corrupt, corrupt_reads=1))
    target = io(4)
    target.buffer[:] = 9
    assert tier.load(target).ok.all()
    wrong = (target.buffer != source.buffer).any(axis=1)
    assert wrong.sum() == 1
    tier.load(target)
    assert np.array_equal(target.buffer, source.buffer)


def test_unknown_corruption_is_refused():
    """A misspelt fault would test nothing."""
    with pytest.raises(ValueError, match="zeros"):
        Faults(corrupt="zeros")
