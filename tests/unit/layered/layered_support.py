"""A copier that the tests drive step by step, and a small pool to move in."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.testing.fake_layers import FakeLayerCopier

__all__ = ["PATIENCE_S", "Pool", "SteppedCopier"]

PATIENCE_S = 20.0
"""Nothing here takes long; a test that waits longer hangs, and fails."""


class SteppedCopier(FakeLayerCopier):
    """Tells which copies have begun, and holds each until it is let go.

    Attributes:
        begun: ("up" or "down", layer, rows) of each attempt, in order.
        bad_rows: host rows of which no copy works.
        num_to_fail: attempts that fail before the next works.
    """

    def __init__(self, num_layers: int, num_pages: int, num_physical: int) -> None:
        super().__init__(num_layers, num_pages, num_physical, page_tokens=2)
        self.begun: list[tuple[str, int, list[int]]] = []
        self.bad_rows: set[int] = set()
        self.num_to_fail = 0
        self._changed = threading.Condition()
        self._is_stepped = False
        self._num_steps = 0

    def step_by_step(self) -> None:
        """From now on each attempt waits for a step."""
        self._is_stepped = True

    def step(self, count: int = 1) -> None:
        """Let attempts go."""
        with self._changed:
            self._num_steps += count
            self._changed.notify_all()

    def let_all_go(self) -> None:
        """Hold nothing any more."""
        with self._changed:
            self._is_stepped = False
            self._changed.notify_all()

    def wait_begun(self, count: int) -> None:
        """Block until so many attempts have begun since the start."""
        with self._changed:
            ok = self._changed.wait_for(lambda: len(self.begun) >= count, PATIENCE_S)
        assert ok, f"{len(self.begun)} of {count} copies have begun"

    def to_host(
        self, layer: int, physical: np.ndarray, rows: np.ndarray, after: object
    ) -> None:
        self._hold("down", layer, rows)
        super().to_host(layer, physical, rows, after)

    def to_device(
        self, layer: int, rows: np.ndarray, physical: np.ndarray, after: object
    ) -> None:
        self._hold("up", layer, rows)
        super().to_device(layer, rows, physical, after)

    def _hold(self, way: str, layer: int, rows: np.ndarray) -> None:
        with self._changed:
            self.begun.append((way, layer, rows.tolist()))
            self._changed.notify_all()
            held = self._changed.wait_for(
                lambda: not self._is_stepped or self._num_steps > 0, PATIENCE_S
            )
            assert held, "nobody lets the copy go"
            self._num_steps -= self._is_stepped
            fails = self.num_to_fail > 0
            self.num_to_fail -= fails
        if fails or self.bad_rows.intersection(rows.tolist()):
            raise OSError("as asked for")


class Pool:
    """Manager, mover and copier of three layers, pages of two tokens and a clock."""

    LAYERS, PAGES, TOKENS = 3, 16, 2

    def __init__(
        self,
        num_physical: int = 40,
        half_pages: int = 3,
        *,
        lazy: bool = True,
        clock: ManualClock | None = None,
        sub_unit_pages: int = 8,
    ) -> None:
        self.clock = clock or ManualClock()
        self.copier = SteppedCopier(self.LAYERS, self.PAGES, num_physical + 1)
        self.binding = LayerBinding(
            self.LAYERS, self.PAGES, num_physical, first_physical=1
        )
        self.mover = LayerMover(
            self.copier, 16, self.clock, sub_unit_pages=sub_unit_pages
        )
        self.manager = LayerManager(
            self.binding, self.mover, self.TOKENS, half_pages, lazy=lazy
        )

    def settle(self) -> None:
        """Wait until no copy is under way."""
        while not self.manager.is_idle:
            self.mover.wait()
            self.manager.poll()

    def run(self, *requests: object, read: Callable[..., None] | None = None) -> None:
        """Run a forward over requests; what it writes in a layer is the layer + 1."""
        manager = self.manager
        plan = manager.begin_pass(requests)  # type: ignore[arg-type]
        assert not plan.refused, plan.refused
        for layer in range(self.LAYERS):
            for one in requests:
                first = one.num_context // self.TOKENS  # type: ignore[attr-defined]
                pages = one.pages[first:]  # type: ignore[attr-defined]
                places = manager.pages_for_write(layer, pages)
                self.copier.device[places] = layer + 1
            manager.layer_written(layer)
            for group in range(len(plan.groups)):
                manager.wait_unit(layer, group)
                if read is not None:
                    read(layer, group, plan, manager.table(layer))
                manager.unit_done(layer, group)
        manager.end_pass()

    def close(self) -> None:
        """Let everything end."""
        self.copier.let_all_go()
        self.manager.close()
