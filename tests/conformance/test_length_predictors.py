"""Our own length predictors pass the published kit."""

from __future__ import annotations

import pytest

from sgl_tiered.policies.length.base import LengthPredictor
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.policies.length.llm import LLMLengths
from sgl_tiered.policies.length.online import OnlineLengths
from sgl_tiered.policies.length.oracle import OracleLength
from sgl_tiered.policies.length.registry import (
    LENGTH_PREDICTORS,
    NO_PREDICTOR,
    make_length_predictor,
)
from sgl_tiered.testing.policy_kit import LengthPredictorKit


class TestOnline(LengthPredictorKit):
    """online."""

    def make_predictor(self) -> LengthPredictor:
        return OnlineLengths()


class TestConstant(LengthPredictorKit):
    """constant."""

    def make_predictor(self) -> LengthPredictor:
        return ConstantLength(200)


class TestOracle(LengthPredictorKit):
    """oracle."""

    def make_predictor(self) -> LengthPredictor:
        return OracleLength()


class TestLLM(LengthPredictorKit):
    """llm."""

    def make_predictor(self) -> LengthPredictor:
        return LLMLengths()


@pytest.mark.parametrize("name", LENGTH_PREDICTORS)
def test_every_registered_predictor_has_a_kit(name: str) -> None:
    """A predictor that a flag can name is checked above; ``none`` is none."""
    predictor = make_length_predictor(name.replace(":N", ":9"))
    if name == NO_PREDICTOR:
        assert predictor is None
        return
    assert predictor is not None
    kits = LengthPredictorKit.__subclasses__()
    assert predictor.name in {kit().make_predictor().name for kit in kits}
