"""Where each rank keeps its part of the pages, and what of it is taken over."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.keys import Namespace
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import PageRecords
from sgl_tiered.engines.sglang.agreement import Agreement
from sgl_tiered.engines.sglang.config import TieredConfig
from sgl_tiered.engines.sglang.rank_disk import adopt, open_disk
from sgl_tiered.tiers.emulator import Emulator
from tests.unit.engines.ranks_support import on_two_ranks

LAYOUT = PageLayout(num_layers=2, page_tokens=2, token_bytes=96)


def both(work):
    """Run ``work(rank, agreement)`` on two ranks; return what it returned."""
    clock = ManualClock()
    return on_two_ranks(lambda rank, seat: work(rank, Agreement(clock, seat)))


def records(num):
    """Return what a former server left of some pages."""
    return PageRecords(
        namespace=bytes(16),
        keys=np.arange(num * 16, dtype=np.uint8).reshape(num, 16),
        parents=np.zeros((num, 16), np.uint8),
        tokens=np.zeros((num, LAYOUT.page_tokens), np.int32),
        checksums=np.zeros(num, np.uint64),
        addresses=np.arange(num),
    )


class Left:
    """A disk that has something from a former server."""

    tier_id = None

    def __init__(self, num):
        self.found = [records(num)]
        self.forgotten = []

    def recover(self):
        return self.found

    def forget(self, addresses):
        self.forgotten += addresses.tolist()


class Adopting:
    """A cache that takes over everything."""

    def __init__(self):
        self.num_adopted = 0

    def adopt(self, tier, found):
        self.num_adopted += len(found.addresses)
        return len(found.addresses), np.zeros(0, np.int64)


@pytest.mark.parametrize(("nums", "num_adopted"), [((3, 3), 3), ((3, 2), 0)])
def test_what_is_left_is_taken_over_if_it_is_the_same_on_all_ranks(nums, num_adopted):
    """A crash may have cut the ranks off apart: then all of it is forgotten."""

    def work(rank, agreement):
        disk, cache = Left(nums[rank]), Adopting()
        adopt(cache, disk, agreement)
        return cache.num_adopted, len(disk.forgotten)

    found = both(work)
    expected = [(num_adopted, 0 if num_adopted else num) for num in nums]
    assert found == expected


def test_a_single_rank_takes_over_what_there_is():
    """Without a word to anybody."""
    disk, cache = Left(2), Adopting()
    adopt(cache, disk, Agreement(ManualClock()))
    assert (cache.num_adopted, disk.forgotten) == (2, [])


def test_each_rank_has_a_folder_of_its_own(tmp_path):
    """A folder has one user; that of a single rank is the one that was given."""
    config = TieredConfig(host_bytes=1, disk_paths=(tmp_path,), disk_bytes=1 << 22)
    namespace = Namespace("model", "bfloat16", LAYOUT.page_tokens, "0/2")

    def work(rank, agreement):
        disk = open_disk(config, LAYOUT, namespace, Emulator(), agreement)
        disk.close()
        return disk.num_slots

    first, second = both(work)
    assert first == second > 0
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}
    alone = tmp_path / "alone"
    config = TieredConfig(host_bytes=1, disk_paths=(alone,), disk_bytes=1 << 22)
    clock = ManualClock()
    disk = open_disk(config, LAYOUT, namespace, Emulator(), Agreement(clock))
    disk.close()
    assert not (alone / "rank-0-of-1").exists()
