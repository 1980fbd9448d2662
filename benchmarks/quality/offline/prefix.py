"""A prefix: computed densely once, watched meanwhile, then compressed in many ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from offline.llama import LayerKV, Llama, LlamaShape

from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts, Selection
from sgl_tiered.policies.sparsity.solver import HeldCurves

__all__ = ["MassMeter", "Prefix", "budget_tokens", "compute_prefix", "keep"]


class MassMeter:
    """Adds up what each token of a sequence receives, block by block.

    Attributes:
        mass: float32 [num_layers, num_kv_heads, num_tokens].
        reads: queries that it is a sum over, per token; float32 [num_tokens].

    Args:
        shape: of the model.
        num_tokens: of the sequence.
        local_tokens: queries nearer to a token than this are left out.
        rows: the queries that count, first and end; all unless given.
        power: of the probabilities.
    """

    def __init__(
        self,
        shape: LlamaShape,
        num_tokens: int,
        local_tokens: int = 0,
        rows: tuple[int, int] | None = None,
        power: int = 1,
    ) -> None:
        heads = shape.num_kv_heads
        self.mass = np.zeros((shape.num_layers, heads, num_tokens), np.float32)
        self._local = local_tokens
        self._power = power
        self._first, self._end = rows or (0, num_tokens)
        first_reader = np.maximum(np.arange(num_tokens) + local_tokens, self._first)
        self.reads = np.maximum(self._end - first_reader, 0).astype(np.float32)

    def __call__(self, layer: int, first_row: int, shares: torch.Tensor) -> None:
        """Take a block of rows; see ``llama.Watch``."""
        begin = max(self._first - first_row, 0)
        end = min(self._end - first_row, shares.shape[2])
        if begin >= end:
            return
        block = shares[:, :, begin:end]
        if self._local:
            rows = torch.arange(begin, end, device=shares.device) + first_row
            keys = torch.arange(shares.shape[3], device=shares.device)
            block = block * (rows[:, None] - keys[None, :] >= self._local)
        if self._power != 1:
            block = block**self._power
        total = block.sum(dim=(1, 2)).cpu().numpy()
        self.mass[layer, :, : total.shape[1]] += total


@dataclass(frozen=True, slots=True)
class Prefix:
    """Dense KV of a prefix and the attention that its tokens received.

    ``meters`` are by (local_tokens, mass_power, window_tokens), as selections ask for.
    """

    kv: list[LayerKV]
    meters: dict[tuple[int, int, int], MassMeter]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return len(self.kv[0][0])

    def facts(
        self, selection: Selection, keep_share: float, curves: HeldCurves | None
    ) -> PrefixFacts:
        """Return what a selection is told, at a share of the layer-tokens."""
        local, power = selection.local_tokens, selection.mass_power
        meter = self.meters.get((local, power, 0))
        window = self.meters.get((0, 1, selection.window_tokens))
        needs_window = selection.window_tokens > 0
        return PrefixFacts(
            num_layers=len(self.kv),
            num_tokens=self.num_tokens,
            budget_tokens=budget_tokens(len(self.kv), self.num_tokens, keep_share),
            mass=meter.mass if selection.needs_mass and meter else None,
            reads=meter.reads if selection.needs_mass and meter else None,
            recent_mass=window.mass if needs_window and window else None,
            curves=curves,
        )


def budget_tokens(num_layers: int, num_tokens: int, keep_share: float) -> int:
    """Return the layer-tokens of a share, rounded down: never more bytes than said."""
    return int(num_layers * num_tokens * keep_share + 1e-9)


def compute_prefix(
    model: Llama, tokens: torch.Tensor, selections: Sequence[Selection]
) -> Prefix:
    """Compute a prefix [num_tokens] and meter what these selections ask for."""
    wanted = {(s.local_tokens, s.mass_power, 0) for s in selections if s.needs_mass}
    wanted |= {(0, 1, s.window_tokens) for s in selections if s.window_tokens}
    count = len(tokens)
    meters = {}
    for key in wanted:
        local, power, window = key
        rows = (max(count - window, 0), count) if window else None
        meters[key] = MassMeter(model.shape, count, local, rows, power)

    def watch(layer: int, row: int, shares: torch.Tensor) -> None:
        for meter in meters.values():
            meter(layer, row, shares)

    _, kv = model.run(tokens[None], watch=watch, logits_from=len(tokens))
    return Prefix(kv, meters)


def keep(kv: Sequence[LayerKV], kept: KeepSets) -> list[LayerKV]:
    """Return the kept tokens' KV of each layer."""
    found = []
    for (key, value), positions in zip(kv, kept, strict=True):
        index = torch.from_numpy(positions).to(key.device)
        found.append((key[index], value[index]))
    return found
