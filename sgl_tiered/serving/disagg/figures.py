"""What a prefill instance tells of itself with each transfer.

By which weights it computes: KV of others is not kept as that of those here. And for
returns to it, who it is in the pool, what computing and loading cost there, and what
the link to it takes. A message that cannot be read is of KV that is nobody's, to whose
sender nothing goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import (
    CachingFit,
    FitQuality,
    LocationFit,
    read_calibration,
)
from sgl_tiered.cost.context_caching import ContextCaching

__all__ = ["PrefillFigures", "PrefillTold", "figures_of", "read_told", "teller"]

_NOT_TOLD = FitQuality(0, 0.0, 0.0, 0.0)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding ends with; the last two for half text, and values nested too deeply."""
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1.0, 1e15
Cost = Annotated[float, msgspec.Meta(ge=0.0, lt=1e6)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Speed = Annotated[float, msgspec.Meta(ge=_LEAST_BYTES_PER_S, le=_MOST_BYTES_PER_S)]
Name = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class PrefillFigures(msgspec.Struct, array_like=True, frozen=True):
    """What a return to a prefill instance is decided by.

    Attributes:
        instance, incarnation: of the pool.
        message_s, pass_s, request_s, token_s, pair_s, context_token_s: as of
            ``CachingFit``.
        host_request_s, host_token_s, host_page_s, host_overlaps: of KV in the host
            tier, as of ``LocationFit``.
        chunk_tokens: most new tokens of a pass; 0 for no limit.
        is_fitted: they are those of a calibration file.
        bytes_per_s: of the link between the two.
    """

    instance: Count
    incarnation: Count
    message_s: Cost
    pass_s: Cost
    request_s: Cost
    token_s: Cost
    pair_s: Cost
    context_token_s: Cost
    host_request_s: Cost
    host_token_s: Cost
    host_page_s: Cost
    host_overlaps: bool
    chunk_tokens: Count
    is_fitted: bool
    bytes_per_s: Speed

    @property
    def place(self) -> tuple[int, int]:
        """Instance and incarnation."""
        return self.instance, self.incarnation

    def model(self, page_tokens: int, num_layers: int) -> ContextCaching:
        """Return the cost model of the instance that has told this.

        Args:
            page_tokens, num_layers: the same on both sides.
        """
        host = LocationFit(
            TierId.HOST.label,
            self.host_request_s,
            self.host_token_s,
            self.host_page_s,
            self.host_overlaps,
            _NOT_TOLD,
        )
        fit = CachingFit(
            self.message_s,
            self.pass_s,
            self.request_s,
            self.token_s,
            self.pair_s,
            self.context_token_s,
            (host,),
            _NOT_TOLD,
        )
        return ContextCaching(fit, page_tokens, num_layers, self.chunk_tokens or None)


class PrefillTold(msgspec.Struct, array_like=True, frozen=True):
    """One message.

    Attributes:
        weights, epoch: as ``WeightsIdentity.told`` gives them.
        figures: None where nothing is to go back.
    """

    weights: Name
    epoch: Name
    figures: PrefillFigures | None


def figures_of(
    model: ContextCaching,
    place: tuple[int, int],
    bytes_per_s: float,
    *,
    is_fitted: bool,
) -> PrefillFigures | None:
    """Return what to tell; None where the model does not know the host tier.

    Args:
        model: of this instance.
        place: instance and incarnation.
        bytes_per_s: of the link.
        is_fitted: the model is that of a calibration file.
    """
    fit = model.fit
    host = next((p for p in fit.locations if p.location == TierId.HOST.label), None)
    if host is None:
        return None
    return PrefillFigures(
        *place,
        fit.message_s,
        fit.pass_s,
        fit.request_s,
        fit.token_s,
        fit.pair_s,
        fit.context_token_s,
        host.request_s,
        host.token_s,
        host.page_s,
        host.overlaps,
        model.chunk_tokens or 0,
        is_fitted,
        min(max(bytes_per_s, _LEAST_BYTES_PER_S), _MOST_BYTES_PER_S),
    )


def read_told(told: bytes) -> PrefillTold:
    """Return what a message says."""
    try:
        return msgspec.msgpack.decode(told, type=PrefillTold)
    except _UNREADABLE:
        return PrefillTold("", "", None)


def teller(
    runtime: Any, place: Callable[[], tuple[int, int]]
) -> Callable[[float], PrefillFigures | None]:
    """Return what gives the figures of a prefill server, given its link's bytes/s.

    With a calibration file whose context-caching model knows the host tier, by that;
    else by the planner's figures as they are at the moment.

    Args:
        runtime: of the server, with tiers.
        place: says who it is in the pool.
    """
    parts = runtime.parts
    path: Path | None = parts.config.loads.calibration
    calibration = None if path is None else read_calibration(path)
    fitted = None if calibration is None else ContextCaching.calibrated(calibration)
    if fitted is not None and TierId.HOST not in fitted.places:
        fitted = None
    layout = parts.device.layout

    def tell(bytes_per_s: float) -> PrefillFigures | None:
        model = fitted or ContextCaching.of_costs(
            parts.cost,
            token_bytes=layout.page_bytes // layout.page_tokens,
            page_tokens=layout.page_tokens,
            num_layers=layout.num_layers,
            overlaps=bool(parts.cache.config.load_overlaps),
        )
        return figures_of(model, place(), bytes_per_s, is_fitted=fitted is not None)

    return tell
