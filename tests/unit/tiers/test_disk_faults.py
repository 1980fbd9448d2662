"""A disk that is full, broken, slow to move whole requests, or closed."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.tiers.base import TierIO
from sgl_tiered.tiers.disk_files import takes_direct_io
from sgl_tiered.tiers.disk_format import slab_name
from tests.unit.tiers.disk_support import (
    EIO,
    ENOSPC,
    PAGE_BYTES,
    SLOT_BYTES,
    assert_holds,
    load,
    open_tier,
    recovered,
    store,
)


def test_full_disk_is_a_value(tier, calls, path):
    """Without space a store is not ok, leaves no file, and loads go on."""
    assert store(tier, [0], [1]).ok.all()
    calls.allocate_error = ENOSPC
    result = store(tier, [1, 8, 9], [2, 3, 4])
    assert result.ok.tolist() == [True, False, False]
    assert "No space left" in result.error
    assert not (path / slab_name(1)).exists()
    assert_holds(tier, {0: 1, 1: 2})
    assert recovered(tier) == {0: 1, 1: 2}


def test_a_slab_that_cannot_grow_keeps_its_pages(path, calls):
    """A tier that grew on a full disk serves the old pages and takes no space."""
    small = open_tier(path, num_slots=12)
    store(small, [8], [1])
    small.close()
    size = (path / slab_name(1)).stat().st_size
    calls.allocate_error = ENOSPC
    large = open_tier(path, calls=calls)
    assert recovered(large) == {8: 1}
    assert not store(large, [14], [2]).ok.any()
    assert_holds(large, {8: 1})
    large.close()
    assert (path / slab_name(1)).stat().st_size == size


def test_full_disk_rests_writes_and_not_reads(tier, calls, clock):
    """After repeated failures stores are refused at once; loads still work."""
    store(tier, [0], [1])
    calls.allocate_error = ENOSPC
    for _ in range(3):
        store(tier, [8], [2])
    calls.allocate_error = 0
    health = tier.health()
    assert health.usable
    assert "writes rest" in health.detail
    assert "No space left" in health.detail
    assert not store(tier, [8], [2]).ok.any()
    assert_holds(tier, {0: 1})
    clock.advance(6.0)
    assert store(tier, [8], [2]).ok.all()
    assert "rest" not in tier.health().detail


def test_read_errors_make_the_tier_rest_then_probe(tier, calls, clock):
    """Reads that fail again and again stop for a while; one probe brings them back."""
    store(tier, [0], [1])
    calls.read_error = EIO
    for _ in range(3):
        result = load(tier, [0])[1]
        assert not result.ok.any()
        assert "Input/output error" in result.error
    assert not tier.health().usable
    seen = calls.num_reads
    assert not load(tier, [0])[1].ok.any()
    assert calls.num_reads == seen, "the tier read while it rested"
    clock.advance(6.0)
    assert not load(tier, [0])[1].ok.any()
    assert calls.num_reads == seen + 1, "one probe, no more"
    assert not load(tier, [0])[1].ok.any()
    assert calls.num_reads == seen + 1, "one probe, no more"
    calls.read_error = 0
    clock.advance(6.0)
    assert_holds(tier, {0: 1})
    assert tier.health().usable


def test_corrupt_pages_do_not_make_the_tier_rest(tier, path):
    """A wrong checksum is a miss of one page and says nothing about the disk."""
    result = store(tier, [0, 1], [1, 2])
    for _ in range(5):
        load(tier, [0], result.checksums[:1] ^ np.uint64(1))
    assert tier.health().usable
    assert_holds(tier, {0: 1, 1: 2})


def test_write_error_leaves_no_record(tier, calls, path):
    """A page whose write failed is a miss, now and after a restart."""
    store(tier, [0, 1], [1, 2])
    calls.write_error = EIO
    assert not store(tier, [1], [3]).ok.any()
    calls.write_error = 0
    tier.close()
    again = open_tier(path)
    found = recovered(again)
    assert found[0] == 1
    # Its old record may be left; then the old bytes have to be there as well.
    assert_holds(again, found)
    again.close()


def test_failed_overwrite_of_half_a_page(tier, calls, path):
    """A slot torn by a failed write is never ok, under no checksum."""
    old = store(tier, [0], [1]).checksums
    calls.max_write_bytes = 4096
    real = calls.pwritev
    budget = [2]  # one call voids the record, one writes half of the page

    def fails_midway(fd, views, offset):
        if budget[0] == 0:
            raise OSError(EIO, os.strerror(EIO))
        budget[0] -= 1
        return real(fd, views, offset)

    calls.pwritev = fails_midway
    result = store(tier, [0], [2])
    assert not result.ok.any()
    calls.pwritev = real
    assert not load(tier, [0])[1].ok.any()
    assert not load(tier, [0], old)[1].ok.any()
    assert recovered(tier) == {}


@pytest.mark.parametrize("num_bytes", [4096, 8192, 12288])
def test_short_transfers_are_continued(tier, calls, num_bytes):
    """Reads and writes that move a part go on where they stopped."""
    calls.max_read_bytes = calls.max_write_bytes = num_bytes
    pages = {slot: 50 + slot for slot in range(20)}
    assert store(tier, list(pages), list(pages.values())).ok.all()
    assert_holds(tier, pages)


def test_direct_refused_at_the_first_write(path, calls):
    """A file system that opens with O_DIRECT but refuses the I/O is found out."""

    def refuses(fd, views, offset):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    path.mkdir()
    assert isinstance(takes_direct_io(calls, path), bool)
    calls.pwritev = refuses
    assert not takes_direct_io(calls, path)
    assert list(path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_tmpfs():
    """A file system in memory works, with O_DIRECT or without, and says which."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier = open_tier(Path(directory) / "tier")
        assert store(tier, [0, 9], [1, 2]).ok.all()
        assert_holds(tier, {0: 1, 9: 2})
        assert tier.health().detail.startswith("O_DIRECT" if tier.direct else "buff")
        tier.close()


def test_misaligned_buffer_is_refused_under_direct_io(tier):
    """A buffer that O_DIRECT cannot take is a defect of the caller."""
    if not tier.direct:
        pytest.skip("this file system has no O_DIRECT")
    raw = np.zeros(SLOT_BYTES + 4096 + 1, np.uint8)
    start = -raw.ctypes.data % 4096 + 1
    buffer = raw[start : start + SLOT_BYTES].reshape(1, SLOT_BYTES)
    with pytest.raises(ValueError, match="bounds"):
        tier.load(TierIO(np.array([0]), buffer, np.array([0])))


def test_closed_tier_answers_with_values(path):
    """After close, transfers fail as values and the rest does nothing."""
    tier = open_tier(path)
    store(tier, [0], [1])
    tier.close()
    tier.close()
    assert "closed" in load(tier, [0])[1].error
    assert "closed" in store(tier, [0], [1]).error
    assert not len(tier.recover())
    tier.forget(np.array([0]))
    assert not tier.health().usable


def test_close_waits_for_a_running_load(path, calls):
    """The files stay open until the last transfer has ended."""
    tier = open_tier(path, calls=calls)
    store(tier, [0], [1])
    entered, go_on = threading.Event(), threading.Event()
    real = calls.preadv

    def held(fd, views, offset):
        entered.set()
        go_on.wait()
        return real(fd, views, offset)

    calls.preadv = held
    results = []
    reader = threading.Thread(target=lambda: results.append(load(tier, [0])))
    reader.start()
    entered.wait()
    closer = threading.Thread(target=tier.close)
    closer.start()
    go_on.set()
    reader.join()
    closer.join()
    pages, result = results[0]
    assert result.ok.all()
    assert pages.shape == (1, PAGE_BYTES)


FULL_DISK = """
import subprocess, sys
from pathlib import Path
from tests.unit.tiers.disk_support import assert_holds, open_tier, recovered, store
path = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", path], check=True)
tier = open_tier(path / "tier")
results = [store(tier, [8 * slab], [slab + 1]) for slab in range(4)]
stored = {8 * slab: slab + 1 for slab, r in enumerate(results) if r.ok.all()}
assert 0 < len(stored) < 4, stored
assert all("No space left" in r.error for r in results if not r.ok.all())
assert_holds(tier, stored)
tier.close()
tier = open_tier(path / "tier")
assert recovered(tier) == stored
assert_holds(tier, stored)
tier.close()
"""


def test_real_full_file_system(tmp_path):
    """On a disk that is really full some stores fail; what is stored stays."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    allowed = subprocess.run([*unshare, "true"], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip("this machine allows no mount namespaces")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
