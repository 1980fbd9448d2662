"""Sampling T_kv_gen: the sizes, the budget, and a line whose clock is ours."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.engines.device import rebuild_probe  # noqa: E402
from sgl_tiered.engines.device.rebuild_probe import (  # noqa: E402
    PROBED_TOKENS,
    probe_kv_gen,
    sample_kv_gen,
)

SHAPE = (32, 2, 8)
OVERHEAD_S, TOKEN_S = 1e-3, 2e-5


class KernelClock:
    """Stands still, but for what the kernel is said to take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> None:
        self.seconds = 0.0
        self.factor = factor
        self.sizes: list[int] = []
        self._kernel = rebuild_probe.rebuild_kv
        monkeypatch.setattr(rebuild_probe, "rebuild_kv", self._rebuild)

    def now(self) -> float:
        """Return what all rebuilds took."""
        return self.seconds

    def _rebuild(self, acts, rows, *others):
        self._kernel(acts, rows, *others)
        num_tokens = int(rows.numel())
        self.sizes.append(num_tokens)
        self.seconds += self.factor * (OVERHEAD_S + TOKEN_S * num_tokens)


def test_the_line_is_found(monkeypatch):
    """All sizes, and the coefficients of the clock."""
    clock = KernelClock(monkeypatch)
    fit = probe_kv_gen(*SHAPE, torch.float32, 16, clock=clock)
    assert fit.overhead_s == pytest.approx(OVERHEAD_S)
    assert fit.token_s == pytest.approx(TOKEN_S)
    assert fit.quality.r2 == pytest.approx(1.0)
    assert set(clock.sizes) == set(PROBED_TOKENS)
    assert clock.seconds < 1.5


def test_a_slow_layer_has_fewer_sizes(monkeypatch):
    """Three sizes in any case, twice each; no larger one once the budget is gone."""
    clock = KernelClock(monkeypatch, factor=1_000.0)
    samples = sample_kv_gen(*SHAPE, torch.float32, 16, clock=clock)
    assert [sample.num_tokens for sample in samples] == list(PROBED_TOKENS[:3])
    assert len(clock.sizes) == 1 + 3 * 2


def test_large_pages_still_have_three_sizes(monkeypatch):
    """Pages of 2,048 tokens: whole pages, and sizes that differ."""
    clock = KernelClock(monkeypatch)
    samples = sample_kv_gen(*SHAPE, torch.float32, 2_048, clock=clock)
    assert [sample.num_tokens for sample in samples] == [2_048, 4_096, 8_192]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_opt", [False, True])
def test_the_real_clock_gives_positive_times(dtype, is_opt):
    """A bias and no rotation as in OPT, or the other way round; short budget."""
    fit = probe_kv_gen(
        *SHAPE,
        getattr(torch, dtype),
        16,
        has_rotary=not is_opt,
        has_bias=is_opt,
        budget_s=0.02,
    )
    assert fit.token_s > 0.0
    assert fit.overhead_s >= 0.0
    assert fit.quality.num_points >= 3
