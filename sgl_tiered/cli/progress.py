"""A line on stderr every five seconds, for what takes longer than that.

It is written by a thread, so that what computes need not think of it, and to stderr, so
that a pipe gets results only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_PERIOD_S = 5.0


@contextmanager
def progress(
    what: str,
    state: Callable[[], str] | None = None,
    period_s: float = _PERIOD_S,
) -> Iterator[None]:
    """Tell of the block while it runs: seconds, and how far it is.

    Args:
        what: is done, in a few words.
        state: how far it is, such as ``120 of 4,000 requests``; asked by a thread.
        period_s: seconds between two lines; nothing is told before the first.
    """
    ended = threading.Event()

    def tell() -> None:
        seconds = 0.0
        while not ended.wait(period_s):
            seconds += period_s
            far = "" if state is None else f", {state()}"
            print(f"{what}: {seconds:.0f} s{far}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
