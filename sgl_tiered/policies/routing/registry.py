"""Names of the routing policies, as flags spell them."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.routing.base import RoutingPolicy
from sgl_tiered.policies.routing.least_load import LeastLoadRouting
from sgl_tiered.policies.routing.prompt_tree import PromptTreeRouting
from sgl_tiered.policies.routing.session import SessionRouting

__all__ = ["ROUTINGS", "make_routing"]

_MAKERS: dict[str, type[LeastLoadRouting | SessionRouting | PromptTreeRouting]] = {
    "least-load": LeastLoadRouting,
    "session": SessionRouting,
    "prompt-tree": PromptTreeRouting,
}

ROUTINGS: tuple[str, ...] = tuple(_MAKERS)


def make_routing(
    name: str,
    *,
    credits_by_place: Mapping[str, float] | None = None,
    running_cost_tokens: float = 64.0,
    compute_cost: float = 2.0,
) -> RoutingPolicy:
    """Return a new policy.

    Args:
        name: one of ``ROUTINGS``.
        credits_by_place: of the prompt tree; the others look at no tier.
        running_cost_tokens: what one request under way counts, in prompt tokens.
        compute_cost: of the prompt tree: what a token to be computed counts.

    Raises:
        ConfigError: no policy has this name, or a credit is wrong.
    """
    maker = maker_of(_MAKERS, "policy", name)
    if maker is PromptTreeRouting:
        return PromptTreeRouting(credits_by_place, running_cost_tokens, compute_cost)
    return maker(running_cost_tokens=running_cost_tokens)
