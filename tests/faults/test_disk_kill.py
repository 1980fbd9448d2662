"""The long form of the kills of a process that uses the disk tier without a model."""

import pytest

from sgl_tiered.tiers.disk_mmap import why_not_mapped
from sgl_tiered.tiers.disk_nixl import open_nixl_ring
from tests.unit.tiers import disk_kill

pytestmark = [pytest.mark.faults_long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("io", "num_folders", "num_cycles"),
    [("auto", 1, 200), ("threads", 3, 50), ("uring", 1, 50), ("mmap", 1, 50)],
)
def test_killed_writers(tmp_path, io, num_folders, num_cycles):
    """After every kill each stored page is there, and nothing torn is served."""
    if io == "uring" and isinstance(open_nixl_ring(), str):
        pytest.skip("no io_uring through NIXL here")
    if io == "mmap" and why_not_mapped():
        pytest.skip(why_not_mapped())
    paths = [tmp_path / str(number) for number in range(num_folders)]
    num_found = disk_kill.run_cycles(paths, io, num_cycles, seed=num_cycles)
    assert num_found > 10 * num_cycles
