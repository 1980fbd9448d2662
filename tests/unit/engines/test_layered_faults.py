"""Copies of layers fail with the emulated faults of the host's memory."""

import threading

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.engines.device.layer_copier import FaultyCopier
from sgl_tiered.serving.emulation import parse_emulation
from sgl_tiered.testing.emulator import Emulator
from sgl_tiered.testing.fake_layers import FakeLayerCopier

ROWS, PLACES = np.array([0]), np.array([1], np.int32)
TIERS = (TierId.HOST, TierId.DISK)


@pytest.fixture
def emulator():
    return Emulator(switchable=True)


@pytest.fixture
def copier(emulator):
    return FaultyCopier(FakeLayerCopier(2, 4, 4, 2), emulator.faults(TierId.HOST))


def both_ways(copier):
    """Return which of a copy to the host and one back works."""
    worked = []
    for copy, args in (
        (copier.to_host, (0, PLACES, ROWS, None)),
        (copier.to_device, (0, ROWS, PLACES, None)),
    ):
        try:
            copy(*args)
        except OSError:
            worked.append(False)
        else:
            worked.append(True)
    return worked


@pytest.mark.parametrize(
    ("text", "worked"),
    [
        ("", [True, True]),
        ("host:fault=error", [False, False]),
        ("host:fault=error/load", [True, False]),
        ("host:fault=error/store", [False, True]),
        ("host:fault=partial", [True, True]),
        ("disk:fault=error", [True, True]),
    ],
)
def test_errors_of_the_host_strike_copies_of_layers(emulator, copier, text, worked):
    """By direction; what leaves for the host is its store."""
    emulator.switch(text, TIERS)
    assert both_ways(copier) == worked
    emulator.switch("", TIERS)
    assert both_ways(copier) == [True, True]


def test_a_hang_ends_with_the_fault(emulator, copier):
    """The copy is done then."""
    emulator.switch("host:fault=hang", TIERS)
    copying = threading.Thread(target=both_ways, args=(copier,), daemon=True)
    copying.start()
    while not emulator.num_struck(TierId.HOST):
        pass
    assert copying.is_alive()
    emulator.switch("", TIERS)
    copying.join(20)
    assert not copying.is_alive()


def test_without_faults_there_is_nothing_to_ask():
    """A server that may not fail on purpose copies directly."""
    assert Emulator().faults(TierId.HOST) is None
    slow = Emulator(parse_emulation("host:bandwidth=1GB", TIERS))
    assert slow.faults(TierId.HOST) is None
    faulty = Emulator(parse_emulation("host:fault=error", TIERS))
    assert faulty.faults(TierId.HOST) is not None


def test_it_copies_as_the_one_below(copier):
    """Who waits, and for what."""
    assert not copier.waiter_copies
    assert copier.mark() is None
