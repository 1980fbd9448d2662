"""All targets by name, and how one is run."""

from __future__ import annotations

import atexit
import logging
import os
import time
from typing import Any

from tests.fuzz.file_targets import (
    Calibrations,
    Configs,
    DiskMetas,
    DiskRecords,
    Traces,
)
from tests.fuzz.http_targets import RouterBodies, RouterInstances, TieredBodies
from tests.fuzz.kit import Target, find_fault, run_target
from tests.fuzz.pool_targets import PoolStates, RegistryEntries, WireMessages

__all__ = ["TARGETS", "end_at_once", "run_one"]

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


def end_at_once() -> None:
    """Let this process end without taking down what libraries of others keep.

    One of them writes a page about a segmentation fault when Python ends it in another
    order than it began.
    """
    atexit.register(os._exit, 0)


def run_one(name: str, num: int, number: int) -> dict[str, Any]:
    """Run one target and its planted faults, in a process of its own."""
    logging.disable(logging.CRITICAL)
    started = time.monotonic()
    tally = run_target(TARGETS[name](), num, number)
    planted = {
        fault.name: find_fault(TARGETS[name](), fault, num, number)
        for fault in TARGETS[name].faults
    }
    return {
        "target": name,
        "inputs": tally.inputs,
        "accepted": tally.accepted,
        "refused": tally.refused,
        "crashes": tally.crashes,
        "wrong": tally.wrong,
        "planted": planted,
        "seconds": round(time.monotonic() - started, 1),
        "findings": tally.findings,
    }
