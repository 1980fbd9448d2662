"""The two kernel calls that place memory on NUMA nodes and say where it lies.

The C library has no wrapper for ``mbind`` and ``move_pages``. libnuma has, for every
architecture, and is used where it is installed; it is on most servers, but nothing
makes sure of it. Without it the calls are made by number, known here for x86-64 and
64-bit ARM. Either way it is the same kernel call.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BIND",
    "INTERLEAVE",
    "PREFERRED",
    "WEIGHTED_INTERLEAVE",
    "NumaCalls",
    "prefer_node",
]

logger = logging.getLogger(__name__)

PREFERRED = 1
"""MPOL_PREFERRED: one node, and others when it is full."""
BIND = 2
"""MPOL_BIND: these nodes and no others; the kernel rather ends a process."""
INTERLEAVE = 3
"""MPOL_INTERLEAVE: pages in turn; a full node is passed over for any other one."""
WEIGHTED_INTERLEAVE = 6
"""MPOL_WEIGHTED_INTERLEAVE: in turn by the nodes' weights (Linux 6.9 and newer)."""

_NUMBERS = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""System call numbers of mbind and move_pages."""
_BITS_PER_LONG = 8 * ctypes.sizeof(ctypes.c_ulong)

_Call = Callable[..., int]


class NumaCalls:
    """``mbind`` and ``move_pages``.

    Args:
        mbind, move_pages: take the arguments of the kernel's calls; -1 and errno on
            failure.
        name: where they come from, for reports.
    """

    def __init__(self, mbind: _Call, move_pages: _Call, name: str) -> None:
        self._mbind = mbind
        self._move_pages = move_pages
        self.name = name

    @classmethod
    def find(cls) -> NumaCalls:
        """Return libnuma's calls, or those by number.

        Raises:
            OSError: neither is to be had (ENOSYS).
        """
        try:
            return cls.of_libnuma()
        except (OSError, AttributeError):
            return cls.by_number()

    @classmethod
    def of_libnuma(cls) -> NumaCalls:
        """Return libnuma's calls; OSError where it is not installed."""
        library = ctypes.CDLL("libnuma.so.1", use_errno=True)
        for call in (library.mbind, library.move_pages):
            call.restype = ctypes.c_long
        return cls(library.mbind, library.move_pages, "libnuma")

    @classmethod
    def by_number(cls) -> NumaCalls:
        """Return the calls by number; OSError on an architecture not known here."""
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"no NUMA calls on {platform.machine()}")
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        syscall.restype = ctypes.c_long
        mbind, move_pages = (ctypes.c_long(number) for number in numbers)
        return cls(
            lambda *args: int(syscall(mbind, *args)),
            lambda *args: int(syscall(move_pages, *args)),
            "system calls",
        )

    def bind(
        self, address: int, num_bytes: int, policy: int, nodes: Sequence[int]
    ) -> None:
        """Set the policy of a range whose pages are not there yet.

        Raises:
            OSError: e.g. EINVAL for a node without memory, or a policy that this
                kernel does not know.
        """
        num_longs = max(nodes) // _BITS_PER_LONG + 1
        mask = (ctypes.c_ulong * num_longs)()
        for node in nodes:
            mask[node // _BITS_PER_LONG] |= 1 << (node % _BITS_PER_LONG)
        self._check(
            self._mbind(
                ctypes.c_void_p(address),
                ctypes.c_ulong(num_bytes),
                ctypes.c_int(policy),
                mask,
                # The kernel looks at one bit fewer than it is told.
                ctypes.c_ulong(num_longs * _BITS_PER_LONG + 1),
                ctypes.c_uint(0),
            )
        )

    def nodes_of(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        """Return the node of each page, or minus an errno (-ENOENT: no page there).

        Args:
            addresses: uint64 [n], page aligned.

        Raises:
            OSError: the kernel refuses the question.
        """
        pages = np.ascontiguousarray(addresses, np.uint64)
        status: npt.NDArray[np.int32] = np.full(len(pages), -errno.ENOENT, np.int32)
        self._check(
            self._move_pages(
                ctypes.c_int(0),
                ctypes.c_ulong(len(pages)),
                _pointer(pages),
                # No targets: nothing is moved, the kernel only answers.
                ctypes.c_void_p(None),
                _pointer(status),
                ctypes.c_int(0),
            )
        )
        return status

    def _check(self, result: int) -> None:
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Let memory that is not there yet come from a node, as long as that has some.

    Where the kernel refuses it lies anywhere, as it would have: one line says so.
    """
    try:
        NumaCalls.find().bind(address, num_bytes, PREFERRED, [node])
    except OSError as error:
        logger.warning(
            "sgl-tiered: the kernel does not place memory near the device, on NUMA "
            "node %d (%s): copies may be slower",
            node,
            error.strerror,
        )


def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
