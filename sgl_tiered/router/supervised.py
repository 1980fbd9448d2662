"""Tasks that must not end: one that fails is told of, counted, and begun again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

__all__ = ["supervised"]

_LOG = logging.getLogger(__name__)
_AGAIN_S = 1.0
_MAX_AGAIN_S = 30.0


async def supervised(
    name: str, run: Callable[[], Awaitable[None]], on_failure: Callable[[str], None]
) -> None:
    """Run something until it returns or is cancelled; after an exception, again.

    Args:
        name: of the task, for the log and the count.
        run: begins the task; called anew each time, a second after a failure, then
            after twice as long each time.
        on_failure: called with the name after each failure.
    """
    again_s = _AGAIN_S
    now_s = asyncio.get_running_loop().time
    while True:
        began_s = now_s()
        try:
            await run()
            return
        except Exception:  # noqa: BLE001 - whatever it is, it must begin again
            _LOG.exception("the task %s failed, and begins again", name)
        on_failure(name)
        if now_s() - began_s > _MAX_AGAIN_S:
            again_s = _AGAIN_S
        await asyncio.sleep(again_s)
        again_s = min(2 * again_s, _MAX_AGAIN_S)
