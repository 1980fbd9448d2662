"""Our own selections pass the published kit."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.sparsity.base import Selection
from sgl_tiered.policies.sparsity.registry import SELECTIONS, make_selection
from sgl_tiered.testing.sparsity_kit import SelectionKit


class TestCar(SelectionKit):
    """car."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("car", rng)


class TestCarUniform(SelectionKit):
    """car-uniform."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("car-uniform", rng)


class TestH2O(SelectionKit):
    """h2o."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("h2o", rng)


class TestSnapKV(SelectionKit):
    """snapkv."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("snapkv", rng)


class TestPyramidKV(SelectionKit):
    """pyramidkv."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("pyramidkv", rng)


class TestRandom(SelectionKit):
    """random."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("random", rng)


class TestRecent(SelectionKit):
    """recent."""

    def make_selection(self, rng: np.random.Generator) -> Selection:
        return make_selection("recent", rng)


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_registered_selection_has_a_kit(name: str) -> None:
    """A selection that a flag can name is checked above."""
    kits = SelectionKit.__subclasses__()
    rng = np.random.default_rng(0)
    assert name in {kit().make_selection(rng).name for kit in kits}


def test_an_unknown_name_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match="pyramidkv"):
        make_selection("h3o", np.random.default_rng(0))
