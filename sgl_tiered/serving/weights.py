"""Which weights compute now: the one place that knows, and that is told of changes.

KV below the device is found by tokens and by what computed it. What SGLang's weights
are is a hash of all of them (``engines/device/fingerprint.py``), which takes seconds
for a large model. So after a change it is not known for a while. Then, and while the
device holds KV of several weights, KV below the device is neither found nor kept: the
identity is
*unsettled*, and ``TieredRuntime.namespace`` gives none.

- ``changing`` is called before SGLang touches the weights, ``changed`` after. The
  weights are read in the background, unless the next change comes first.
- ``poll``, once per pass, says when the hash is known; of several ranks when that of
  each is, since each has its own part. They hear of it at their meeting, all at once.
- Without a flush SGLang keeps what it has on the device. That is KV of the weights
  before, and what is computed upon it is of neither. Where the weights turn out to be
  those of before it is as good as it was; else the device is *mixed* until it has been
  emptied.
- A decode instance gets KV that another one has computed, and hears by which weights
  (``told``, ``received``): those of others make its device mixed as well.

Everything but the reading itself runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.background import give_way
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.serving.agreement import Agreement

__all__ = [
    "HashStopped",
    "Read",
    "WeightsHash",
    "WeightsIdentity",
]

logger = logging.getLogger(__name__)

_MOST_THREADS = 4
_FACT = "weights"
_MOST_OTHERS = 1024
"""Names and epochs of instances that send KV, until it is known what they come to."""


class HashStopped(Exception):  # noqa: N818 - nothing went wrong
    """Nobody wants the hash any more."""


@dataclass(frozen=True, slots=True)
class WeightsHash:
    """What weights hash to.

    Attributes:
        digest: 32 hexadecimal digits.
        num_tensors, num_bytes: that were read.
        num_unreadable: that could not be; with any, the digest is nobody else's.
    """

    digest: str
    num_tensors: int
    num_bytes: int
    num_unreadable: int = 0


_Own = list[Any]
"""What a rank tells of its weights: their digest, and how many could not be read."""

Read = Callable[[int, threading.Event], WeightsHash]
"""(threads, stop) -> hash; raises ``HashStopped`` soon after ``stop`` was set."""


class WeightsIdentity:
    """What the weights of all ranks are, as far as is known.

    Args:
        begin: looks which tensors this rank has now; returns what reads them, on any
            thread.
        agreement: between the ranks.
        metrics: counts changes, bytes and seconds.
    """

    def __init__(
        self,
        begin: Callable[[], Read],
        agreement: Agreement,
        metrics: MetricsRegistry,
    ) -> None:
        self._begin = begin
        self._agreement = agreement
        self._metrics = metrics
        # The last that was known, and the one in force; None while it is not known.
        self._last = self._joined(agreement.gathered(self._read_now()))
        self._value: str | None = self._last
        # In force when the last change began; None where it was not settled then.
        self._before: str | None = None
        self._is_mixed = False
        self._was_emptied = False
        self._reading: _Reading | None = None
        # Of the ranks that have read the weights after the latest change.
        self._told: list[_Own] | None = None
        self._num_changes = 0
        self._nonce = os.urandom(8).hex()
        # Names of weights whose KV was received, while those here are not known; and
        # epochs whose name the sender did not know.
        self._others: set[str] = set()
        self._unnamed: set[str] = set()
        if agreement.is_shared:
            agreement.tell(_FACT, self._tell, self._hear)

    @property
    def value(self) -> str | None:
        """Name of the weights: 32 digits for each rank; None while it is not known."""
        return self._value

    @property
    def settled(self) -> bool:
        """Whether it is known what KV is computed by, and all on the device is."""
        return self._value is not None and not self._is_mixed and not self._unnamed

    @property
    def is_mixed(self) -> bool:
        """Whether the device may hold KV of several weights."""
        return self._is_mixed

    @property
    def was_emptied(self) -> bool:
        """Whether no KV was left on the device at some time since ``changing``."""
        return self._was_emptied

    def changing(self) -> None:
        """Note that the weights are about to change, or to go away."""
        self._stop()
        self._before = self._value if self.settled else None
        self._value = None
        self._was_emptied = False

    def changed(self, *, device_is_empty: bool) -> None:
        """Note that the weights are as they will be computed with from now on.

        Args:
            device_is_empty: no KV of before is left there.
        """
        assert self._value is None, "it was not said that weights would change"
        self._num_changes += 1
        self._metrics.add("weight_changes")
        self._is_mixed = not (device_is_empty or self._was_emptied)
        if device_is_empty:
            self._forget_others()
        self._told = None
        self._reading = _Reading(self._begin())

    def emptied(self) -> None:
        """Note that no KV is left on the device, nor anybody who had some."""
        self._is_mixed = False
        self._was_emptied = True
        self._forget_others()

    def told(self) -> tuple[str, str]:
        """Return what to tell with KV that is sent to another instance; any thread.

        Returns:
            The name of the weights, and the epoch since they are in force. The name is
            empty while it is not known: it comes with what is sent later in the epoch.
            Both are where the KV may be of several weights.
        """
        reading, value = self._reading, self._value
        is_changing = reading is None and value is None
        if self._is_mixed or is_changing:
            return "", ""
        return value or "", f"{self._nonce}.{self._num_changes}"

    def received(self, name: str, epoch: str) -> None:
        """Note that KV of another instance is on the device.

        Args:
            name, epoch: as ``told`` there.
        """
        if not epoch:
            self._mix()
        elif not name:
            self._unnamed.add(epoch)
        else:
            self._unnamed.discard(epoch)
            self._others.add(name)
        self._compare()

    def poll(self) -> bool:
        """Look whether the identity is known by now.

        Returns:
            Whether it has become known just now, and is another than the last.
        """
        own = self._own()
        if self._value is not None or own is None:
            return False
        told = [own] if self._agreement.num_ranks == 1 else self._told
        if told is None:
            return False
        reading = self._reading
        assert reading is not None
        self._note_read(reading.found, reading.seconds)
        self._value = self._joined(told)
        # In this order: others may ask ``told`` meanwhile.
        self._reading, self._told = None, None
        self._agreement.note(_FACT, self._value)
        is_new, self._last = self._value != self._last, self._value
        if self._is_mixed and self._value == self._before:
            self._is_mixed = False
        if self._is_mixed:
            logger.warning(
                "sgl-tiered: the weights changed and the cache was not flushed, so the "
                "device has KV of both: until it is flushed, nothing is kept or found "
                "below the device"
            )
        self._compare()
        return is_new

    def stats(self) -> dict[str, Any]:
        """Return a JSON-able picture, for ``GET /tiered/stats``."""
        return {
            "fingerprint": self._value or "",
            "is_settled": self.settled,
            "is_mixed": self._is_mixed,
            "num_unnamed": len(self._unnamed),
            "num_changes": self._num_changes,
        }

    def close(self) -> None:
        """Read no more."""
        self._stop()

    def _compare(self) -> None:
        """Compare the weights whose KV was received with those here, once known."""
        if self._value is not None:
            others, self._others = self._others, set()
            if others - {self._value}:
                self._mix()
        if len(self._others) + len(self._unnamed) > _MOST_OTHERS:
            self._mix()

    def _mix(self) -> None:
        """Note that the device has KV of other weights, whatever those here are."""
        self._metrics.add("kv_of_other_weights")
        if not self._is_mixed:
            logger.warning(
                "sgl-tiered: a prefill instance has computed KV by other weights than "
                "those here: until this server is flushed (POST /flush_cache), nothing "
                "is kept or found below the device; update both, then flush both"
            )
        self._is_mixed, self._before = True, None
        self._forget_others()

    def _forget_others(self) -> None:
        self._others.clear()
        self._unnamed.clear()

    def _stop(self) -> None:
        """End a read: nobody may touch weights that are written, or not there."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.stop()

    def _read_now(self) -> _Own:
        """Read the weights as fast as it goes; for the start."""
        begin_s = time.monotonic()
        num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
        try:
            found = self._begin()(num_threads, threading.Event())
        except Exception:
            logger.exception("sgl-tiered: the weights could not be read")
            found = _unknown()
        self._note_read(found, time.monotonic() - begin_s)
        return [found.digest, found.num_unreadable]

    def _joined(self, told: list[_Own]) -> str:
        """Return the name of all ranks' weights; every rank counts what one lacks."""
        if any(num_unreadable for _, num_unreadable in told):
            self._metrics.add("weights_unreadable")
        return "-".join(str(digest) for digest, _ in told)

    def _note_read(self, found: WeightsHash, seconds: float) -> None:
        self._metrics.add("weights_read_bytes", found.num_bytes)
        self._metrics.add("weights_read_s", seconds)
        logger.info(
            "sgl-tiered: %d tensors, %.2f GB of weights hashed in %.2f s (%.1f GB/s)",
            found.num_tensors,
            found.num_bytes / 1e9,
            seconds,
            found.num_bytes / 1e9 / max(seconds, 1e-9),
        )

    def _own(self) -> _Own | None:
        """Return what this rank has read after the latest change; None before."""
        reading = self._reading
        if reading is None or not reading.is_done:
            return None
        return [reading.found.digest, reading.found.num_unreadable]

    def _tell(self) -> list[Any] | None:
        own = self._own()
        return None if own is None else [self._num_changes, own]

    def _hear(self, told: list[Any]) -> None:
        if all(one is not None and one[0] == self._num_changes for one in told):
            self._told = [one[1] for one in told]


def _unknown() -> WeightsHash:
    """Name weights as nobody else has theirs: nothing is found wrongly."""
    return WeightsHash(os.urandom(16).hex(), 0, 0, num_unreadable=1)


class _Reading:
    """The weights being read on a thread of its own, which gives way to others.

    Attributes:
        found: the hash, once it is done.
        seconds: that it took.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._stop = threading.Event()
        self._done = threading.Event()
        self.found = WeightsHash("", 0, 0)
        self.seconds = 0.0
        self._thread = threading.Thread(
            target=self._run, name="tiered-weights", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            logger.exception("sgl-tiered: there is no thread to read the weights")
            self._give_up()

    @property
    def is_done(self) -> bool:
        """Whether ``found`` is there."""
        return self._done.is_set()

    def stop(self) -> None:
        """Read no further; returns once nothing is touched any more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _give_up(self) -> None:
        self.found = _unknown()
        self._done.set()

    def _run(self) -> None:
        give_way()
        begin_s = time.monotonic()
        try:
            self.found = self._read(1, self._stop)
        except HashStopped:
            return
        except Exception:
            logger.exception("sgl-tiered: the weights could not be read")
            self._give_up()
            return
        self.seconds = time.monotonic() - begin_s
        self._done.set()
