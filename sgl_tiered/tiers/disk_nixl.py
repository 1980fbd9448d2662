"""A ring of io_uring through NIXL's POSIX plugin, an optional dependency.

Facts of NIXL 1.5 that shape this file and ``disk_uring``:

- After one failed I/O a ring reports it again and again, to whichever request polls,
  and nothing says when the others have ended. The kernel does: the counters of a ring
  are in ``/proc/self/fdinfo``.
- Short I/Os count as whole. A read's checksum finds them, and a short write is found
  when the page is read.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["NixlRing", "open_nixl_ring"]

_MAX_MEMORIES = 8
"""Buffers that stay registered: host region, staging region and some to spare."""
_WHOLE_FILE_BYTES = 1 << 46


class NixlRing:
    """A NIXL agent with a POSIX backend of its own.

    Raises:
        OSError: NIXL refuses, or its ring cannot be seen in /proc.
    """

    _numbers = itertools.count()

    def __init__(self, api: Any) -> None:
        before = _ring_descriptors()
        self._name = f"tiered-disk-{os.getpid()}-{next(self._numbers)}"
        try:
            self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=[]))
            self._agent.create_backend("POSIX", {"use_uring": "true"})
        except Exception as error:
            raise OSError(0, f"NIXL's POSIX plugin fails ({error})") from error
        opened = _ring_descriptors() - before
        if not opened:
            raise OSError(0, "NIXL made no ring that /proc/self/fdinfo shows")
        self._rings = sorted(opened)
        self._files: set[int] = set()
        self._memories: dict[tuple[int, int], Any] = {}
        self.num_running()

    def submit(
        self, fd: int, views: list[memoryview], offset: int, *, writes: bool
    ) -> object:
        """Start an I/O and return its handle, or raise OSError."""
        local, remote = [], []
        for view in views:
            address = np.frombuffer(view, np.uint8).ctypes.data
            self._register(address, view)
            local.append((address, len(view), 0))
            remote.append((offset, len(view), fd))
            offset += len(view)
        agent = self._agent
        try:
            if fd not in self._files:
                agent.register_memory([(0, _WHOLE_FILE_BYTES, fd, "")], "FILE")
                self._files.add(fd)
            handle = agent.initialize_xfer(
                "WRITE" if writes else "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, "FILE"),
                self._name,
            )
            state = agent.transfer(handle)
        except Exception as error:
            raise OSError(0, f"NIXL: {error}") from error
        if state == "ERR":
            raise OSError(0, "NIXL refused an I/O")
        return handle

    def ended(self, handle: object) -> bool:
        """Return whether it has ended well, or raise OSError: the ring has failed."""
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise OSError(0, f"NIXL: {error}") from error
        if state == "ERR":
            raise OSError(0, "an I/O failed")
        return bool(state == "DONE")

    def num_running(self) -> int:
        """Return how many I/Os the kernel has not ended, by its own counters."""
        running = 0
        for ring in self._rings:
            lines = Path(f"/proc/self/fdinfo/{ring}").read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            try:
                taken, ended = int(fields["CachedSqHead"]), int(fields["CqTail"])
            except (KeyError, ValueError) as error:
                raise OSError(0, "the kernel shows no counters of a ring") from error
            running += (taken - ended) & 0xFFFF_FFFF
        return running

    def _register(self, address: int, view: memoryview) -> None:
        """Make the whole buffer of a view known, and forget what it overlaps."""
        end = address + len(view)
        for start, stop in self._memories:
            if start <= address and end <= stop:
                return
        # A view's object is the whole buffer that a batch was given.
        whole = memoryview(view.obj).cast("B")
        start = np.frombuffer(whole, np.uint8).ctypes.data
        stop = start + len(whole)
        stale = [
            key for key in self._memories if key[0] < stop and start < key[1]
        ] or list(self._memories)[: len(self._memories) + 1 - _MAX_MEMORIES]
        for key in stale:
            self._agent.deregister_memory(self._memories.pop(key))
        self._memories[start, stop] = self._agent.register_memory(
            [(start, stop - start, 0, "")], "DRAM"
        )


def open_nixl_ring() -> NixlRing | str:
    """Return a ring, or in one clause why there is none."""
    # NIXL is an optional dependency without types, and writes to stderr by itself.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        return NixlRing(importlib.import_module("nixl._api"))
    except ImportError:
        return "NIXL is not installed (pip install 'sgl-tiered[uring]')"
    except OSError as error:
        return error.strerror or str(error)


def _ring_descriptors() -> set[int]:
    """Return the descriptors of this process that are rings."""
    rings = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "io_uring" in os.readlink(f"/proc/self/fd/{name}"):
                rings.add(int(name))
    return rings
