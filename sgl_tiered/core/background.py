"""Threads whose work nobody waits for."""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["give_way"]

_NICE = 10
"""Work that nobody waits for must not take a core from the forward: on a machine where
the device is the CPU, one displaced thread holds up all threads of a kernel."""


def give_way(nice: int = _NICE) -> None:
    """Lower the priority of the calling thread for good.

    Linux knows a priority per thread; elsewhere nothing happens.

    Args:
        nice: the new one; 19 is the lowest.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
