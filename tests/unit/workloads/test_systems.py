"""Compared servers differ in nothing but what lies below the device."""

from __future__ import annotations

from pathlib import Path

from sgl_tiered_workloads.systems import (
    MB,
    Device,
    Tiers,
    faulty_spec,
    hicache_spec,
    plain_spec,
    tiered_spec,
)

DEVICE = Device(Path("m"), 4096, 16, ("--chunked-prefill-size", "512"))
TIERS = Tiers(64 * MB, Path("d"), 128 * MB)


def test_tiers_only_add_flags_to_plain() -> None:
    """Model, pool, page size and extra flags are the same in every system."""
    plain = plain_spec(DEVICE)
    tiered = tiered_spec(DEVICE, TIERS)
    assert tiered.model == plain.model
    assert tiered.flags == (*plain.flags, *TIERS.flags)
    assert plain.env == tiered.env == {}


def test_without_a_path_there_is_no_disk_flag() -> None:
    """A host tier alone says nothing of a disk."""
    assert not any("disk" in flag for flag in Tiers(64 * MB).flags)
    assert Tiers(64 * MB).flags[-1] == "64MB"


def test_a_faulty_server_is_the_tiered_one_with_the_fault_allowed() -> None:
    """The negative control differs from the server under test in the fault only."""
    faulty = faulty_spec(DEVICE, TIERS, "swap")
    good = tiered_spec(DEVICE, TIERS)
    assert faulty.flags == (*good.flags, "--tiered-fault-corrupt", "swap")
    assert faulty.env == {"SGL_TIERED_ALLOW_FAULTS": "1"}


def test_a_larger_pool_changes_nothing_else() -> None:
    """The reference that holds everything shares all but the pool."""
    small, large = plain_spec(DEVICE), plain_spec(DEVICE.with_pool(65536))
    pairs = zip(small.flags, large.flags, strict=True)
    assert [pair for pair in pairs if pair[0] != pair[1]] == [("4096", "65536")]


def test_hicache_only_adds_flags_and_its_layout_says_how_it_copies() -> None:
    """With a store it writes files there; without one it has none."""
    size = ("--hicache-size", "3")
    host = hicache_spec(DEVICE, "h", size, "page_first")
    disk = hicache_spec(DEVICE, "h", size, "page_first_direct", Path("d"))
    plain = plain_spec(DEVICE).flags
    assert host.flags[: len(plain)] == disk.flags[: len(plain)] == plain
    assert host.flags[-1] == "kernel"
    assert "direct" in disk.flags
    assert host.env == {}
    assert disk.env == {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "d"}


def test_a_pool_without_a_limit_has_no_flag() -> None:
    """SGLang then takes what the memory holds."""
    flags = plain_spec(DEVICE.with_pool(0)).flags
    assert "--max-total-tokens" not in flags
