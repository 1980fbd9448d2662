"""Names of the eviction policies, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.eviction.base import EvictionPolicy
from sgl_tiered.policies.eviction.cost import CostPolicy
from sgl_tiered.policies.eviction.fifo import FIFOPolicy
from sgl_tiered.policies.eviction.lru import LRUPolicy
from sgl_tiered.policies.eviction.random import RandomPolicy
from sgl_tiered.policies.eviction.score import ScorePolicy

__all__ = ["EVICTION_POLICIES", "make_eviction_policy"]

_MAKERS: dict[str, Callable[[np.random.Generator], EvictionPolicy]] = {
    "lru": lambda _: LRUPolicy(),
    "fifo": lambda _: FIFOPolicy(),
    "random": RandomPolicy,
    "score": lambda _: ScorePolicy(),
    "cost": lambda _: CostPolicy(),
}

EVICTION_POLICIES: tuple[str, ...] = tuple(_MAKERS)


def make_eviction_policy(name: str, rng: np.random.Generator) -> EvictionPolicy:
    """Return a new policy; ``rng`` is used by those that draw.

    Raises:
        ConfigError: no policy has this name.
    """
    return maker_of(_MAKERS, "eviction_policy", name)(rng)
