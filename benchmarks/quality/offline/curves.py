"""How a model's layers hold long-range attention, measured for the solver.

As ``sgl-tiered profile`` does on a served model: a prompt is cut in two, tokens before
the cut are ranked by what queries before the cut gave them, and the curve says how much
of what queries behind the cut read the first of that rank hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from offline.cases import Case
from offline.llama import Llama
from offline.prefix import MassMeter

from sgl_tiered.policies.sparsity.base import PrefixFacts
from sgl_tiered.policies.sparsity.car import LongRangeImportance
from sgl_tiered.policies.sparsity.profile import FRACTIONS, held_curve
from sgl_tiered.policies.sparsity.solver import HeldCurves

__all__ = ["measure_curves"]


def measure_curves(
    model: Llama, cases: Sequence[Case], ranking: LongRangeImportance
) -> HeldCurves:
    """Return the curves, averaged over cases that are cut where their prefix ends.

    Args:
        model: whose layers.
        cases: of the profile's split.
        ranking: ranks the prefix's tokens, and says which power of attention counts.
    """
    held = np.zeros((model.shape.num_layers, len(FRACTIONS)))
    total = np.zeros(model.shape.num_layers)
    num_reads = 0
    for case in cases:
        count, cut = len(case.tokens), case.num_prefix
        local, power = ranking.local_tokens, ranking.mass_power
        before = MassMeter(model.shape, count, local, (0, cut), power)
        later = MassMeter(model.shape, count, local, (cut, count), power)

        def watch(
            layer: int,
            row: int,
            shares: torch.Tensor,
            meters: tuple[MassMeter, MassMeter] = (before, later),
        ) -> None:
            for meter in meters:
                meter(layer, row, shares)

        model.run(torch.from_numpy(case.tokens)[None], watch=watch, logits_from=count)
        facts = PrefixFacts(
            model.shape.num_layers,
            cut,
            0,
            mass=before.mass[:, :, :cut],
            reads=before.reads[:cut],
        )
        scores = ranking.importance(facts)
        read = later.mass[:, :, :cut].sum(axis=1)
        held += [
            held_curve(*rows, FRACTIONS) for rows in zip(scores, read, strict=True)
        ]
        total += read.sum(axis=1, dtype=np.float64)
        num_reads += (count - cut) * model.shape.num_heads
    curves = held / np.maximum(total, 1e-9)[:, None]
    weights = np.maximum(total / max(num_reads, 1), 1e-6)
    return HeldCurves(np.array(FRACTIONS), np.clip(curves, 0.0, 1.0), weights)
