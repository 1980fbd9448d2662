"""KV of staged pages computed from activations, while the link goes on with others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sgl_tiered.core.clock import Clock
from sgl_tiered.layered.base import ActCopier
from sgl_tiered.layered.outage import ATTEMPTS
from sgl_tiered.layered.units import ActPart
from sgl_tiered.pipelines.base import Arrival
from sgl_tiered.pipelines.worker import Worker

__all__ = ["RebuildJob", "Rebuilder", "exposed_s", "insist"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RebuildJob:
    """A sub-unit whose activations are on the device, or on their way.

    Attributes:
        layer: which.
        part: pages.
        arrival: the copy that brings them, if it is only queued; the copier lets the
            rebuild run behind it.
        after: ``mark()`` of the work that still reads what was in its place.
        is_wanted: asked before it begins.
        ended: told the error, empty if there was none, when it began and ended in
            seconds by the clock, and the rebuild if it is only queued; any thread.
    """

    layer: int
    part: ActPart
    arrival: Arrival | None
    after: object
    is_wanted: Callable[[], bool]
    ended: Callable[[str, float, float, Arrival | None], None]


class Rebuilder:
    """The thread that computes KV of the units of forwards, in order.

    Args:
        copier: rebuilds.
        clock: times it.
    """

    def __init__(self, copier: ActCopier, clock: Clock) -> None:
        self._copier = copier
        self._clock = clock
        self._worker: Worker[RebuildJob] = Worker(
            "layers-rebuild", self._rebuild, self._give_up
        )

    def put(self, job: RebuildJob) -> None:
        """Queue a sub-unit; ``ended`` is called in any case."""
        if not self._worker.try_put(job):
            self._give_up(job, "the mover is closed")

    def close(self, timeout_s: float) -> None:
        """Fail what waits, and let what runs end."""
        self._worker.close(timeout_s)

    def _rebuild(self, job: RebuildJob) -> None:
        error, started_s, ended_s = "", 0.0, 0.0
        built: Arrival | None = None
        try:
            if job.is_wanted():
                part = job.part
                started_s = ended_s = self._clock.now()
                built = insist(
                    partial(
                        self._copier.rebuild,
                        job.layer,
                        part.acts,
                        part.targets,
                        part.positions,
                        job.after,
                    )
                )
                ended_s = self._clock.now()
        except Exception as problem:  # noqa: BLE001 - a value, not an exception
            error = f"{type(problem).__name__}: {problem}"
        # One that is queued is not waited for: the model's stream is ordered behind it,
        # and the model's thread goes on queueing.
        job.ended(error, started_s, ended_s, built)

    def _give_up(self, job: RebuildJob, error: str) -> None:
        job.ended(error, 0.0, 0.0, None)


def insist(rebuild: Callable[[], Arrival | None]) -> Arrival | None:
    """Rebuild, or queue it; once more if it fails, as a copy is.

    What it reads is as it was, and what it writes is read by nobody yet.

    Returns:
        What ``rebuild`` does.

    Raises:
        Exception: of the last attempt.
    """
    for attempt in range(ATTEMPTS):
        try:
            return rebuild()
        except Exception as error:
            if attempt == ATTEMPTS - 1:
                raise
            logger.info("a rebuild failed, and is tried again: %r", error)
    raise AssertionError("no attempt was made")


def exposed_s(spans: list[tuple[float, float]], landed_s: float) -> float:
    """Return the seconds of spans, each from and to, that lie after a time."""
    return sum(max(0.0, to_s - max(from_s, landed_s)) for from_s, to_s in spans)
