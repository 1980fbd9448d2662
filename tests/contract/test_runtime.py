"""The factory puts the tiers together that the settings ask for."""

import json

import pytest

from tests.contract.story_support import output_of, told_once

pytestmark = pytest.mark.sglang

SETTINGS = {
    "config": None,
    "host_size": "4MB",
    "cxl": "emulate:memory",
    "cxl_size": "8MB",
    "emulate": "cxl:bandwidth=1GB,latency=0.001",
}


ENCODED = {"config": None, "host_size": "4MB", "encoding": "int4"}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What came of ``SETTINGS``, and of ``ENCODED``."""
    file = tmp_path_factory.mktemp("runtime") / "settings.json"
    file.write_text(json.dumps([SETTINGS, ENCODED]))
    return told_once("runtime", lambda: output_of("runtime_program.py", file))


@pytest.fixture(scope="module")
def built(both):
    """What came of a host tier and a slow stand-in for CXL."""
    return both[0]


def test_encoded_tiers_hold_more_pages(both):
    """1.5 KiB a page instead of 6: half as large a slot, and a namespace of its own."""
    raw, encoded = both
    assert encoded["stats"]["media"]["host"]["slot_bytes"] == 4096
    assert encoded["stats"]["occupancy"]["host"]["capacity"] == 4 * 10**6 // 4096
    assert encoded["stats"]["served"]["encoding"] == "int4"
    assert encoded["stats"]["served"]["encoding_ratio"] == 4.0
    assert "encoding" not in raw["stats"]["served"]
    assert encoded["namespace"] != raw["namespace"]
    assert encoded["stats"]["cost"]["link.host.bandwidth_bytes_per_s"] > 0
    kv = [s["stats"]["served"]["model"]["kv_bytes_per_token"] for s in both]
    assert kv[0] == kv[1]


def test_the_cxl_tier_is_between_host_and_disk(built):
    """It is a medium that is read in place, and what leaves the host goes there."""
    assert list(built["stats"]["media"]) == ["host", "cxl"]
    assert built["memory"] == ["host", "cxl"]
    assert built["edges"] == ["host->cxl"]


def test_sizes_are_as_asked(built):
    """Whole pages of 6 KiB, each in a slot of 8 KiB."""
    assert built["stats"]["media"]["cxl"]["slot_bytes"] == 8192
    assert built["stats"]["occupancy"]["cxl"]["capacity"] == 8 * 10**6 // 8192
    assert built["stats"]["occupancy"]["host"]["capacity"] == 4 * 10**6 // 8192


def test_the_stand_in_says_so(built):
    """As a stand-in, by its name."""
    medium = built["stats"]["media"]["cxl"]
    assert medium["emulated"]
    assert medium["detail"] == "CXL is emulated by plain memory"
    assert built["stats"]["emulated"] == ["cxl"]


def test_the_links_are_measured(built):
    """The planner starts from figures of its own for host and CXL."""
    for tier in ("host", "cxl"):
        assert built["stats"]["probe"][f"{tier}_bandwidth_bytes_per_s"] > 0
        assert built["stats"]["cost"][f"link.{tier}.latency_s"] > 0
