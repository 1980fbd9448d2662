"""Ports for processes that are told theirs before they start."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from sgl_tiered_workloads.server import free_port

__all__ = ["Ports"]

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_END = 32_768


class Ports:
    """Free ports, none given twice.

    A server may bind its port half a minute after it was told. So ports come from below
    the range that the system gives to outgoing connections, and in random order: two
    programs at once do not choose alike.

    Args:
        seed: of the order; None for another one each time.
    """

    def __init__(self, seed: int | None = None) -> None:
        end = _DEFAULT_END
        with contextlib.suppress(OSError, ValueError, IndexError):
            end = int(_RANGE.read_text().split()[0])
        ports = range(_FIRST, end) if end - _FIRST > 1_000 else range(_FIRST, 65_536)
        shuffled = np.random.default_rng(seed).permutation(np.array(ports))
        self._untried = iter(shuffled.tolist())

    def take(self) -> int:
        """Return a port that nobody listens on now.

        Raises:
            OSError: none is left.
        """
        return free_port(self._untried)
