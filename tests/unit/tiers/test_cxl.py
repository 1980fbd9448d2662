"""The CXL tier: what the flag may name, and how a stand-in says what it is."""

from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.testing.throttled import ThrottledTier
from sgl_tiered.tiers.cxl import CxlTier
from sgl_tiered.tiers.cxl_source import CxlSource, largest_bytes, parse_source
from sgl_tiered.tiers.tmpfs import TmpfsRegion
from tests.unit.tiers.sysfs_support import (
    GIB,
    UNIT,
    add_dax,
    add_node,
    add_nodes,
    dax_file,
    first_node,
)

SHM = Path("/dev/shm")
SLOT = 8192


def size(setting, text):
    return int(text)


@pytest.fixture
def sysfs(tmp_path):
    """Cores on node 0, memory without cores on 1 and 2, and dax0.0."""
    tree = add_nodes(tmp_path / "sys", cores="0", memory="0-2")
    return add_dax(tree)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("auto", CxlSource(nodes=(1, 2))),
        ("node:1", CxlSource(nodes=(1,))),
        ("node:2,1,2", CxlSource(nodes=(2, 1))),
        ("/dev/dax0.0", CxlSource(path=Path("/dev/dax0.0"))),
        ("/dev/dax0.0@4096", CxlSource(path=Path("/dev/dax0.0"), offset_bytes=4096)),
        ("emulate:memory", CxlSource(emulated=True)),
        ("emulate:node:0", CxlSource(nodes=(0,), emulated=True)),
        ("emulate:/dev/shm", CxlSource(path=SHM, emulated=True)),
    ],
)
def test_the_flag_is_understood(sysfs, text, source):
    """Each way of naming memory leads to its source."""
    assert parse_source(text, size, sysfs) == source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not understood"),
        ("node:", "is not understood"),
        ("node:a", "is not understood"),
        ("memory", "is not understood"),
        ("emulate:tape", "is not understood"),
        ("node:7", "node 7 has no memory"),
        ("emulate:node:7", "node 7 has no memory"),
        ("node:0", "node 0 has cores, so it is no CXL memory; write emulate:node:0"),
        ("node:1,0", "node 0 has cores"),
        ("/dev/dax3.0", "is not a device-DAX node"),
        ("/dev/sda", "is not a device-DAX node"),
    ],
)
def test_what_is_wrong_is_refused(sysfs, text, words):
    """One sentence that says what to write instead."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_source(text, size, sysfs)
    assert caught.value.setting == "--tiered-cxl"
    assert caught.value.remedy


def test_auto_without_candidates_is_refused(tmp_path):
    """Plain memory is not taken for CXL memory in silence."""
    tree = add_nodes(tmp_path, cores="0", memory="0")
    with pytest.raises(ConfigError, match="auto finds no NUMA node"):
        parse_source("auto", size, tree)


def test_what_a_source_has_to_give(sysfs):
    """The nodes' free memory, or the device behind its offset; a stand-in is asked."""
    add_node(sysfs, 1, total=0, free=GIB)
    assert largest_bytes(CxlSource(nodes=(1, 2)), sysfs) == 2 * GIB
    dax = CxlSource(path=Path("/dev/dax0.0"), offset_bytes=UNIT)
    assert largest_bytes(dax, sysfs) == 7 * UNIT
    assert largest_bytes(CxlSource(emulated=True), sysfs) is None


def test_only_devdax_is_beside_the_machines_memory():
    """Nodes and stand-ins take from what the host tier takes from."""
    assert CxlSource(nodes=(1,)).is_machine_memory
    assert CxlSource(emulated=True).is_machine_memory
    assert CxlSource(path=SHM, emulated=True).is_machine_memory
    assert not CxlSource(path=Path("/dev/dax0.0")).is_machine_memory


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (CxlSource(emulated=True), "CXL is emulated by plain memory"),
        (
            CxlSource(path=SHM, emulated=True),
            "CXL is emulated by a tmpfs file in /dev/shm",
        ),
    ],
)
def test_a_stand_in_says_so(source, words):
    """In its health, before and after it is closed, and through a throttle."""
    tier = CxlTier(source, SLOT, 4)
    assert tier.tier_id is TierId.CXL
    for state in (tier.health(), ThrottledTier(tier, 1e9).health()):
        assert state.emulated
        assert state.usable
        assert state.detail.startswith(words)
    tier.close()
    assert tier.health().emulated
    assert not tier.health().usable


def test_a_node_that_stands_in_says_where_it_is():
    """Emulated as well, and its placement was checked all the same."""
    node = first_node()
    tier = CxlTier(CxlSource(nodes=(node,), emulated=True), SLOT, 4)
    assert tier.health().emulated
    assert tier.health().detail == (
        f"CXL is emulated by NUMA node {node}, bound; "
        f"8 of 8 pages checked: node {node} 100%"
    )
    tier.close()


def test_devdax_is_not_emulated(sysfs, tmp_path):
    """A real place is named and not marked."""
    source = CxlSource(path=dax_file(tmp_path), offset_bytes=UNIT)
    tier = CxlTier(source, SLOT, 4, sysfs=sysfs)
    health = tier.health()
    assert not health.emulated
    assert health.detail == f"CXL is {source.path} from byte {UNIT} on"
    tier.close()


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(0, 1), (5000, 1), (4096, 0)])
def test_wrong_sizes_are_refused(slot_bytes, num_slots):
    """Slots must be aligned, and there must be one."""
    with pytest.raises(ConfigError):
        CxlTier(CxlSource(emulated=True), slot_bytes, num_slots)


def test_more_than_the_machine_has_is_refused():
    """A stand-in cannot be larger than memory."""
    with pytest.raises(ConfigError, match=r"--tiered-cxl-size: .* GiB asked for"):
        CxlTier(CxlSource(emulated=True), SLOT, 2**40)


def test_a_tmpfs_file_leaves_nothing_behind():
    """The file has no name, so not even a killed server leaves one."""
    before = set(SHM.iterdir())
    region = TmpfsRegion(4, SLOT, SHM)
    assert set(SHM.iterdir()) == before
    region.array[:] = 3
    view = region.array
    region.close()
    assert (view == 3).all()


@pytest.mark.parametrize(
    ("folder", "rows", "words"),
    [
        (Path("/proc"), 1, "is not in memory"),
        (Path("/no/such/folder"), 1, "cannot be used"),
        (SHM, 2**40, "does not give"),
    ],
)
def test_a_folder_that_does_not_serve_is_refused(folder, rows, words):
    """Not in memory, not there, or too small."""
    with pytest.raises(ConfigError, match=words):
        TmpfsRegion(rows, SLOT, folder)


def test_a_tmpfs_file_is_pinned_and_unpinned_once():
    """As every other region: its rows, not what is left of the last huge page."""
    calls = []

    def register(address, num_bytes):
        calls.append((address, num_bytes))
        return lambda: calls.append("undone")

    region = TmpfsRegion(4, SLOT, SHM, register=register)
    region.close()
    region.close()
    assert calls == [(region.array.ctypes.data, 4 * SLOT), "undone"]
    assert np.count_nonzero(region.array) == 0
