"""The host tier's memory: sizes, pinning, pre-faulting."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.tiers import memory
from sgl_tiered.tiers.host import HostTier


def test_more_than_the_machine_has_is_refused():
    """A size beyond the available memory is refused with one sentence."""
    available = memory.available_memory_bytes()
    assert available is not None
    with pytest.raises(ConfigError, match=r"host size: .* GiB asked for") as caught:
        HostTier(4096, 2 * available // 4096)
    assert str(caught.value).count(".\n") == 0
    assert caught.value.setting == "host size"


def test_memory_that_cannot_be_mapped_is_refused():
    """A limit of the process is met with one sentence, and not with a traceback."""
    code = (
        "import resource; from sgl_tiered.tiers.memory import MemoryRegion;"
        "from sgl_tiered.errors import ConfigError;"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096;"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "try: MemoryRegion(1 << 10, 1 << 20)\n"
        "except ConfigError as error: print(error)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "1.00 GiB cannot be mapped (Cannot allocate memory)" in told.stdout
    assert "ulimit -v" in told.stdout


def test_memory_that_cannot_be_locked_is_refused():
    """A start that is refused leaves neither a thread nor a pin behind."""

    def refuse(address, num_bytes):
        raise ConfigError("--size", "cannot be pinned", "raise ulimit -l")

    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="cannot be pinned"):
        HostTier(4096, 10, register=refuse)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("slot_bytes", "num_slots"), [(0, 1), (5000, 1), (4096, 0)])
def test_wrong_sizes_are_refused(slot_bytes, num_slots):
    """Slots must be aligned, and there must be one."""
    with pytest.raises(ConfigError):
        HostTier(slot_bytes, num_slots)


def test_region_is_pinned_once_and_unpinned_once():
    """``register`` sees the whole region; its undo runs at the first close only."""
    calls = []

    def register(address, num_bytes):
        calls.append((address, num_bytes))
        return lambda: calls.append("undone")

    tier = HostTier(4096, 10, register=register)
    assert calls == [(tier.region.ctypes.data, 40960)]
    tier.close()
    tier.close()
    assert calls[1:] == ["undone"]


def test_views_outlive_close():
    """Whoever still holds the region after close may read it."""
    tier = HostTier(4096, 4)
    region = tier.region
    region[2] = 7
    tier.close()
    del tier
    assert (region[2] == 7).all()


def test_group_limit_counts(monkeypatch, tmp_path):
    """The smaller of machine and control group decides."""
    monkeypatch.setattr(memory, "_group_available_bytes", lambda: 12345)
    assert memory.available_memory_bytes() == 12345
    monkeypatch.setattr(memory, "_group_available_bytes", lambda: None)
    assert memory.available_memory_bytes() > 12345


def test_prefault_changes_no_bytes():
    """Populating in the background neither disturbs nor waits for writers."""
    region = memory.MemoryRegion(1024, 65536)
    region.array[:, 0] = np.arange(1024) % 251
    region.close()
    assert np.array_equal(region.array[:, 0], np.arange(1024) % 251)
    assert not region.array[:, 1:].any()
