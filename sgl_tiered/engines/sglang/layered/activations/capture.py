"""Takes the input of each layer's projection, for the pages that are kept as it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_tiered.engines.sglang.layered.activations.projections import (
    LayerProjections,
    projected_modules,
)
from sgl_tiered.errors import EngineCompatibilityError

if TYPE_CHECKING:
    from sgl_tiered.engines.sglang.layered.driver import LayerDriver

__all__ = ["hook_captures", "hook_weights", "rows_of_pages"]


def hook_captures(
    projections: LayerProjections, area: torch.Tensor, driver: LayerDriver
) -> None:
    """Let every forward write the rows of its act pages to the act area.

    Args:
        projections: of all layers.
        area: ``[num_acts + 1, page_tokens, hidden]``.
        driver: of the pool; says which rows of a forward are of which page.
    """
    rows = area.view(-1, area.shape[2])

    def make(layer: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def capture(_: Any, args: tuple[Any, ...]) -> None:
            wanted = driver.acts_for_write(layer)
            if wanted is None:
                return
            source, target = wanted
            inputs = args[0]
            if driver.has_rows_behind:
                inputs = inputs[: driver.num_write_rows]
            if inputs.shape != (driver.num_write_rows, rows.shape[1]):
                raise EngineCompatibilityError(
                    f"layer {layer} projects {list(inputs.shape)}, and the forward "
                    f"writes {driver.num_write_rows} tokens; leave "
                    "--tiered-activations out."
                )
            rows[target] = inputs if source is None else inputs[source]

        return capture

    for layer in range(len(projections)):
        projections.module(layer).register_forward_pre_hook(make(layer))


def hook_weights(model: torch.nn.Module, driver: LayerDriver) -> None:
    """Let each layer begin once its emulated weights have come.

    Args:
        model: SGLang's.
        driver: of the pool.

    Raises:
        EngineCompatibilityError: where a layer begins is not known.
    """
    modules = projected_modules(model)
    if len(modules) != driver.plan.layout.num_layers:
        raise EngineCompatibilityError(
            f"--tiered-emulate-weights does not know the layers of "
            f"{type(model).__name__}; leave it out."
        )

    def make(layer: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def begin(_: Any, args: tuple[Any, ...]) -> None:
            del args
            driver.wait_weights(layer)

        return begin

    for layer, module in enumerate(modules):
        module.register_forward_pre_hook(make(layer))


def rows_of_pages(
    places: npt.NDArray[np.int32],
    index: torch.Tensor,
    offsets: torch.Tensor,
    page_tokens: int,
) -> tuple[torch.Tensor | None, torch.Tensor] | None:
    """Return which rows of a forward go to which rows of the act area.

    Args:
        places: int32 [num_pages], of each page in the area, -1 for none.
        index: int64 [num_rows], each row's page.
        offsets: int64 [num_rows], where in it.
        page_tokens: tokens of a page.

    Returns:
        The rows, None for all of them, and where they go; None if none goes anywhere.
    """
    here = places >= 0
    if not here.any():
        return None
    starts = torch.from_numpy(places.astype(np.int64) * page_tokens)
    target = starts[index] + offsets
    if here.all():
        return None, target
    source = torch.from_numpy(here)[index].nonzero()[:, 0]
    return source, target[source]
