"""When activations cannot pay, and why, in one sentence for ``explain``.

A model's shape decides once: with grouped queries K and V are narrower than the input
of the projection, and its activations would be the larger ones. The load decides for
each batch: where the link waits for the computation anyway, or the computation for
nothing, rebuilding takes time and saves none.
"""

from __future__ import annotations

from sgl_tiered.policies.activations.balance import balanced_split, split_at
from sgl_tiered.policies.activations.base import LayerFacts

__all__ = ["LEAST_GAIN", "refusal_of_load", "refusal_of_model"]

LEAST_GAIN = 0.02
"""Of a layer's time; less is within what a prediction of it is off."""


def refusal_of_model(hidden_size: int, num_kv_heads: int, head_size: int) -> str | None:
    """Return why activations of a model are no use; None where they are half of KV.

    Args:
        hidden_size: width of the input of the qkv projection, on each rank.
        num_kv_heads: of this rank. Two ranks of an MHA model have half of the heads
            each but all of the hidden size, so there nothing is saved.
        head_size: of one head.
    """
    kv_width = 2 * num_kv_heads * head_size
    if hidden_size < kv_width:
        return None
    return (
        f"activations are refused: a token's input to a layer has {hidden_size} values "
        f"and its K and V {kv_width}, so nothing would be saved."
    )


def refusal_of_load(facts: LayerFacts, least_gain: float = LEAST_GAIN) -> str | None:
    """Return why no page of a batch should be activations; None where some should.

    Args:
        facts: of one layer of the next decode step, with the planner's costs.
        least_gain: share of the layer's time that must be saved, 0 to 1.
    """
    plain = split_at(facts, 0)
    if plain.link_s <= plain.compute_s:
        return (
            f"activations are refused: the link is idle, a layer loads in "
            f"{_ms(plain.link_s)} and computes in {_ms(plain.compute_s)}."
        )
    best = balanced_split(facts)
    gain = 1.0 - best.seconds / plain.seconds
    if best.num_act and gain >= least_gain:
        return None
    return (
        f"activations are refused: a layer takes {_ms(best.seconds)} at best with "
        f"rebuilding and {_ms(plain.seconds)} without, and {least_gain:.0%} is the "
        f"least worth it."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
