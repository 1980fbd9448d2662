"""All targets by name."""

from __future__ import annotations

from tests.fuzz.file_targets import (
    Calibrations,
    Configs,
    DiskMetas,
    DiskRecords,
    Traces,
)
from tests.fuzz.http_targets import RouterBodies, RouterInstances, TieredBodies
from tests.fuzz.kit import Target
from tests.fuzz.pool_targets import PoolStates, RegistryEntries, WireMessages

__all__ = ["TARGETS"]

TARGETS: dict[str, type[Target]] = {
    each.name: each
    for each in (
        PoolStates,  # the longest first
        TieredBodies,
        WireMessages,
        RegistryEntries,
        DiskRecords,
        DiskMetas,
        Configs,
        Traces,
        Calibrations,
        RouterBodies,
        RouterInstances,
    )
}
