"""Device-DAX memory: what sysfs says of it, and what is mapped, locked and refused."""

import subprocess
import sys

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers.devdax import DaxDevice, DaxRegion, dax_device, dax_devices
from tests.unit.tiers.sysfs_support import UNIT, add_dax, dax_file

ROW = 4096


@pytest.fixture
def sysfs(tmp_path):
    """One device of 16 MiB, for which a file stands in."""
    return add_dax(tmp_path / "sys")


@pytest.fixture
def device(tmp_path):
    return dax_file(tmp_path)


def test_devices_are_listed_with_their_facts(sysfs):
    """Sizes, alignment (hexadecimal), node; other files are passed over."""
    add_dax(sysfs, "dax10.1", size=4 * UNIT, target_node=-1, driver="kmem")
    (sysfs / "bus/dax/devices/dax_region0").mkdir()
    first, second = dax_devices(sysfs)
    assert first == DaxDevice("dax0.0", 8 * UNIT, UNIT, 1, is_system_ram=False)
    assert second == DaxDevice("dax10.1", 4 * UNIT, UNIT, None, is_system_ram=True)
    assert str(first.path) == "/dev/dax0.0"
    assert dax_devices(sysfs / "none") == []


def test_bytes_go_through_the_shared_mapping(sysfs, device):
    """What is written to the region is in the device, from the offset on."""
    region = DaxRegion(3, ROW, device, offset_bytes=UNIT, sysfs=sysfs)
    assert region.array.shape == (3, ROW)
    assert region.array.ctypes.data % ROW == 0
    region.array[:] = np.arange(3, dtype=np.uint8)[:, None] + 5
    region.close()
    region.close()
    with device.open("rb") as file:
        content = file.read()
    assert content[UNIT : UNIT + 3 * ROW : ROW] == bytes([5, 6, 7])
    assert not any(content[:UNIT])


def test_the_whole_device_can_be_used(sysfs, device):
    """To the last byte, and not one more."""
    DaxRegion(8 * UNIT // ROW, ROW, device, sysfs=sysfs).close()
    with pytest.raises(ConfigError, match=r"of \S+ left after the offset") as caught:
        DaxRegion(8 * UNIT // ROW + 1, ROW, device, sysfs=sysfs)
    assert caught.value.setting == "--tiered-cxl-size"


@pytest.mark.parametrize("offset", [ROW, UNIT + 1])
def test_an_offset_off_the_alignment_is_refused(sysfs, device, offset):
    """The kernel would only say EINVAL."""
    with pytest.raises(ConfigError, match=f"not a multiple of {UNIT} bytes"):
        DaxRegion(1, ROW, device, offset_bytes=offset, sysfs=sysfs)


def test_an_offset_beyond_the_end_leaves_nothing(sysfs, device):
    """No negative room."""
    with pytest.raises(ConfigError, match=r"0\.00 GiB of"):
        DaxRegion(1, ROW, device, offset_bytes=16 * UNIT, sysfs=sysfs)


def test_two_servers_cannot_have_the_same_bytes(sysfs, device):
    """The second is refused; another range is free, and so is this one afterwards."""
    first = DaxRegion(1, ROW, device, sysfs=sysfs)
    with pytest.raises(ConfigError, match="in use by another server"):
        DaxRegion(1, ROW, device, sysfs=sysfs)
    DaxRegion(1, ROW, device, offset_bytes=UNIT, sysfs=sysfs).close()
    # Closing another region of the same device must not have lost the lock.
    with pytest.raises(ConfigError, match="in use by another server"):
        DaxRegion(1, ROW, device, sysfs=sysfs)
    view = first.array
    first.close()
    DaxRegion(1, ROW, device, sysfs=sysfs).close()
    assert not view.any()


def test_another_process_is_refused_as_well(sysfs, device):
    """The lock is the kernel's, not this process's own bookkeeping."""
    region = DaxRegion(1, ROW, device, sysfs=sysfs)
    program = (
        "import sys; from pathlib import Path; "
        "from sgl_tiered.tiers.devdax import DaxRegion; "
        "DaxRegion(1, 4096, Path(sys.argv[1]), sysfs=Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(device), str(sysfs)]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    region.close()
    assert "in use by another server" in other.stderr
    subprocess.run(command, check=True)


def test_what_is_no_device_is_refused(sysfs, tmp_path):
    """A path that the kernel does not know as device-DAX."""
    with pytest.raises(ConfigError, match="is not a device-DAX node"):
        DaxRegion(1, ROW, tmp_path / "dax7.0", sysfs=sysfs)


def test_memory_in_use_as_a_node_names_the_node(sysfs, tmp_path):
    """The mode system-ram takes the device away; the node is the way to it then."""
    add_dax(sysfs, "dax1.0", target_node=3, driver="kmem")
    with pytest.raises(ConfigError, match="in use as system memory; give node:3"):
        dax_device(tmp_path / "dax1.0", sysfs)


def test_a_device_that_cannot_be_opened_is_refused(sysfs, tmp_path):
    """One sentence with the system's reason."""
    with pytest.raises(ConfigError, match=r"cannot be opened \(No such file"):
        DaxRegion(1, ROW, tmp_path / "dax0.0", sysfs=sysfs)


def test_its_rows_are_pinned_and_unpinned_once(sysfs, device):
    """Nobody copies to what lies behind them in the last unit."""
    calls = []

    def register(address, num_bytes):
        calls.append((address, num_bytes))
        return lambda: calls.append("undone")

    region = DaxRegion(3, ROW, device, register=register, sysfs=sysfs)
    region.close()
    region.close()
    assert calls == [(region.array.ctypes.data, 3 * ROW), "undone"]
