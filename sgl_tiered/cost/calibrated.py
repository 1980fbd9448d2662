"""What the planner takes from a calibration file, and which files it refuses."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import Calibration, ModelFacts, read_calibration
from sgl_tiered.cost.decode import DecodeCost
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.cost.rebuild import RebuildCosts
from sgl_tiered.cost.regression import MEASURED
from sgl_tiered.errors import ConfigError

__all__ = [
    "calibrated_decode",
    "calibrated_links",
    "calibrated_prefill",
    "calibrated_rebuild",
    "read_fitting",
]

_COMPARED = (
    "architecture",
    "dtype",
    "kv_dtype",
    "attention_backend",
    "num_layers",
    "attention_width",
    "num_params",
    "kv_bytes_per_token",
    "page_tokens",
)
_LEAST_S = 1e-6
"""A fitted 0 must stay correctable: the online fit refines logarithms."""
_LEAST_TOKEN_S = 1e-12
_LEAST_PAIR_SHARE = 1e-6
"""Of a token's time: 1 % of it at a context of 10,000 tokens."""
_READ_EDGES = {
    TierId.HOST: (TierId.HOST, TierId.DEVICE),
    TierId.CXL: (TierId.CXL, TierId.DEVICE),
    TierId.DISK: (TierId.DISK, TierId.HOST),
}
"""Which edge the planner's cost of a tier is: a page from disk is read into host
memory, and the copy from there to the device runs under the computation."""


def calibrated_prefill(calibration: Calibration) -> PrefillCost | None:
    """Return the cost of recomputing, to be refined online; None if not measured."""
    fit = calibration.prefill
    if fit is None:
        return None
    token_s = max(fit.token_s, _LEAST_TOKEN_S)
    return PrefillCost.from_coefficients(
        max(fit.overhead_s, _LEAST_S),
        token_s,
        max(fit.pair_s, token_s * _LEAST_PAIR_SHARE),
    )


def calibrated_decode(calibration: Calibration) -> DecodeCost | None:
    """Return the cost of a decode step; None if not measured."""
    fit = calibration.decode
    return None if fit is None else DecodeCost.measured(fit)


def calibrated_rebuild(calibration: Calibration) -> RebuildCosts | None:
    """Return T_kv_gen and T_load_kv of a layer; None if not measured."""
    fit = calibration.rebuild
    return None if fit is None else RebuildCosts.measured(fit)


def calibrated_links(
    calibration: Calibration, tiers: Collection[TierId]
) -> dict[TierId, LinkCost]:
    """Return the cost of reading each of these tiers, where it was measured."""
    links = {}
    for tier in tiers:
        edge = _READ_EDGES.get(tier)
        fit = None if edge is None else calibration.link(edge[0].label, edge[1].label)
        if fit is not None:
            links[tier] = LinkCost(
                max(fit.latency_s, _LEAST_S), fit.bytes_per_s, deviation=MEASURED
            )
    return links


def read_fitting(
    setting: str, path: Path | None, served: ModelFacts
) -> Calibration | None:
    """Read a file, and refuse one of another model, page size or type.

    A fact that the file does not know (null or an empty text) is not compared. Names
    and weights are not either: a fine-tuned model costs what its base costs.

    Args:
        setting: the flag that named the file.
        path: the file; None gives None.
        served: what runs here.

    Raises:
        ConfigError: one sentence that names the first difference.
    """
    if path is None:
        return None
    calibration = read_calibration(path)
    for name in _COMPARED:
        measured, here = getattr(calibration.model, name), getattr(served, name)
        if measured in (None, "") or here in (None, ""):
            continue
        if measured != here:
            raise ConfigError(
                setting,
                f"{path} was measured with {name} {measured}, and here it is {here}",
                "measure this server with sgl-tiered calibrate",
            )
    return calibration
