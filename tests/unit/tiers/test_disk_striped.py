"""Several directories as one tier: where pages go, and what one failure costs."""

import shutil

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers.disk_striped import StripedTier, open_disk_tier
from sgl_tiered.tiers.host import HostTier
from tests.unit.tiers.disk_support import (
    EIO,
    ENOSPC,
    PAGE_BYTES,
    PAGE_TOKENS,
    SLOT_BYTES,
    SLOTS_PER_SLAB,
    FailingCalls,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)

PAGES = {slot: 500 + slot for slot in range(40)}


def open_striped(paths, *, slots_each=16, calls=None, clock=None, chunk=2):
    tiers = [
        open_tier(
            path,
            num_slots=slots_each,
            calls=None if calls is None else calls[number],
            clock=clock,
        )
        for number, path in enumerate(paths)
    ]
    return StripedTier(tiers, chunk_bytes=chunk * SLOT_BYTES)


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / name for name in ("a", "b", "c")]


def test_neighbours_share_a_directory_up_to_a_chunk(paths):
    """Chunks go to the directories in turn; a long run is one run in each."""
    tier = open_striped(paths, chunk=4)
    numbers, slots = tier._places(np.arange(24))
    assert numbers.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    for number in range(3):
        assert slots[numbers == number].tolist() == list(range(8))
    tier.close()


@pytest.mark.parametrize("chunk", [1, 3, 16, 1000])
def test_every_address_has_a_place_of_its_own(paths, chunk):
    """Addresses and places are one to one, also where the chunk does not divide."""
    tier = open_striped(paths, slots_each=17, chunk=chunk)
    addresses = np.arange(tier.num_slots)
    numbers, slots = tier._places(addresses)
    assert len(set(zip(numbers.tolist(), slots.tolist(), strict=True))) == len(slots)
    assert slots.max() < 17
    back = [int(tier._addresses(n, s)) for n, s in zip(numbers, slots, strict=True)]
    assert back == addresses.tolist()
    tier.close()


def test_restart_round_trip(paths):
    """What all directories hold is found again, in one value per namespace."""
    tier = open_striped(paths)
    assert store(tier, list(PAGES), list(PAGES.values())).ok.all()
    tier.close()
    tier = open_striped(paths)
    assert len(list(tier.recover())) == 1
    assert_holds(tier, PAGES)
    tier.close()


def test_what_pages_are_held_as_is_dealt_out_and_found_again(paths):
    """KV and activations over all directories, each at the address of its page."""
    tier = open_striped(paths)
    kinds = np.arange(len(PAGES), dtype=np.uint8) % 3 == 1
    assert store(tier, list(PAGES), list(PAGES.values()), kinds=kinds).ok.all()
    tier.close()
    tier = open_striped(paths)
    (found,) = tier.recover()
    held = dict(zip(found.addresses.tolist(), found.representations, strict=True))
    assert held == dict(zip(PAGES, kinds, strict=True))
    tier.close()


def test_pages_are_recovered_by_age(paths):
    """Old before new, across directories, when pages are dealt out evenly."""
    tier = open_striped(paths)
    order = list(range(48))
    for first in range(0, 48, 6):
        slots = order[first : first + 6]
        store(tier, slots, slots)
    (group,) = tier.recover()
    ages = group.tokens[:, 0].tolist()
    assert sorted(ages) == order
    assert max(abs(age - rank) for rank, age in enumerate(ages)) <= 6
    tier.close()


def test_directories_may_be_swapped_added_and_taken_away(paths):
    """Pages are found at other addresses, and bring the bytes of their keys."""
    tier = open_striped(paths[:2], slots_each=16)
    store(tier, list(range(20)), list(range(600, 620)))
    tier.close()
    tier = open_striped([paths[2], paths[1], paths[0]])
    found = recovered(tier)
    assert sorted(found.values()) == list(range(600, 620))
    assert_holds(tier, found)
    tier.close()
    tier = open_striped(paths[:1])
    found = recovered(tier)
    assert set(found.values()) < set(range(600, 620))
    assert_holds(tier, found)
    tier.close()


def test_smaller_directories_give_up_what_no_address_leads_to(paths):
    """A slot beyond the common size is forgotten for good, not left to come back."""
    tier = open_striped(paths[:1], slots_each=16)
    store(tier, [0, 15], [1, 2])
    tier.close()
    tiers = [open_tier(paths[0], num_slots=16), open_tier(paths[1], num_slots=4)]
    tier = StripedTier(tiers, chunk_bytes=SLOT_BYTES)
    assert tier.num_slots == 8
    assert recovered(tier) == {0: 1}
    tier.close()
    tier = open_striped(paths[:1], slots_each=16)
    assert recovered(tier) == {0: 1}
    tier.close()


def test_one_failing_directory_costs_its_pages_only(paths):
    """Reads and writes of the others go on; health names the one that rests."""
    clock, calls = ManualClock(), [FailingCalls() for _ in paths]
    tier = open_striped(paths, calls=calls, clock=clock)
    store(tier, list(PAGES), list(PAGES.values()))
    numbers, _ = tier._places(np.arange(40))
    calls[1].read_error = calls[1].write_error = EIO
    for _ in range(4):
        result = load(tier, list(PAGES))[1]
        assert result.ok.tolist() == (numbers != 1).tolist()
    for _ in range(4):
        result = store(tier, list(PAGES), list(PAGES.values()))
        assert result.ok.tolist() == (numbers != 1).tolist()
    health = tier.health()
    assert health.usable
    assert "2 of 3 directories" in health.detail
    assert "directory 2: reads rest" in health.detail
    calls[1].read_error = calls[1].write_error = 0
    clock.advance(6.0)
    assert store(tier, list(PAGES), list(PAGES.values())).ok.all()
    assert_holds(tier, PAGES)
    assert "3 of 3" in tier.health().detail
    tier.close()


def test_a_directory_that_cannot_be_scanned_costs_its_pages_only(paths):
    """A restart finds what the others have."""
    tier = open_striped(paths)
    store(tier, list(PAGES), list(PAGES.values()))
    numbers, _ = tier._places(np.arange(40))
    tier.close()
    calls = [FailingCalls() for _ in paths]
    tier = open_striped(paths, calls=calls)
    calls[1].read_error = EIO
    found = tier.recover()
    assert sorted(found.addresses) == np.flatnonzero(numbers != 1).tolist()
    for each in calls:
        each.read_error = EIO
    assert not len(tier.recover())
    tier.close()


def test_one_full_directory_costs_its_pages_only(paths):
    """ENOSPC in one directory leaves the pages of the others ok."""
    calls = [FailingCalls() for _ in paths]
    tier = open_striped(paths, calls=calls)
    calls[0].allocate_error = ENOSPC
    result = store(tier, list(range(6)), list(range(6)))
    assert result.ok.tolist() == [False, False, True, True, True, True]
    assert "No space left" in result.error
    tier.close()


def test_a_directory_that_vanishes_comes_back(paths):
    """Its pages are misses meanwhile; after the rest it is made anew and used."""
    clock = ManualClock()
    tier = open_striped(paths, clock=clock)
    store(tier, list(PAGES), list(PAGES.values()))
    shutil.rmtree(paths[2])
    numbers, _ = tier._places(np.arange(40))
    for _ in range(3):
        result = store(tier, list(PAGES), list(PAGES.values()))
        assert result.ok.tolist() == (numbers != 2).tolist()
    assert "directory 3: the directory has vanished" in tier.health().detail
    assert not paths[2].exists()
    clock.advance(6.0)
    assert store(tier, list(PAGES), list(PAGES.values())).ok.all()
    assert_holds(tier, PAGES)
    assert "3 of 3" in tier.health().detail
    tier.close()


def test_all_directories_gone_is_not_usable(paths):
    """A tier without any usable directory says so."""
    tier = open_striped(paths)
    for path in paths:
        shutil.rmtree(path)
    for each in tier._tiers:
        each.look()
    assert not tier.health().usable
    assert not store(tier, [0, 2, 4], [1, 2, 3]).ok.any()
    tier.close()


def test_a_failed_open_leaves_nothing_locked(paths):
    """If one directory is refused, the others are free again."""
    held = open_tier(paths[1])
    settings = {
        "slot_bytes": SLOT_BYTES,
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "slab_bytes": SLOTS_PER_SLAB * SLOT_BYTES,
        "fingerprint": "model-a",
    }
    with pytest.raises(TierUnavailableError, match="in use by process"):
        open_disk_tier(paths, max_bytes=1 << 20, **settings)
    held.close()
    tier = open_disk_tier(paths, max_bytes=1 << 20, **settings)
    assert isinstance(tier, StripedTier)
    taken = tier.num_slots * SLOT_BYTES
    assert (1 << 20) * 0.9 < taken <= 1 << 20
    tier.close()
    one = open_disk_tier(paths[:1], max_bytes=1 << 20, **settings)
    assert not isinstance(one, StripedTier)
    one.close()


def test_the_same_directory_twice_is_refused(paths):
    """A path that is given twice is in use by this very process."""
    with pytest.raises(TierUnavailableError, match="in use"):
        open_striped([paths[0], paths[0]])


def test_different_slots_make_no_stripes():
    """Tiers of different slot sizes are a defect of the caller."""
    small, large = HostTier(4096, 4), HostTier(8192, 4)
    with pytest.raises(ValueError, match="make no stripes"):
        StripedTier([small, large])
    small.close()
    large.close()


def test_a_defect_in_one_part_waits_for_the_others(paths):
    """An exception out of one directory is raised after all parts have ended."""
    tier = open_striped(paths[:2])
    ended = []
    real = tier._tiers[1].load

    def slow(io):
        result = real(io)
        ended.append(True)
        return result

    def broken(io):
        raise RuntimeError("a defect")

    tier._tiers[0].load, tier._tiers[1].load = broken, slow
    store(tier, [0, 2], [1, 2])
    with pytest.raises(RuntimeError, match="a defect"):
        load(tier, [0, 2])
    assert ended == [True]
    tier.close()
