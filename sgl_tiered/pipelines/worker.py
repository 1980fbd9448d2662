"""Threads that work off a bounded queue and survive every bad job."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from sgl_tiered.core.background import give_way

__all__ = ["Worker", "prepare_threads"]

logger = logging.getLogger(__name__)
Job = TypeVar("Job")


def _nothing() -> None:
    """Prepare nothing."""


_prepare: Callable[[], None] = _nothing


def prepare_threads(prepare: Callable[[], None] | None) -> None:
    """Have each thread of the workers made from now on call this first.

    For what belongs to a thread and not to the process, as its current device does.

    Args:
        prepare: must not raise; None for nothing.
    """
    global _prepare
    _prepare = prepare or _nothing


class Worker(Generic[Job]):
    """Daemon threads that call ``work`` on each job, in order of arrival.

    If ``work`` raises, ``on_error`` gets the job and one sentence, and the thread
    lives on. Jobs still queued at ``close`` go to ``on_error`` as well.

    Args:
        name: of the threads.
        work: does a job; runs on a worker thread.
        on_error: settles a job that failed; must not raise.
        max_queued: jobs that may wait; the running ones do not count.
        num_threads: jobs worked on at a time.
        background: nobody waits for the jobs, so that everything else goes first.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        on_error: Callable[[Job, str], None],
        *,
        max_queued: int | None = None,
        num_threads: int = 1,
        background: bool = False,
    ) -> None:
        self._name = name
        self._background = background
        self._work = work
        self._on_error = on_error
        self._max_queued = max_queued
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._num_running = 0
        self._closed = False
        self._prepare = _prepare
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def closed(self) -> bool:
        """True once no job is taken any more."""
        return self._closed

    @property
    def busy(self) -> bool:
        """True while a job waits or runs."""
        return bool(self._queue) or self._num_running > 0

    @property
    def num_queued(self) -> int:
        """Jobs that wait."""
        return len(self._queue)

    def try_put(self, job: Job) -> bool:
        """Queue a job; False if the queue is full or the worker closed."""
        with self._changed:
            full = self._max_queued is not None and len(self._queue) >= self._max_queued
            if self._closed or full:
                return False
            self._queue.append(job)
            self._changed.notify()
            return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job waits or runs; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Settle the waiting jobs as failed and let the running ones end.

        Returns:
            False if a running job did not end in time; its thread is left behind.
        """
        with self._changed:
            self._closed = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for job in left:
            self._on_error(job, f"{self._name} was closed")
        ended = self.drain(timeout_s)
        if ended:
            for thread in self._threads:
                thread.join()
        else:
            logger.warning("%s: a job still runs after %.1f s", self._name, timeout_s)
        return ended

    def _run(self) -> None:
        self._prepare()
        if self._background:
            give_way()
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._num_running += 1
            try:
                self._work(job)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                logger.warning("%s: a job failed: %r", self._name, error)
                self._on_error(job, f"{type(error).__name__}: {error}")
            finally:
                del job
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify_all()
