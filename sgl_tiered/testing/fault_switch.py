"""Which operation is struck by which fault: drawn, counted, and changed while serving.

One switch per tier, shared by all that puts the faults in: the tier's wrapper, or the
system calls of a disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.serving.emulation import Fault

__all__ = ["WRONG_BYTES", "FaultSwitch"]

WRONG_BYTES = frozenset({"corrupt", "zero", "swap"})
"""Faults that change what is read; the others change whether it is read."""
_POLL_S = 0.05
"""A fault that ends by the clock is noticed this late by an operation that hangs."""


class FaultSwitch:
    """The faults of one tier. Thread-safe.

    Same faults, same seed and same operations in the same order strike alike.

    Args:
        faults: in force from the beginning.
        seed: of what is drawn.
        clock: for faults that last for a time.

    Attributes:
        num_struck: operations struck so far, by kind of fault.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._generation = 0
        self.num_struck: Counter[str] = Counter()
        self.set(faults, seed)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is switched on."""
        return self._faults

    def set(self, faults: Sequence[Fault], seed: int = 0) -> None:
        """Start over with these faults; what hangs in the former ones goes on."""
        with self._changed:
            self._faults = tuple(faults)
            self._rng = np.random.default_rng(seed)
            self._started_s = self._clock.now()
            self._num_operations: Counter[tuple[bool, bool]] = Counter()
            self._num_times: Counter[int] = Counter()
            self._generation += 1
            self._changed.notify_all()

    def strike(self, kinds: Collection[str], *, is_store: bool) -> Fault | None:
        """Count an operation and return the fault that strikes it, if any.

        Args:
            kinds: that this operation can suffer.
            is_store: its direction.
        """
        if not self._faults:
            return None
        with self._changed:
            counted = (is_store, not WRONG_BYTES.isdisjoint(kinds))
            self._num_operations[counted] += 1
            for place, fault in enumerate(self._faults):
                if fault.kind not in kinds or not self._is_due(
                    place, fault, self._num_operations[counted], is_store
                ):
                    continue
                self._num_times[place] += 1
                self.num_struck[fault.kind] += 1
                return fault
        return None

    def hold(self, fault: Fault) -> None:
        """Block until the fault is over or the switch is set anew."""
        with self._changed:
            generation = self._generation
            while self._generation == generation and self._lasts(fault):
                self._changed.wait(_POLL_S)

    def draw(self, below: int) -> int:
        """Return a number from 0 on, below ``below``."""
        with self._changed:
            return int(self._rng.integers(below))

    def permutation(self, count: int) -> list[int]:
        """Return the numbers below ``count`` in a drawn order."""
        with self._changed:
            order: list[int] = self._rng.permutation(count).tolist()
            return order

    def _is_due(
        self, place: int, fault: Fault, num_operations: int, is_store: bool
    ) -> bool:
        if fault.direction and (fault.direction == "store") != is_store:
            return False
        if num_operations <= fault.after or self._num_times[place] >= fault.times:
            return False
        if not self._lasts(fault):
            return False
        return fault.probability >= 1.0 or self._rng.random() < fault.probability

    def _lasts(self, fault: Fault) -> bool:
        return self._clock.now() - self._started_s < fault.duration_s
