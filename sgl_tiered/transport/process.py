"""Processes of this machine, told apart from later ones with the same number."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NUMBERS = Path("/proc/self/ns/pid")
_NUMBERS_OF = re.compile(r"([0-9]{1,10}):([0-9]{1,20})")
"""The kernel's numbers have no more digits, and Python reads none of thousands."""
_EXIT_FLAGS = 0x404
"""PF_EXITING and PF_SIGNALED of the kernel's task flags."""
_SIGKILL_BIT = 1 << 8
_OVER = (FileNotFoundError, ProcessLookupError)
"""What a look at a process that is over fails with; others, such as too many open
files here, say nothing of it."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that runs, or ran, since this machine was started.

    Attributes:
        pid: its number.
        started: when it began, in the kernel's ticks.
    """

    pid: int
    started: int

    @classmethod
    def own(cls) -> Self:
        """Return this process; OSError if it can open no file."""
        pid = os.getpid()
        return cls(pid, _look_up(pid)[1])

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Return the process of a ``name``; None if it is none of this machine's."""
        machine, _, numbers = name.partition("/")
        found = _NUMBERS_OF.fullmatch(numbers)
        if found is None or machine != _machine():
            return None
        return cls(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        """What others know it by: this start of the machine, and the numbers."""
        return f"{_machine()}/{self.pid}:{self.started}"

    def state(self) -> str:
        """Return the kernel's letter, X if it is about to end, empty if it is over.

        A question mark where this process cannot find out now.
        """
        try:
            letter, started = _look_up(self.pid)
        except OSError:
            return "?"
        return letter if started == self.started else ""

    def has_ended(self) -> bool:
        """Return whether it is known that nothing of it runs any more, nor will."""
        letter = self.state()
        if letter != "Z":
            return letter == ""
        try:
            # Its first thread has ended; others may not have.
            return len(os.listdir(f"/proc/{self.pid}/task")) <= 1
        except OSError as error:
            return isinstance(error, _OVER)


def _machine() -> str:
    """Return a name of this start of the machine, and of what counts its processes."""
    try:
        boot, numbers = _BOOT_ID.read_text().strip(), _NUMBERS.stat().st_ino
    except OSError:
        # Nobody is of the same machine then.
        return f"unknown-{os.getpid()}"
    return f"{boot}.{numbers}"


def _look_up(pid: int) -> tuple[str, int]:
    """Return the state of a process and when it began; raise OSError for not now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except _OVER:
        return "", 0
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    is_dying = int(fields[6]) & _EXIT_FLAGS or int(fields[28]) & _SIGKILL_BIT
    # A zombie is past that.
    is_dying = is_dying and fields[0] != "Z"
    return "X" if is_dying else fields[0], int(fields[19])
