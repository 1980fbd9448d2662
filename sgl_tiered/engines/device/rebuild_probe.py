"""What rebuilding K and V takes on this machine, sampled when a server starts.

HybridServe's regression of T_kv_gen (papers: hybridserve, section 4.3) for a model's
shape, with weights of chance: a product takes as long whatever the numbers are. The
kernel runs as it does in a server: activations one behind the other, as they come into
their staging half, K and V into pages side by side, layer after layer, and as many
threads as torch has here.
"""

from __future__ import annotations

import statistics

import torch
from sgl_tiered_kernels.kv_gen import KVProjection, Rotary, rebuild_kv

from sgl_tiered.core.clock import Clock, SystemClock
from sgl_tiered.cost.calibration import TokensFit
from sgl_tiered.cost.fitting import TokensSample, fit_tokens

__all__ = ["PROBED_TOKENS", "probe_kv_gen", "sample_kv_gen"]

PROBED_TOKENS = (64, 128, 256, 512, 1_024, 2_048)
_BUDGET_S = 1.0
_LEAST_SIZES = 3
"""A large model on a slow machine has these, however long they take."""
_LEAST_RUNS, _MOST_RUNS = 2, 50
_MOST_LAYERS, _CACHED_BYTES = 4, 64 << 20
"""Layers that take turns: as many as leave no cache with the weights of the next."""
_MIN_TIME_S = 1e-9
_CPU = torch.device("cpu")


def probe_kv_gen(
    hidden: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_tokens: int,
    *,
    has_rotary: bool = True,
    has_bias: bool = False,
    budget_s: float = _BUDGET_S,
    clock: Clock | None = None,
    device: torch.device = _CPU,
) -> TokensFit:
    """Return T_kv_gen of one layer, and how well it is a line.

    Args:
        hidden: numbers of an activation, on each rank.
        num_kv_heads: of this rank.
        head_dim: of one head; even.
        dtype: of weights, activations and KV: float32, bfloat16 or float16.
        page_tokens: tokens in a page.
        has_rotary: the layer rotates its keys.
        has_bias: its projection has a bias.
        budget_s: about how long it may take; larger sizes are left out.
        clock: for the measurement; the system's unless given.
        device: that rebuilds; on CUDA it is waited for after each run.

    Raises:
        ValueError: no layer has such a shape.
    """
    samples = sample_kv_gen(
        hidden,
        num_kv_heads,
        head_dim,
        dtype,
        page_tokens,
        has_rotary=has_rotary,
        has_bias=has_bias,
        budget_s=budget_s,
        clock=clock,
        device=device,
    )
    fit = fit_tokens(samples)
    assert fit is not None, samples
    return fit


def sample_kv_gen(
    hidden: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_tokens: int,
    *,
    has_rotary: bool = True,
    has_bias: bool = False,
    budget_s: float = _BUDGET_S,
    clock: Clock | None = None,
    device: torch.device = _CPU,
) -> list[TokensSample]:
    """Return the points of ``probe_kv_gen``: of each size the median of some runs.

    Three sizes at least.
    """
    ticks = clock or SystemClock()
    sizes = _whole_pages(PROBED_TOKENS, page_tokens)
    layers = _SampleLayers(
        (hidden, num_kv_heads, head_dim),
        dtype,
        sizes[-1],
        has_rotary=has_rotary,
        has_bias=has_bias,
        device=device,
    )
    with torch.inference_mode():
        # The first product of a process pays for its threads.
        layers.rebuild(sizes[0])
        begin_s = ticks.now()
        runs: dict[int, list[float]] = {}
        for num_tokens in sizes:
            left_s = budget_s - (ticks.now() - begin_s)
            if len(runs) >= _LEAST_SIZES:
                last, seconds = next(reversed(runs.items()))
                if _LEAST_RUNS * seconds[0] * num_tokens / last > left_s:
                    break
            runs[num_tokens] = [_timed(layers, num_tokens, ticks)]
        # Size by size and round by round: a busy moment falls on all alike.
        for num_run in range(1, _MOST_RUNS):
            for num_tokens, seconds in runs.items():
                is_late = ticks.now() - begin_s > budget_s
                if num_run >= _LEAST_RUNS and is_late:
                    break
                seconds.append(_timed(layers, num_tokens, ticks))
    return [
        TokensSample(num_tokens, statistics.median(seconds))
        for num_tokens, seconds in runs.items()
    ]


def _timed(layers: _SampleLayers, num_tokens: int, clock: Clock) -> float:
    started_s = clock.now()
    layers.rebuild(num_tokens)
    return max(clock.now() - started_s, _MIN_TIME_S)


def _whole_pages(sizes: tuple[int, ...], page_tokens: int) -> list[int]:
    """Return the sizes rounded up to whole pages; at least three different ones."""
    pages = {-(-size // page_tokens) for size in sizes}
    while len(pages) < _LEAST_SIZES:
        pages.add(2 * max(pages))
    return [count * page_tokens for count in sorted(pages)]


class _SampleLayers:
    """Some layers' projections, activations and slots, made of chance numbers.

    They are rebuilt in turn: a forward comes to each layer when its weights have left
    the caches for those of the others.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        most_tokens: int,
        *,
        has_rotary: bool,
        has_bias: bool,
        device: torch.device,
    ) -> None:
        hidden, num_kv_heads, head_dim = shape
        chance = torch.Generator().manual_seed(0)

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=chance).to(device, dtype)

        width = 2 * num_kv_heads * head_dim
        layer_bytes = width * hidden * dtype.itemsize
        num_layers = max(min(_MOST_LAYERS, _CACHED_BYTES // layer_bytes), 1)
        rotary = None
        if has_rotary:
            angles = torch.rand((most_tokens, head_dim // 2), generator=chance)
            table = torch.cat((angles.cos(), angles.sin()), dim=-1)
            rotary = Rotary(table.to(device))
        self._projections = [
            KVProjection(
                draw(width, hidden) * hidden**-0.5,
                draw(width) if has_bias else None,
                num_kv_heads,
                head_dim,
                rotary,
            )
            for _ in range(num_layers)
        ]
        self._acts = [draw(most_tokens, hidden) for _ in range(num_layers)]
        self._keys, self._values = (
            torch.zeros(
                (most_tokens, num_kv_heads, head_dim), dtype=dtype, device=device
            )
            for _ in "kv"
        )
        self._run = torch.arange(most_tokens, device=device)
        self._turn = 0

    def rebuild(self, num_tokens: int) -> None:
        """Rebuild so many tokens of the next layer."""
        self._turn = (self._turn + 1) % len(self._projections)
        run = self._run[:num_tokens]
        rebuild_kv(
            self._acts[self._turn],
            run,
            self._projections[self._turn],
            self._keys,
            self._values,
            run,
            run,
        )
        if run.is_cuda:
            torch.cuda.synchronize(run.device)
