"""A forward that broke off for its layers' sake is run again; the server serves on.

A layer could not be staged, copies to the host gave no room, or there was none to
begin with. The layer manager has left everything as it was before the forward, and
SGLang has taken nothing of it, so running it again gives what it would have given. What
fails again and again ends the requests that need it, with a sentence for the client:
they stay in their place in the batch, where they read and write what padding does, and
the others' rows are computed. Whatever else the model raises is SGLang's to handle.

Of several ranks, all find alike that there is no room, at the same layer, since their
tables are the same: so all run it again. A layer that could not be staged breaks the
forward off on one of them, and that ends the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from typing import Any

from sgl_tiered.engines.sglang.layered.driver import LayerDriver, NoRoomError
from sgl_tiered.layered.base import LayerReadError, LayerRoomError

__all__ = ["RepeatedForward"]

logger = logging.getLogger(__name__)

PAUSES_S = (0.0, 0.02, 0.1)
"""Before each repetition in which all take part; everybody waits meanwhile."""


class RepeatedForward:
    """Stands before ``TpModelWorker.forward_batch_generation`` of one worker.

    Args:
        original: SGLang's method, bound.
        driver: of the pool.
        is_alone: whether there are no other ranks.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        original: Callable[..., Any],
        driver: LayerDriver,
        *,
        is_alone: bool = True,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._original = original
        self._driver = driver
        self._is_alone = is_alone
        self._repeated: tuple[type[Exception], ...] = (NoRoomError, LayerRoomError)
        if is_alone:
            self._repeated = (*self._repeated, LayerReadError)
        # An event that nobody sets is a sleep, without the module of the real clock.
        self._sleep = sleep or threading.Event().wait

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch until all of its requests are computed or have ended.

        Raises:
            TieredError: it broke off, and there is nobody to end, or the other ranks
                are to be waited for.
            Exception: what the model raises.
        """
        num_broken = 0
        while True:
            try:
                return self._original(batch, *args, **kwargs)
            except self._repeated as error:
                self._driver.broke_off()
                if batch is None:
                    raise
                if num_broken < len(PAUSES_S):
                    self._sleep(PAUSES_S[num_broken])
                elif not self._end(batch, _to_end(error), error):
                    raise
                num_broken += 1
                self._driver.repeats()
            except BaseException:
                # Whoever asks the manager next must not find a forward under way. To
                # clean up among ranks is to meet the others, who are in a collective.
                if self._is_alone:
                    self._driver.broke_off()
                raise

    def _end(self, batch: Any, keys: Collection[object], error: Exception) -> bool:
        """End requests with an error; False if there is none to end."""
        reqs = [
            req
            for req in batch.reqs
            if req.rid in keys and not self._driver.is_lost(req.rid)
        ]
        if not reqs:
            return False
        logger.error(
            "sgl-tiered: %d request(s) end with an error, the others of their batch go "
            "on: %s",
            len(reqs),
            error,
        )
        for req in reqs:
            _abort(req, error, is_prefill=batch.forward_mode.is_extend())
        self._driver.lose([req.rid for req in reqs])
        return True


def _to_end(error: Exception) -> Sequence[object]:
    """Return whom an error ends: all that it names, or the last if room is lacking."""
    assert isinstance(error, LayerReadError | LayerRoomError | NoRoomError), error
    if isinstance(error, LayerRoomError):
        # With the most recent of them out of the way the others may have room.
        return error.keys[-1:]
    return error.keys


def _abort(req: Any, error: Exception, *, is_prefill: bool) -> None:
    """Let SGLang end a request when it takes the results of its batch."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    reason = FINISH_ABORT(
        f"Layer-wise KV could not be moved, send the request again. {error}",
        HTTPStatus.SERVICE_UNAVAILABLE,
    )
    # What this forward has written for it must not become a prefix of others.
    req.skip_radix_cache_insert = True
    if is_prefill:
        req.discard_output_reason = reason
    elif req.to_finish is None:
        req.to_finish = reason
