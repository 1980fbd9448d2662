"""The text of ``--tiered-emulate``."""

import math

import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.emulation import Delay, Emulation, Fault, parse_emulation

TIERS = (TierId.HOST, TierId.CXL, TierId.DISK)


def only(text):
    (section,) = parse_emulation(text, TIERS)
    return section


def test_an_empty_text_says_nothing():
    """No text, or separators alone, emulate nothing."""
    assert parse_emulation("", TIERS) == ()
    assert parse_emulation(" ; ;", TIERS) == ()


def test_links():
    """Bandwidths of both directions or of one, a latency, and shared links."""
    assert only("host:bandwidth=2GB,latency=0.001") == Emulation(
        (TierId.HOST,), 2e9, 0.001, text="host:bandwidth=2GB,latency=0.001"
    )
    section = only("host+cxl: read-bandwidth=2GiB, write-bandwidth=500MB")
    assert section.tiers == (TierId.HOST, TierId.CXL)
    assert section.read_bytes_per_s == 2**31
    assert section.write_bytes_per_s == 5e8
    assert section.bandwidth_bytes_per_s == math.inf
    assert section.has_link


def test_a_tier_may_have_several_sections():
    """A tier pays for a link of its own and for one that it shares."""
    sections = parse_emulation(
        "host+cxl:bandwidth=25GB;cxl:bandwidth=10GB,latency=1e-6", TIERS
    )
    assert [one.tiers for one in sections] == [
        (TierId.HOST, TierId.CXL),
        (TierId.CXL,),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", Delay(0.5, 0.5)),
        ("0.01..0.02", Delay(0.01, 0.02)),
        ("2@0.01", Delay(2.0, 2.0, 0.01)),
        ("1..3@0.5", Delay(1.0, 3.0, 0.5)),
    ],
)
def test_delays(text, expected):
    """Fixed, drawn evenly, and by chance."""
    section = only(f"disk:delay={text}")
    assert section.delays == (expected,)
    assert not section.has_link


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("error", Fault("error")),
        ("error@0.1", Fault("error", 0.1)),
        ("full", Fault("full")),
        ("hang/load", Fault("hang", direction="load")),
        ("partial@0.5/store/after=10", Fault("partial", 0.5, "store", 10)),
        ("corrupt/for=5/times=3", Fault("corrupt", duration_s=5.0, times=3.0)),
    ],
)
def test_faults(text, expected):
    """A kind, and when it strikes whom."""
    assert only(f"disk:fault={text}").faults == (expected,)


def test_several_faults_and_a_seed():
    """Items may be repeated where that makes sense."""
    section = only("disk:fault=error@0.1,fault=hang@0.01,delay=1,delay=2@0.5,seed=7")
    assert [fault.kind for fault in section.faults] == ["error", "hang"]
    assert len(section.delays) == 2
    assert section.seed == 7


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        "tape:latency=1",
        "host+host:latency=1",
        "host:speed=1GB",
        "host:latency=soon",
        "host:latency=-1",
        "host:latency=nan",
        "host:latency=1,latency=2",
        "disk:bandwidth=0",
        "disk:bandwidth=fast",
        "disk:delay=",
        "disk:delay=2..1",
        "disk:delay=1@2",
        "disk:fault=",
        "disk:fault=explode",
        "disk:fault=swap",
        "host:fault=full",
        "disk+host:fault=full",
        "disk:fault=error@1.5",
        "disk:fault=error/sideways",
        "disk:fault=error/after=soon",
        "disk:seed=0.5",
    ],
)
def test_what_is_not_understood_is_refused(text):
    """One sentence that names the flag."""
    with pytest.raises(ConfigError) as caught:
        parse_emulation(text, TIERS)
    assert caught.value.setting == "--tiered-emulate"
