"""kill -9 at any moment: what was stored is found, and nothing torn is served.

The short form; ``tests/faults/test_disk_kill.py`` has the long one.
"""

import signal
import subprocess
import sys

import numpy as np
import pytest

from sgl_tiered.tiers.disk_mmap import why_not_mapped
from sgl_tiered.tiers.disk_nixl import open_nixl_ring
from tests.unit.tiers import disk_kill
from tests.unit.tiers.disk_support import load, open_tier, page_of


@pytest.mark.timeout(240)
def test_killed_writers(tmp_path):
    """After each of ten kills every stored page is there, and loads as it was."""
    assert disk_kill.run_cycles([tmp_path / "tier"], "auto", 10) > 100


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("io", "num_folders"), [("threads", 2), ("uring", 1), ("mmap", 1)]
)
def test_killed_writers_of_other_kinds(tmp_path, io, num_folders):
    """The same with two directories, and by every I/O engine that works here."""
    if io == "uring" and isinstance(open_nixl_ring(), str):
        pytest.skip("no io_uring through NIXL here")
    if io == "mmap" and why_not_mapped():
        pytest.skip(why_not_mapped())
    paths = [tmp_path / str(number) for number in range(num_folders)]
    assert disk_kill.run_cycles(paths, io, 3) > 10


def test_the_check_finds_a_torn_page(tmp_path):
    """A page whose bytes differ from its record fails the check, so it can fail."""
    paths = [tmp_path / "tier"]
    tier = disk_kill.open_tier(paths, "threads")
    assert disk_kill.store(tier, [3], [7]).ok.all()
    tier.close()
    book = disk_kill.Book()
    book.read("done 3:7")
    assert disk_kill.check(paths, "threads", book) == 1
    lost = disk_kill.Book()
    lost.read("done 3:7 4:8")
    with pytest.raises(AssertionError, match="slot 4"):
        disk_kill.check(paths, "threads", lost)
    with (paths[0] / "tiered-slab-000000.kv").open("r+b") as slab:
        slab.seek(3 * disk_kill.SLOT_BYTES + 5)
        slab.write(b"torn")
    with pytest.raises(AssertionError, match="not as stored"):
        disk_kill.check(paths, "threads", book)


def test_acknowledged_pages_survive_a_kill(tmp_path):
    """A store that returned before the kill is there after it, unless overwritten."""
    path = tmp_path / "tier"
    code = (
        "import sys, os, signal; from pathlib import Path;"
        "from tests.unit.tiers.disk_support import open_tier, store;"
        "tier = open_tier(Path(sys.argv[1]));"
        "assert store(tier, range(20), range(100, 120)).ok.all();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert child.returncode == -signal.SIGKILL
    tier = open_tier(path)
    (group,) = tier.recover()
    assert sorted(group.addresses.tolist()) == list(range(20))
    pages, result = load(tier, group.addresses, group.checksums)
    assert result.ok.all()
    for page, address in zip(pages, group.addresses.tolist(), strict=True):
        assert np.array_equal(page, page_of(100 + address))
    tier.close()
