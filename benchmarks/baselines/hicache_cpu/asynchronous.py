"""HiCache's copies off the scheduler's thread, layer by layer, as on a GPU.

On a CPU, SGLang's streams and events do nothing and every copy runs in the thread that
asks for it. Here each direction gets a thread that stands for its CUDA stream, and
events are real: a load returns at once, and each layer's attention waits for the event
of that layer alone. Copies run without the interpreter lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Event", "HostStreams", "install"]

logger = logging.getLogger(__name__)


class Event:
    """What SGLang uses of a CUDA event; new ones count as recorded, as there."""

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("enable_timing"):
            raise NotImplementedError("host events carry no time")
        self._flag = threading.Event()
        self._flag.set()

    def clear(self) -> None:
        """Make waiters wait until the next ``record``."""
        self._flag.clear()

    def record(self, stream: Any = None) -> None:
        """Let all waiters go on."""
        self._flag.set()

    def query(self) -> bool:
        """Whether the work before the event is done."""
        return self._flag.is_set()

    def synchronize(self) -> None:
        """Block until the work before the event is done."""
        self._flag.wait()

    def wait(self, stream: Any = None) -> None:
        """Block: the calling thread is the stream."""
        self._flag.wait()


class Stream:
    """What SGLang uses of a CUDA stream, for the thread that computes."""

    def wait_event(self, event: Event) -> None:
        """Block the computation until the event is recorded."""
        event.wait()

    def wait_stream(self, other: Stream) -> None:
        """Do nothing: order across threads goes by events only."""

    def synchronize(self) -> None:
        """Do nothing: a computation is done when its call returns."""


class HostStreams:
    """Stands for ``torch.cuda`` in the two modules that copy."""

    Event = Event
    Stream = Stream
    __name__ = "hicache_cpu"
    _current = Stream()

    @classmethod
    def current_stream(cls, *args: Any) -> Stream:
        """Return the one stream that computes."""
        return cls._current

    @staticmethod
    def stream(stream: Stream) -> Any:
        """Return a context in which nothing changes."""
        return contextlib.nullcontext()


class _Worker:
    """One thread that runs jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job after those before it."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except Exception:
                # Going on would serve KV that never arrived.
                logger.exception("a copy of HiCache failed; the server stops")
                os._exit(1)


def install() -> None:
    """Put threads and real events under HiCache's transfer engine."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer

    l2_transfer.device_module = cache_controller.device_module = HostStreams
    down, up = _Worker("hicache-store"), _Worker("hicache-load")

    def completion() -> Any:
        finish = Event()
        finish.clear()
        return l2_transfer.TransferCompletion(Event(), finish, False)

    def device_to_host(engine: Any, transfers: list[Any]) -> Any:
        done = completion()
        prepared = engine._prepare_transfers(transfers)

        def job() -> None:
            for item in prepared:
                item.host_pool.backup_from_device_all_layer_physical(
                    item.device_pool,
                    item.host_indices,
                    item.device_indices,
                    engine.io_backend,
                )
            done.finish_event.record()

        down.submit(job)
        return done

    def host_to_device(
        engine: Any,
        transfers: list[Any],
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Any = None,
    ) -> Any:
        done = completion()
        prepared = engine._prepare_transfers(transfers)

        def job() -> None:
            if start_event is not None:
                start_event.wait()
            for layer in range(transfer_layer_id_max):
                for item in prepared:
                    mapper = item.layer_mapper
                    own_layer = layer if mapper is None else mapper(layer)
                    # A pool with fewer layers has nothing to copy for this one.
                    if own_layer is None or own_layer >= item.host_pool.layer_num:
                        continue
                    item.host_pool.load_to_device_per_layer_physical(
                        item.device_pool,
                        item.host_indices,
                        item.device_indices,
                        own_layer,
                        engine.io_backend,
                        is_draft=item.is_draft,
                    )
                if on_layer_done is not None:
                    on_layer_done(layer)
            done.finish_event.record()

        up.submit(job)
        return done

    l2_transfer.L2TransferEngine.submit_device_to_host = device_to_host
    l2_transfer.L2TransferEngine.submit_host_to_device = host_to_device
    next_producer = cache_controller.LayerDoneCounter.update_producer

    def update_producer(counter: Any) -> int:
        index = next_producer(counter)
        # From here on a layer of this load counts as missing until it has arrived.
        for event in counter.events[index].load_events:
            event.clear()
        return index

    cache_controller.LayerDoneCounter.update_producer = update_producer
    logger.info("HiCache copies run on threads of their own")
