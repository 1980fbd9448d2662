"""A disk that goes and comes back: vanished, remounted, slow, without O_DIRECT."""

import errno
import fcntl
import os
import shutil

import numpy as np
import pytest

from sgl_tiered.errors import TierUnavailableError
from sgl_tiered.tiers.disk_directory import DiskDirectory
from tests.unit.tiers.disk_support import (
    EIO,
    PATIENCE_S,
    REST_S,
    FailingCalls,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)


def wear_out(action):
    for _ in range(3):
        assert not action().ok.any()


def test_a_removed_directory_is_made_anew(tier, path, clock):
    """Stores fail while the breaker counts; after the rest the tier starts empty."""
    store(tier, [0], [1])
    shutil.rmtree(path)
    wear_out(lambda: store(tier, [8], [2]))
    assert not path.exists()
    clock.advance(REST_S + 1)
    assert store(tier, [8], [2]).ok.all()
    assert tier.health().usable
    assert not load(tier, [0])[1].ok.any()
    assert_holds(tier, {8: 2})
    tier.close()
    again = open_tier(path)
    assert recovered(again) == {8: 2}
    again.close()


def test_a_directory_that_returns_brings_its_pages(tier, path, tmp_path, clock):
    """What was moved away and back is served again, and nothing is written over."""
    store(tier, [0, 9], [1, 2])
    path.rename(tmp_path / "elsewhere")
    wear_out(lambda: store(tier, [16], [3]))
    clock.advance(REST_S + 1)
    (tmp_path / "elsewhere").rename(path)
    assert store(tier, [16], [3]).ok.all()
    assert_holds(tier, {0: 1, 9: 2, 16: 3})


def test_a_stale_directory_is_opened_afresh(tier, path, calls, clock):
    """After a failed probe the files are opened again: a remounted disk is found."""
    store(tier, [0, 9], [1, 2])
    calls.read_error = EIO
    wear_out(lambda: load(tier, [0])[1])
    clock.advance(REST_S + 1)
    assert not load(tier, [0])[1].ok.any()
    calls.read_error = 0
    volume = tier._access.volume
    clock.advance(REST_S + 1)
    assert_holds(tier, {0: 1, 9: 2})
    assert tier._access.volume is not volume


def test_pages_forgotten_meanwhile_stay_forgotten(tier, path, tmp_path, clock):
    """A slot forgotten while the disk was away is a miss after its return."""
    store(tier, [0, 9], [1, 2])
    path.rename(tmp_path / "elsewhere")
    wear_out(lambda: store(tier, [16], [3]))
    tier.forget(np.array([9]))
    (tmp_path / "elsewhere").rename(path)
    clock.advance(REST_S + 1)
    store(tier, [16], [3])
    assert load(tier, [0, 9, 16])[1].ok.tolist() == [True, False, True]
    assert recovered(tier) == {0: 1, 16: 3}


def voided(tier):
    """Wait until all that was to be written in the background has been."""
    tier._voider.submit(lambda: None).result(PATIENCE_S)


def come_back_as(copy, tier, path, clock):
    """Put a copy in the place of the tier's directory, and have it opened afresh."""
    shutil.rmtree(path)
    copy.rename(path)
    wear_out(lambda: store(tier, [16], [3]))
    clock.advance(REST_S + 1)
    assert store(tier, [16], [3]).ok.all()


@pytest.mark.parametrize("when", ["before it went", "after it went"])
def test_what_was_voided_in_files_that_are_gone_stays_forgotten(
    tier, path, tmp_path, clock, when
):
    """A disk may come back as it was some time ago, with what was forgotten since."""
    store(tier, [0, 9], [1, 2])
    copy = shutil.copytree(path, tmp_path / "elsewhere")
    if when == "after it went":
        path.rename(tmp_path / "gone")
    tier.forget(np.array([9]))
    voided(tier)
    assert not len(tier._access.volume.book.forgotten()), "its record is to be void"
    if when == "after it went":
        (tmp_path / "gone").rename(path)
    come_back_as(copy, tier, path, clock)
    assert load(tier, [0, 9, 16])[1].ok.tolist() == [True, False, True]
    # Without a word to the tier: what a kill would leave.
    voided(tier)
    after_kill = shutil.copytree(path, tmp_path / "killed")
    tier.close()
    for left in (path, after_kill):
        again = open_tier(left)
        assert recovered(again) == {0: 1, 16: 3}
        again.close()


def test_what_was_written_over_in_files_that_are_gone_is_not_found(
    tier, path, tmp_path, clock
):
    """The page that a slot had before: its owner takes it for another one."""
    store(tier, [0, 9], [1, 2])
    copy = shutil.copytree(path, tmp_path / "elsewhere")
    assert store(tier, [9, 10], [5, 6]).ok.all()
    come_back_as(copy, tier, path, clock)
    assert load(tier, [0, 9, 10])[1].ok.tolist() == [True, False, False]
    tier.close()
    again = open_tier(path)
    assert recovered(again) == {0: 1, 16: 3}
    again.close()


def test_what_nobody_has_looked_at_yet_comes_back(path, tmp_path, clock):
    """A former server's pages are there to be found, but for those forgotten."""
    former = open_tier(path)
    store(former, [0, 8, 9], [1, 8, 2])
    former.close()
    tier = open_tier(path, clock=clock, rest_s=REST_S)
    copy = shutil.copytree(path, tmp_path / "elsewhere")
    tier.forget(np.array([9]))
    voided(tier)
    come_back_as(copy, tier, path, clock)
    assert recovered(tier) == {0: 1, 8: 8, 16: 3}
    tier.close()


def test_another_server_s_mark_is_left_alone(tier, path, clock):
    """The mark of other weights goes into the tier's own directory, or nowhere yet."""
    store(tier, [0], [1])
    shutil.rmtree(path)
    other = open_tier(path)
    store(other, [3], [7])
    tier.relabel("model-b")
    voided(tier)
    other.close()
    again = open_tier(path)
    assert recovered(again) == {3: 7}
    again.close()
    wear_out(lambda: store(tier, [8], [2]))
    clock.advance(REST_S + 1)
    assert store(tier, [8], [2]).ok.all()
    tier.close()
    again = open_tier(path, fingerprint="model-b")
    assert recovered(again) == {8: 2}
    again.close()


def test_another_server_in_the_place_is_respected(tier, path, clock):
    """A directory that somebody else has made there meanwhile is not touched."""
    store(tier, [0], [1])
    shutil.rmtree(path)
    other = open_tier(path)
    store(other, [3], [7])
    wear_out(lambda: store(tier, [8], [2]))
    clock.advance(REST_S + 1)
    result = store(tier, [8], [2])
    assert not result.ok.any()
    assert "in use by process" in result.error
    assert not load(tier, [0])[1].ok.any()
    assert recovered(other) == {3: 7}
    other.close()
    clock.advance(REST_S + 1)
    assert store(tier, [8], [2]).ok.all()


def test_another_file_system_is_not_written_to(path):
    """Where the disk has gone, what lies under its mount point stays clean."""
    path.mkdir()
    wrong = path.stat().st_dev + 1
    with pytest.raises(TierUnavailableError, match="file system has gone"):
        DiskDirectory(path, device=wrong)
    with pytest.raises(TierUnavailableError, match="file system has gone"):
        DiskDirectory(path / "deeper", device=wrong)
    assert list(path.iterdir()) == []


def test_a_missing_parent_is_not_made(tier, path, tmp_path, clock):
    """A tier that comes back makes its own directory and none above it."""
    deep = open_tier(tmp_path / "mount" / "tier", clock=clock)
    shutil.rmtree(tmp_path / "mount")
    wear_out(lambda: store(deep, [0], [1]))
    clock.advance(REST_S + 1)
    assert not store(deep, [0], [1]).ok.any()
    assert not (tmp_path / "mount").exists()
    deep.close()


def test_a_slow_disk_rests(path, clock):
    """I/Os that take too long bring right pages, and after three of them a rest."""

    class Slow(FailingCalls):
        seconds = 0.0

        def preadv(self, fd, views, offset):
            clock.advance(self.seconds)
            return super().preadv(fd, views, offset)

    calls = Slow()
    tier = open_tier(path, calls=calls, clock=clock, slow_io_s=2.0, rest_s=REST_S)
    store(tier, [0], [1])
    calls.seconds = 2.5
    for _ in range(3):
        assert_holds(tier, {0: 1})
    assert not tier.health().usable
    assert "the disk is slow: an I/O took 2.5 s" in tier.health().detail
    assert "slow" in load(tier, [0])[1].error
    calls.seconds = 0.5
    clock.advance(REST_S + 1)
    assert_holds(tier, {0: 1})
    assert tier.health().usable
    tier.close()


def test_a_hanging_disk_turns_others_away(tier, clock):
    """While one I/O hangs, others are refused at once and do not pile up."""
    store(tier, [0], [1])
    engine = tier._payload.engine
    engine._started_s[1] = clock.now()
    clock.advance(60.0)
    result = load(tier, [0])[1]
    assert "an I/O has been running for 60 s" in result.error
    assert not store(tier, [1], [2]).ok.any()
    assert not tier.health().usable
    del engine._started_s[1]
    assert_holds(tier, {0: 1})
    assert tier.health().usable


def test_direct_io_refused_later_goes_on_buffered(path, caplog):
    """EINVAL on an open slab costs O_DIRECT and no page; one line says so."""

    class Refuses(FailingCalls):
        refuse = False

        def preadv(self, fd, views, offset):
            self._check(fd)
            return super().preadv(fd, views, offset)

        def pwritev(self, fd, views, offset):
            self._check(fd)
            return super().pwritev(fd, views, offset)

        def _check(self, fd):
            if self.refuse and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    calls = Refuses()
    tier = open_tier(path, calls=calls)
    if not tier.direct:
        pytest.skip("this file system has no O_DIRECT")
    pages = {slot: slot for slot in range(20)}
    store(tier, list(pages), list(pages.values()))
    calls.refuse = True
    assert_holds(tier, pages)
    assert not tier.direct
    assert "buffered" in tier.health().detail
    more = {24: 5, 30: 6}
    assert store(tier, list(more), list(more.values())).ok.all()
    assert_holds(tier, pages | more)
    assert len([m for m in caplog.messages if "was refused" in m]) == 1
    tier.close()


def test_einval_that_stays_is_an_error(tier, calls):
    """Where the page cache does not help either, the pages are not ok."""
    store(tier, [0], [1])
    calls.read_error = errno.EINVAL
    result = load(tier, [0])[1]
    assert not result.ok.any()
    assert "Invalid argument" in result.error


def test_a_load_of_nothing_is_no_probe(tier, calls, clock):
    """Pages that were never stored say nothing about a disk that failed."""
    store(tier, [0], [1])
    calls.read_error = EIO
    wear_out(lambda: load(tier, [0])[1])
    clock.advance(REST_S + 1)
    assert not load(tier, [20])[1].ok.any()
    assert not tier.health().usable
    calls.read_error = 0
    clock.advance(REST_S + 1)
    assert_holds(tier, {0: 1})
    assert tier.health().usable


def test_a_slab_that_cannot_be_opened_refuses_the_tier(path):
    """The refusal is one sentence, and leaves neither lock nor descriptor behind."""
    fill = open_tier(path)
    store(fill, [0, 9], [1, 2])
    fill.close()

    class RefusesSlabs(FailingCalls):
        def open(self, name, flags, mode=0o600):
            if "slab-000001" in name:
                raise OSError(EIO, os.strerror(EIO))
            return super().open(name, flags, mode)

    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnavailableError, match="Input/output error"):
        open_tier(path, calls=RefusesSlabs())
    assert set(os.listdir("/proc/self/fd")) == before
    again = open_tier(path)
    assert recovered(again) == {0: 1, 9: 2}
    again.close()
