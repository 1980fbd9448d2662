"""Quarantine against a model of single bytes: never back early, never kept too long."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.transport.quarantine import Quarantine

NUM_BYTES = 48
GRACE_S = 10.0

ranges = st.lists(
    st.tuples(st.integers(0, NUM_BYTES - 1), st.integers(0, 12)), max_size=6
)


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(rows, np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


class QuarantineMachine(RuleBasedStateMachine):
    """Holds, fences and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.quarantine = Quarantine(self.clock, GRACE_S)
        self.model: dict[int, tuple[int, set[int], float]] = {}

    @rule(region=st.integers(0, 1), rows=ranges)
    def hold(self, region: int, rows: list[tuple[int, int]]) -> None:
        ticket = self.quarantine.hold(region, *columns(rows))
        assert ticket not in self.model
        touched = {byte for start, size in rows for byte in range(start, start + size)}
        self.model[ticket] = (region, touched, math.inf)

    @rule(data=st.data())
    def pass_fence(self, data: st.DataObject) -> None:
        """Of any ticket: new, fenced before, over, or never given."""
        ticket = data.draw(st.integers(0, len(self.model)))
        self.quarantine.pass_fence(ticket)
        if ticket in self.model:
            region, touched, free_at_s = self.model[ticket]
            end_s = min(free_at_s, self.clock.now() + GRACE_S)
            self.model[ticket] = (region, touched, end_s)

    @rule(delta_s=st.sampled_from([0.0, 1.0, 9.0, 10.0]))
    def wait(self, delta_s: float) -> None:
        self.clock.advance(delta_s)

    @rule(region=st.integers(0, 1), rows=ranges)
    def ask(self, region: int, rows: list[tuple[int, int]]) -> None:
        held = self.held_bytes(region)
        found = self.quarantine.held(region, *columns(rows))
        assert found.tolist() == [
            bool(held & set(range(start, start + size))) for start, size in rows
        ]

    @invariant()
    def every_byte_agrees(self) -> None:
        for region in (0, 1):
            every = np.arange(NUM_BYTES + 12, dtype=np.int64)
            found = self.quarantine.held(region, every, np.ones_like(every))
            assert set(np.flatnonzero(found).tolist()) == self.held_bytes(region)

    @invariant()
    def the_count_agrees(self) -> None:
        now_s = self.clock.now()
        wanted = sum(
            len(touched) for _, touched, end_s in self.model.values() if end_s > now_s
        )
        assert self.quarantine.num_held_bytes == wanted

    def held_bytes(self, region: int) -> set[int]:
        now_s = self.clock.now()
        held = [
            touched
            for of, touched, end_s in self.model.values()
            if of == region and end_s > now_s
        ]
        return set().union(*held)


TestQuarantine = QuarantineMachine.TestCase
