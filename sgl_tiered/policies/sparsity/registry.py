"""Names of the selections, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.sparsity.base import Selection
from sgl_tiered.policies.sparsity.car import CarSelection
from sgl_tiered.policies.sparsity.car_uniform import CarUniformSelection
from sgl_tiered.policies.sparsity.h2o import H2OSelection
from sgl_tiered.policies.sparsity.pyramidkv import PyramidKVSelection
from sgl_tiered.policies.sparsity.random import RandomSelection
from sgl_tiered.policies.sparsity.recent import RecentSelection
from sgl_tiered.policies.sparsity.snapkv import SnapKVSelection

__all__ = ["SELECTIONS", "make_selection"]

_MAKERS: dict[str, Callable[[np.random.Generator], Selection]] = {
    "car": lambda _: CarSelection(),
    "car-uniform": lambda _: CarUniformSelection(),
    "h2o": lambda _: H2OSelection(),
    "snapkv": lambda _: SnapKVSelection(),
    "pyramidkv": lambda _: PyramidKVSelection(),
    "random": RandomSelection,
    "recent": lambda _: RecentSelection(),
}

SELECTIONS: tuple[str, ...] = tuple(_MAKERS)


def make_selection(name: str, rng: np.random.Generator) -> Selection:
    """Return a new selection; ``rng`` is used by those that draw.

    Raises:
        ConfigError: none has this name.
    """
    return maker_of(_MAKERS, "sparsity_policy", name)(rng)
