"""The picture of a sparsity profile: CaR's Figure 4, and how few tokens hold mass."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sgl_tiered.policies.sparsity.profile import SparsityProfile

__all__ = ["draw"]

_BLUE, _ORANGE = "#0072b2", "#d55e00"
"""Of Okabe and Ito's palette, told apart by colour-blind readers too."""


def draw(profile: SparsityProfile) -> bytes:
    """Return a PNG file: a layer's shares on the left, its curve on the right."""
    figure = Figure(figsize=(11, 4), dpi=130, layout="constrained")
    # The canvas is made directly: pyplot would keep global state.
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _small(left, profile)
    _held(right, profile)
    figure.suptitle(
        f"{profile.model}: {profile.num_prompts} prompts, {profile.num_tokens} tokens"
    )
    buffer = io.BytesIO()
    # No date or version inside: equal profiles give equal files.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _small(axes: Any, profile: SparsityProfile) -> None:
    layers = np.arange(profile.num_layers)
    for shares in profile.small_share.T:
        axes.plot(layers, 100 * shares, ".", color=_BLUE, alpha=0.35, markersize=5)
    mean = 100 * profile.small_share.mean(axis=1)
    axes.plot(layers, mean, "-o", color=_BLUE, label="below 1 % of the row's maximum")
    if profile.long_share is not None:
        label = f"attention over {profile.local_tokens} tokens or more"
        axes.plot(layers, 100 * profile.long_share, "--", color=_ORANGE, label=label)
    axes.set_xlabel("layer (dots: heads)")
    axes.set_ylabel("share of the visible entries, %")
    axes.set_ylim(0, 100)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="best", fontsize=8)


def _held(axes: Any, profile: SparsityProfile) -> None:
    later = profile.held_later
    curves = profile.held_by_top if later is None else later
    colours = colormaps["viridis"](np.linspace(0, 0.9, profile.num_layers))
    percent = np.concatenate(([0.0], 100 * profile.fractions))
    for layer, (curve, colour) in enumerate(zip(curves, colours, strict=True)):
        # A legend of 80 layers helps nobody: first, middle and last.
        is_named = layer in {0, profile.num_layers // 2, profile.num_layers - 1}
        shares = np.concatenate(([0.0], 100 * curve))
        label = f"layer {layer}" if is_named else None
        axes.plot(percent, shares, color=colour, label=label, linewidth=1.2)
    whose = "all of the prompt" if later is None else "what later text reads"
    axes.set_xlabel("tokens kept, the heaviest first, %")
    axes.set_ylabel(f"long-range mass kept, % ({whose})")
    axes.set_ylim(0, 102)
    axes.legend(loc="lower right", fontsize=8)
