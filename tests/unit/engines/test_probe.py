"""The probe of a start takes a bounded time, however slow the machine is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.core.clock import ManualClock  # noqa: E402
from sgl_tiered.engines.sglang import probe  # noqa: E402


class StepClock(ManualClock):
    """A clock by which everything takes the same time."""

    def __init__(self, step_s):
        super().__init__()
        self._step_s = step_s

    def now(self):
        self.advance(self._step_s)
        return super().now()


@pytest.fixture
def widths(monkeypatch):
    """The widths of the matrices that are made."""
    made = []
    ones = torch.ones

    def record(*shape, **kind):
        made.append(shape[-1])
        return ones(*shape, **kind)

    monkeypatch.setattr(torch, "ones", record)
    return made


def test_a_slow_machine_multiplies_small_matrices(widths):
    """Where the smallest product takes longer than the budget, none is larger."""
    rate = probe._matmul_flops(torch.zeros(1), StepClock(1.0))
    assert max(widths) == 128
    assert rate == 2.0 * 32 * 128 * 128


def test_a_fast_machine_multiplies_large_matrices(widths):
    """Where each product fits into the budget, the last is of the full size."""
    rate = probe._matmul_flops(torch.zeros(1), StepClock(0.02))
    assert max(widths) == widths[-1] == 2048
    assert rate == pytest.approx(2.0 * 512 * 2048 * 2048 / 0.02)
