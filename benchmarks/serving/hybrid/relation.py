"""Link and weights that give this machine the proportions asked for, and the bound.

HybridServe (papers: hybridserve) balances three times of a layer: loading its weights
(T_load_w), loading context as KV (T_load_kv), rebuilding context from activations
(T_kv_gen). The last is measured here; the link is emulated, so the other two follow
from the proportions wanted. Pure functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_tiered.cost.calibration import TokensFit
from sgl_tiered.policies.activations.balance import LayerSplit, balanced_split
from sgl_tiered.policies.activations.base import LayerFacts, PageLine
from sgl_tiered.sim.hardware import find_hardware
from sgl_tiered.sim.models import find_model

sys.path.append(str(Path(__file__).parents[2] / "sim"))
from batch_model import LayerTimes

__all__ = [
    "BatchFacts",
    "Relation",
    "bound_of",
    "device_bytes_of",
    "facts_of",
    "layer_pages",
    "paper_relation",
]

PAPER_DEVICE, PAPER_MODEL = "RTX-4090", "OPT-30B"
PAPER_BATCH, PAPER_CONTEXT = 64, 1_920 + 64
"""Of the paper's Figure 13: prompts of 1,920 tokens, half way through the answers."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Proportions of the three times of a layer, for equal tokens.

    Attributes:
        load_over_gen: T_load_kv / T_kv_gen.
        weights_over_load: T_load_w / T_load_kv of the whole batch's context; 0 where
            the weights are on the device.
    """

    load_over_gen: float
    weights_over_load: float = 0.0

    def bytes_per_s(self, kv_gen: TokensFit, tokens: int, token_bytes: int) -> float:
        """Return the link on which KV loads that much slower than it is rebuilt.

        Args:
            kv_gen: as measured here.
            tokens: of one rebuild, whose overhead counts.
            token_bytes: of K and V of a token in one layer.
        """
        load_s = self.load_over_gen * kv_gen.seconds(tokens)
        return tokens * token_bytes / load_s

    def weight_bytes(self, context_tokens: int, token_bytes: int) -> int:
        """Return the bytes of a layer's weights, for a batch's context."""
        return round(self.weights_over_load * context_tokens * token_bytes)


def paper_relation() -> Relation:
    """Return OPT-30B's proportions on an RTX 4090 with PCIe 4, by data sheets.

    The same times as the simulator's (``benchmarks/sim/activations.py``).
    """
    layer = LayerTimes(find_hardware(PAPER_DEVICE), find_model(PAPER_MODEL))
    contexts = PAPER_BATCH * PAPER_CONTEXT
    return Relation(
        layer.load_kv.token_s / layer.kv_gen.token_s,
        layer.weights_s / layer.load_kv.seconds(contexts),
    )


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """A batch on this machine.

    Attributes:
        contexts: tokens of each request, half way through its answer.
        page_tokens: tokens in a page.
        token_bytes: of K and V of a token in one layer; of activations it is half.
        kv_gen: as measured here.
        bytes_per_s: of the emulated link.
        weight_bytes: of a layer, over the link.
        compute_s: of a layer of a step that streams nothing.
        device_bytes: of the device's memory for pages of a layer.
    """

    contexts: tuple[int, ...]
    page_tokens: int
    token_bytes: int
    kv_gen: TokensFit
    bytes_per_s: float
    weight_bytes: int
    compute_s: float
    device_bytes: int


def facts_of(batch: BatchFacts) -> LayerFacts:
    """Return what the rules about activations are told of a layer of the batch."""
    page_bytes = batch.page_tokens * batch.token_bytes
    page_s = page_bytes / batch.bytes_per_s
    return LayerFacts(
        num_pages=layer_pages(batch.contexts, batch.page_tokens),
        device_bytes=batch.device_bytes,
        kv_page_bytes=page_bytes,
        act_page_bytes=page_bytes // 2,
        kv_gen=PageLine(
            batch.kv_gen.overhead_s, batch.kv_gen.token_s * batch.page_tokens
        ),
        load_kv=PageLine(0.0, page_s),
        load_act=PageLine(0.0, page_s / 2),
        load_weights_s=batch.weight_bytes / batch.bytes_per_s,
        compute_s=batch.compute_s,
    )


def bound_of(batch: BatchFacts, num_layers: int) -> tuple[float, LayerSplit]:
    """Return the shortest step by the regressions, in seconds, and its split."""
    split = balanced_split(facts_of(batch))
    return num_layers * split.seconds, split


def layer_pages(contexts: Sequence[int], page_tokens: int) -> int:
    """Return the whole pages of all contexts: only these leave the device."""
    return sum(tokens // page_tokens for tokens in contexts)


def device_bytes_of(
    total_layer_pages: int,
    act_layer_pages: int,
    num_open: int,
    num_layers: int,
    page_bytes: int,
) -> int:
    """Return the device's bytes for whole pages of one layer.

    Args:
        total_layer_pages: of KV, those of staging not counted.
        act_layer_pages: of activations, those of staging not counted.
        num_open: requests with a page that is not whole, which stays in all layers.
        num_layers: of the model.
        page_bytes: of KV of a page in one layer; of activations it is half.
    """
    taken = num_open * num_layers
    kv = max(total_layer_pages - taken, 0) * page_bytes
    act = max(act_layer_pages - taken, 0) * page_bytes // 2
    return (kv + act) // num_layers
