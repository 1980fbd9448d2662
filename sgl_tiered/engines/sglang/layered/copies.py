"""What copies the layers of a pool, by the kind of its device."""

from __future__ import annotations

from typing import Any

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.layer_copier import CpuLayerCopier
from sgl_tiered.engines.sglang.layered.device_pool import (
    ActBytes,
    LayerCopies,
    LayeredDevicePool,
)
from sgl_tiered.errors import EngineCompatibilityError
from sgl_tiered.layered.base import ActCopier

__all__ = ["layer_copies"]


def layer_copies(
    pool: Any,
    layout: PageLayout,
    forward_stream: Any,
    *,
    guarded: bool = False,
    breaks_staging: bool = False,
) -> LayerCopies:
    """Return the copies that fit where the tensor of a `LayeredPool` is.

    Of activations too, where it has an act area.

    Args:
        pool: a `LayeredPool`.
        layout: shape of a page.
        forward_stream: on which SGLang's overlap scheduler runs the model; or None.
        guarded: a guard is asked before each copy.
        breaks_staging: for tests: stream wrongly.

    Raises:
        EngineCompatibilityError: it is on a device that we do not know, or SGLang
            reads it by an attention backend that knows nothing of layers.
    """
    if not hasattr(pool, "write_slots"):
        device = pool.k_buffer[0].device.type
        if device != "cpu":
            raise EngineCompatibilityError(
                f"--tiered-layerkv does not work on {device!r} devices; leave it out."
            )
        copier = CpuLayerCopier(pool, layout, breaks_staging=breaks_staging)
        acts = ActBytes.of_pool(pool)
        return LayerCopies(
            copier,
            lambda driver: LayeredDevicePool(copier, driver, layout, acts),
            lambda: None,
            _act_copier(pool, breaks_staging=breaks_staging),
        )
    # A pool of ``cuda.py``.
    if pool.write_slots is None:
        raise EngineCompatibilityError(
            "--tiered-layerkv is made for FlashInfer on CUDA, and SGLang has built "
            "another attention backend; leave it out for this model."
        )
    from sgl_tiered.engines.sglang.layered.cuda import cuda_copies

    return cuda_copies(
        pool,
        layout,
        forward_stream,
        guarded=guarded,
        breaks_staging=breaks_staging,
    )


def _act_copier(pool: Any, *, breaks_staging: bool) -> ActCopier | None:
    if getattr(pool, "acts", None) is None:
        return None
    from sgl_tiered.engines.sglang.layered.activations.copier import CpuActCopier

    projections = pool.plan.chosen.projections
    return CpuActCopier(pool, projections, breaks_staging=breaks_staging)
