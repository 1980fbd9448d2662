"""Emulations around real tiers, and a disk whose medium fails."""

import math

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.emulation import parse_emulation
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.tiers.base import MemoryTier
from sgl_tiered.tiers.host import HostTier
from tests.unit.tiers.disk_support import SLOT_BYTES, load, open_tier, page_of, store

TIERS = (TierId.HOST, TierId.DISK)


def emulator(text="", **settings):
    return Emulator(parse_emulation(text, TIERS), **settings)


@pytest.fixture
def host():
    tier = HostTier(SLOT_BYTES, 16)
    yield tier
    tier.close()


def test_nothing_asked_for_is_nothing_around(host):
    """Without an emulation the tiers are left as they are."""
    plain = emulator()
    assert plain.wrap(host) is host
    assert plain.calls(TierId.DISK) is None
    assert plain.text(TierId.HOST) == ""
    other = emulator("disk:latency=1")
    assert other.wrap(host) is host


def test_the_text_tells_what_is_emulated(host):
    """Reports get the flag's own words, and the health of the tier is marked."""
    made = emulator("host:bandwidth=1GB;host+disk:latency=0.5")
    tier = made.wrap(host)
    assert isinstance(tier, MemoryTier)
    assert tier.health().emulated
    assert made.text(TierId.HOST) == "host:bandwidth=1GB; host+disk:latency=0.5"
    assert made.text(TierId.DISK) == "host+disk:latency=0.5"


def test_faults_of_the_start_wait_until_armed(host):
    """Opening and measuring are over before anything fails."""
    made = emulator("host:fault=error")
    tier = made.wrap(host)
    tier.charge(1)
    made.arm()
    with pytest.raises(OSError, match="injected"):
        tier.charge(1)
    made.release()
    tier.charge(1)


def test_faults_are_switched_while_serving(host):
    """They replace each other, end with an empty text, and are told and counted."""
    made = emulator("host:bandwidth=1GB", switchable=True)
    tier = made.wrap(host)
    made.switch("host:fault=error/store", TIERS)
    tier.charge(1)
    with pytest.raises(OSError, match="injected"):
        tier.charge(1, is_store=True)
    assert made.text(TierId.HOST) == "host:bandwidth=1GB; host:fault=error/store"
    assert made.num_struck(TierId.HOST) == {"error": 1}
    made.switch("host:fault=error/load", TIERS)
    tier.charge(1, is_store=True)
    made.switch("", TIERS)
    tier.charge(1)
    assert made.text(TierId.HOST) == "host:bandwidth=1GB"


def test_what_may_not_be_switched(host):
    """Nothing where it was not allowed, no links, and no nonsense anywhere."""
    with pytest.raises(ConfigError, match="may not be switched"):
        emulator().switch("host:delay=1", TIERS)
    made = emulator(switchable=True)
    with pytest.raises(ConfigError, match="made at the start"):
        made.switch("host:bandwidth=1GB", TIERS)
    with pytest.raises(ConfigError, match="not understood"):
        made.switch("tape:delay=1", TIERS)
    assert made.text(TierId.HOST) == ""


@pytest.fixture
def made():
    made = emulator(switchable=True)
    yield made
    made.release()


@pytest.fixture
def disk(made, tmp_path):
    inner = open_tier(tmp_path / "tier", calls=made.calls(TierId.DISK), rest_s=0.0)
    tier = made.wrap(inner)
    yield tier
    made.release()
    tier.close()


@pytest.mark.parametrize("kind", ["corrupt", "zero", "partial", "error"])
def test_a_failing_read_is_never_served(made, disk, kind):
    """Whatever the medium does to a read, a page is right or not ok."""
    assert store(disk, range(6), range(6)).ok.all()
    made.switch(f"disk:fault={kind}/load", TIERS)
    assert disk.health().emulated
    for _ in range(20):
        pages, result = load(disk, range(6))
        assert not result.ok.all(), "the fault did not strike"
        for page, seed, ok in zip(pages, range(6), result.ok, strict=True):
            assert not ok or np.array_equal(page, page_of(seed))
    made.switch("", TIERS)
    pages, result = load(disk, range(6))
    assert result.ok.all()
    assert not disk.health().emulated


@pytest.mark.parametrize("kind", ["corrupt", "zero", "partial", "error", "full"])
def test_a_failing_write_is_never_served(made, disk, kind):
    """What was not written whole is not ok then, or is found out when it is read."""
    made.switch(f"disk:fault={kind}/store", TIERS)
    written = store(disk, range(6), range(6))
    made.switch("", TIERS)
    pages, result = load(disk, range(6))
    assert not result.ok.all(), "the fault did not strike"
    for page, seed, ok in zip(pages, range(6), result.ok, strict=True):
        assert not ok or np.array_equal(page, page_of(seed))
    if kind in ("error", "full"):
        assert not written.ok.any()
    assert store(disk, range(6), range(6)).ok.all()
    assert load(disk, range(6))[1].ok.all()


def test_a_full_disk_gives_its_space_back(made, disk, tmp_path):
    """A slab that could not be allocated whole leaves no file behind."""
    made.switch("disk:fault=full", TIERS)
    result = store(disk, [0], [1])
    assert not result.ok.any()
    assert "No space left" in result.error
    assert not list((tmp_path / "tier").glob("tiered-slab-*.kv"))


def test_links_are_infinite_where_nothing_is_said():
    """A section with delays or faults alone has no link."""
    (section,) = parse_emulation("disk:delay=1", TIERS)
    assert not section.has_link
    assert section.read_bytes_per_s == math.inf
