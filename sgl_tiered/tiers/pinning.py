"""Pins a region of memory for a device: in parts, by several threads, in order of use.

Pinning touches every page first, at about 3 GB/s on one thread: 500 GB take minutes.
So the region is pinned in parts of whole rows, several at a time, and what lies before
the first part that is missing can be used. A copy must not span two parts: CUDA knows
them as allocations of their own; it is always of one row, which is in one of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sgl_tiered.errors import ConfigError

__all__ = ["PIN_BYTES", "LenientRegister", "Pinning", "Register"]

logger = logging.getLogger(__name__)

Register = Callable[[int, int], Callable[[], None] | None]
"""Pins (address, num_bytes) for a device and returns what undoes it; None where it was
left as it is."""

PIN_BYTES = 1 << 30
"""About 0.3 s on one thread: as long as a start waits for the first part."""
NUM_THREADS = 4
_PROGRESS_S = 10.0


class LenientRegister:
    """A ``Register`` that leaves memory as it is where it is not pinned.

    Args:
        register: pins, or raises ConfigError.
        refused: told how many bytes of a region are not pinned in the end.
        recover: called after each refusal.
    """

    def __init__(
        self,
        register: Callable[[int, int], Callable[[], None]],
        refused: Callable[[int], None] = lambda num_bytes: None,
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        self._register = register
        self._recover = recover
        self._told: set[str] = set()
        self.refused = refused

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None] | None:
        """Pin it, or say why not, once for each reason."""
        try:
            return self._register(address, num_bytes)
        except ConfigError as error:
            sentence = str(error)
        if sentence not in self._told:
            self._told.add(sentence)
            logger.warning(
                "sgl-tiered: %s What is used all the same goes by way of pinned "
                "buffers, and a thread copies it once more.",
                sentence,
            )
        self._recover()
        return None


def _note_refused(register: Register, num_bytes: int) -> None:
    if isinstance(register, LenientRegister):
        register.refused(num_bytes)


class Pinning:
    """The parts of one region; the first one is pinned before the constructor returns.

    Where the first part is left as it is, all of it is: then every row is ready. Where
    a later one is refused, rows from there on are never ready, and not pinned; or, if
    parts will not do, none is, and every row is ready.

    Args:
        register: pins a part; from several threads at a time.
        address: of row 0.
        num_rows, row_bytes: of the region; rows are whole pages of memory.
        in_steps: return when the first part is pinned; else with the last one.
        part_bytes: of a part; one row at least. ``PIN_BYTES`` if None.
        num_threads: that pin what follows the first part.
        progress_s: seconds between two lines about it, whether or not it advances.

    Raises:
        ConfigError: the first part cannot be pinned.
    """

    def __init__(
        self,
        register: Register,
        address: int,
        num_rows: int,
        row_bytes: int,
        *,
        in_steps: bool = True,
        part_bytes: int | None = None,
        num_threads: int = NUM_THREADS,
        progress_s: float = _PROGRESS_S,
    ) -> None:
        self._register = register
        self._address, self._row_bytes = address, row_bytes
        self._num_rows = num_rows
        self._part_rows = max((part_bytes or PIN_BYTES) // row_bytes, 1)
        self._in_steps = in_steps
        self._progress_s = progress_s
        began_s = time.monotonic()
        # Held while somebody is told, so that steps are told in order.
        self._lock = threading.Lock()
        self._undo: dict[int, Callable[[], None]] = {}
        self._told: Callable[[int], None] | None = None
        self._num_told = 0
        self._next = self._num_ready = min(self._part_rows, num_rows)
        # The first row that will not be ready.
        self._end = num_rows
        self._stop = threading.Event()
        undo = register(address, self._num_ready * row_bytes)
        self.is_refused = False
        """Nothing is pinned, and everything may be used."""
        if undo is None:
            self._next = num_rows
            self._leave_all()
        else:
            self._undo[0] = undo
        num_parts = -(-(num_rows - self._next) // self._part_rows)
        self._num_running = min(num_threads, num_parts)
        self._threads = [
            threading.Thread(target=self._run, name=f"tiered-pin-{i}", daemon=True)
            for i in range(self._num_running)
        ]
        self._over = threading.Event()
        if self._threads:
            logger.info(
                "sgl-tiered: %.2f of %.2f GB of memory are pinned and in use; %d "
                "threads pin the rest",
                *self._gigabytes(),
                self._num_running,
            )
            watch = threading.Thread(
                target=self._report, args=(began_s,), name="tiered-pin", daemon=True
            )
            self._threads.append(watch)
        for thread in self._threads:
            thread.start()
        if not in_steps:
            self.wait()
            if self._num_ready < num_rows:
                self.close()
                self._leave_all()

    @property
    def num_ready(self) -> int:
        """Rows, from row 0 on, that may be used."""
        return self._num_ready

    @property
    def pinned_bytes(self) -> int:
        """Bytes of these rows; 0 where nothing is pinned."""
        return 0 if self.is_refused else self._num_ready * self._row_bytes

    def watch(self, told: Callable[[int], None], since: int = 0) -> None:
        """Tell of each step of ``num_ready``, those that were made included.

        Steps are of one part, however fast they come: several regions of one size are
        told of in the same numbers.

        Args:
            told: called here, and from the threads that pin; must not block.
            since: a step; tell of those behind it.
        """
        with self._lock:
            self._told, self._num_told = told, since
            self._tell()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing more will be pinned; return False after the timeout."""
        give_up_at_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            left_s = None if give_up_at_s is None else give_up_at_s - time.monotonic()
            thread.join(left_s)
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop after the parts that are under way, and unpin; may be called twice."""
        self._stop.set()
        self.wait()
        while self._undo:
            self._undo.popitem()[1]()

    def _run(self) -> None:
        while not self._stop.is_set() and self._pin_next():
            pass
        with self._lock:
            self._num_running -= 1
            if not self._num_running:
                self._over.set()
            if self._num_running or self._end == self._num_rows or not self._in_steps:
                return
            for first in [first for first in self._undo if first >= self._end]:
                self._undo.pop(first)()
            num_bytes = (self._num_rows - self._num_ready) * self._row_bytes
            _note_refused(self._register, num_bytes)
            if not self._stop.is_set():
                logger.warning(
                    "sgl-tiered: the device pins %d of %d bytes of memory: the rest "
                    "is not used. Give less, or raise the limit of locked memory "
                    "(ulimit -l).",
                    self._num_ready * self._row_bytes,
                    self._num_rows * self._row_bytes,
                )

    def _report(self, began_s: float) -> None:
        """Say now and then how far it is, and at last how long all of it took."""
        advanced_s, before = began_s, self._num_ready
        while not self._over.wait(self._progress_s):
            now_s = time.monotonic()
            if self._num_ready != before:
                advanced_s, before = now_s, self._num_ready
                text = ""
            else:
                text = f"; no more for {now_s - advanced_s:.0f} s"
            logger.info(
                "sgl-tiered: %.2f of %.2f GB of memory are pinned and in use%s",
                *self._gigabytes(),
                text,
            )
        if self._num_ready == self._num_rows:
            logger.info(
                "sgl-tiered: all %.2f GB of memory are pinned, in %.1f s",
                self._gigabytes()[1],
                time.monotonic() - began_s,
            )

    def _gigabytes(self) -> tuple[float, float]:
        """Return how much is ready, and of how much."""
        gigabytes = self._row_bytes / 1e9
        return self._num_ready * gigabytes, self._num_rows * gigabytes

    def _pin_next(self) -> bool:
        """Pin a part; return False where nothing is left to do."""
        with self._lock:
            first = self._next
            if first >= self._end:
                return False
            self._next = min(first + self._part_rows, self._num_rows)
            num_bytes = (self._next - first) * self._row_bytes
        undo = None
        try:
            undo = self._register(self._address + first * self._row_bytes, num_bytes)
        except ConfigError as error:
            logger.debug("sgl-tiered: %s", error)
        except Exception:
            logger.exception("sgl-tiered: memory cannot be pinned.")
        with self._lock:
            if undo is None:
                self._end = min(self._end, first)
                return False
            self._undo[first] = undo
            self._advance()
        return True

    def _leave_all(self) -> None:
        self.is_refused, self._num_ready = True, self._num_rows
        _note_refused(self._register, self._num_rows * self._row_bytes)

    def _advance(self) -> None:
        """Find what is ready now, and tell."""
        while self._num_ready < self._end and self._num_ready in self._undo:
            following = self._num_ready + self._part_rows
            self._num_ready = min(following, self._end)
        self._tell()

    def _tell(self) -> None:
        while self._told is not None and self._num_told < self._num_ready:
            step = self._num_told + self._part_rows
            self._num_told = min(step, self._num_ready)
            self._told(self._num_told)
