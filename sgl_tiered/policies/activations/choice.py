"""Which share of the pages ``--tiered-activations auto`` keeps as activations, and why.

First the model's shape may refuse, then the load; else the share is that of the layer
that is shortest (``balance.py``). One answer and one sentence, so that ``explain`` and
the log say what was decided.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.policies.activations.balance import balanced_split
from sgl_tiered.policies.activations.base import LayerFacts
from sgl_tiered.policies.activations.ratio import PageRatio
from sgl_tiered.policies.activations.refusal import (
    refusal_of_load,
    refusal_of_model,
)

__all__ = ["ShareChoice", "choose_share"]


@dataclass(frozen=True, slots=True)
class ShareChoice:
    """What was decided.

    Attributes:
        share: of a request's pages that are activations, 0 to 1.
        ratio: the same as whole numbers; what ``next_page`` is given.
        reason: one sentence for ``explain``.
        is_refused: no page is to be activations; the share is 0.
    """

    share: float
    ratio: PageRatio
    reason: str
    is_refused: bool


def choose_share(
    facts: LayerFacts, hidden_size: int, num_kv_heads: int, head_size: int
) -> ShareChoice:
    """Return the share that is best for a batch, on one rank.

    Args:
        facts: of one layer of a decode step with ``facts.num_pages`` pages, at least 1.
        hidden_size, num_kv_heads, head_size: as ``refusal_of_model`` takes them.
    """
    refusal = refusal_of_model(hidden_size, num_kv_heads, head_size)
    if refusal is None:
        refusal = refusal_of_load(facts)
    if refusal is not None:
        return ShareChoice(0.0, PageRatio(0, 1), refusal, True)
    split = balanced_split(facts)
    ratio = PageRatio.of_share(split.num_act / facts.num_pages)
    reason = (
        f"activations are {ratio.act_share:.0%} of the pages: with {facts.num_pages} "
        f"pages a layer then loads in {1e3 * split.link_s:.3g} ms and computes in "
        f"{1e3 * split.compute_s:.3g} ms."
    )
    return ShareChoice(ratio.act_share, ratio, reason, False)
