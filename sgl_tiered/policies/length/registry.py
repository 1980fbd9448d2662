"""Names of the length predictors, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.length.base import LengthPredictor
from sgl_tiered.policies.length.constant import ConstantLength
from sgl_tiered.policies.length.llm import LLMLengths
from sgl_tiered.policies.length.online import OnlineLengths
from sgl_tiered.policies.length.oracle import OracleLength

__all__ = ["LENGTH_PREDICTORS", "NO_PREDICTOR", "make_length_predictor"]

NO_PREDICTOR = "none"
"""Nothing is predicted, and nothing is kept of answers."""

_MAKERS: dict[str, Callable[[], LengthPredictor]] = {
    "online": OnlineLengths,
    "oracle": OracleLength,
    "llm": LLMLengths,
}
_CONSTANT = ConstantLength.name + ":"

LENGTH_PREDICTORS: tuple[str, ...] = (NO_PREDICTOR, *_MAKERS, _CONSTANT + "N")


def make_length_predictor(name: str) -> LengthPredictor | None:
    """Return a new predictor; None for ``none``.

    Args:
        name: ``none``, ``online``, ``oracle``, ``llm``, or ``constant:N`` (N tokens).

    Raises:
        ConfigError: no predictor has this name.
    """
    if name == NO_PREDICTOR:
        return None
    maker = _MAKERS.get(name)
    if maker is not None:
        return maker()
    number = name.removeprefix(_CONSTANT)
    if name.startswith(_CONSTANT) and number.isascii() and number.isdigit():
        return ConstantLength(int(number))
    raise ConfigError(
        "length_predictor",
        f"{name!r} is not known",
        f"choose one of {', '.join(LENGTH_PREDICTORS)}",
    )
