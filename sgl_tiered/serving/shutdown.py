"""A shutdown that ends, whatever the medium does.

An I/O that never returns cannot be cancelled: the thread that waits for it stays, and
Python joins the threads of its pools before it lets a process end. So what does not
close in time is left behind, and the process ends by itself a little later.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

__all__ = ["close_in_time"]

logger = logging.getLogger(__name__)

_LEAVE_AFTER_S = 5.0
"""For the engine to take down the rest of itself."""


def close_in_time(
    close: Callable[[], None],
    timeout_s: float,
    what: str,
    *,
    leave: Callable[[int], None] = os._exit,
) -> bool:
    """Call ``close`` on a thread of its own; return False if it did not end in time.

    Then the process ends ``_LEAVE_AFTER_S`` later, if it has not by itself.

    Args:
        close: what may block for ever.
        timeout_s: how long it is waited for.
        what: its name, for the log.
        leave: ends the process.
    """
    closer = threading.Thread(target=close, name="tiered-close", daemon=True)
    closer.start()
    closer.join(timeout_s)
    if not closer.is_alive():
        return True
    logger.error(
        "sgl-tiered: %s does not close: an I/O has not ended; leaving without it", what
    )
    watch = threading.Timer(_LEAVE_AFTER_S, leave, args=(0,))
    watch.daemon = True
    watch.start()
    return False
