"""Per-layer keep ratios: the most compression inside a quality budget.

The model of quality is lost attention. In layer l, keeping the share x of a prefix's
tokens that received most attention keeps the share held_l(x) of what long-range queries
read there; the rest is lost to them:

    loss(r) = sum_l w_l (1 - held_l(r_l)) / sum_l w_l

with w_l, the weight of a layer, as how much of its attention is long-range at all.
Where a layer is sparse (CaR, Figure 4: most entries are below 1 % of their row's
maximum), held_l rises steeply and flattens early, and few tokens do.

Both problems, the fewest tokens for a given loss and the least loss for given tokens,
have the same solutions: all layers keep tokens down to the same marginal loss (water
filling). Taking the pieces of the curves in the order of their slopes is exact where
curves are concave, as those of the most read tokens are; others are made so (their
hull).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_tiered.policies.sparsity.profile import (
    FRACTIONS,
    SparsityProfile,
    held_curve,
)

__all__ = [
    "HeldCurves",
    "lost_share",
    "ratios_for_quality",
    "ratios_for_tokens",
]

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class HeldCurves:
    """How the layers of a model hold their long-range attention.

    Attributes:
        shares: shares of a prefix's tokens, those that received most first; ascending
            in (0, 1]; float [num_points].
        held: share of the long-range mass that they hold; float [num_layers,
            num_points], in [0, 1]. All tokens hold all of it, whether or not 1.0 is
            among the shares.
        weights: what a layer's lost mass counts; positive float [num_layers].

    Raises:
        ValueError: a shape or a range is wrong.
    """

    shares: Floats
    held: Floats
    weights: Floats

    def __post_init__(self) -> None:
        if self.held.ndim != 2 or self.held.shape[1:] != self.shares.shape:
            raise ValueError(f"held {self.held.shape} for shares {self.shares.shape}")
        if self.weights.shape != self.held.shape[:1]:
            raise ValueError(
                f"weights {self.weights.shape} for {len(self.held)} layers"
            )
        edges = np.concatenate([[0.0], self.shares])
        if not (np.diff(edges) > 0.0).all() or edges[-1] > 1.0:
            raise ValueError("shares do not ascend in (0, 1]")
        if not ((self.held >= 0.0) & (self.held <= 1.0 + 1e-6)).all():
            raise ValueError("a held share is outside [0, 1]")
        if not ((self.weights > 0.0) & np.isfinite(self.weights)).all():
            raise ValueError("a layer's weight is not positive")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.held)

    @staticmethod
    def of_profile(profile: SparsityProfile) -> HeldCurves:
        """Return the curves to plan with.

        Tokens are chosen by what was read before, so ``held_later`` where it was
        measured; a layer weighs as much as it can lose at all.
        """
        held = profile.held_later
        if held is None:
            held = profile.held_by_top
        weights = profile.long_share
        if weights is None:
            weights = np.ones(len(held))
        return HeldCurves(
            profile.fractions,
            np.clip(held, 0.0, 1.0),
            # A layer that reads nothing from afar still gets tokens, last of all.
            np.maximum(weights, 1e-6),
        )

    @staticmethod
    def of_importance(
        importance: Floats,
        weights: Floats | None = None,
        shares: npt.ArrayLike = FRACTIONS,
    ) -> HeldCurves:
        """Return the curves of one prefix.

        Args:
            importance: of each token, not negative; [num_layers, num_tokens].
            weights: of the layers; equal unless given.
            shares: where to read the curves.
        """
        held = np.stack([held_curve(row, row, shares) for row in importance])
        whole = importance.sum(axis=1, keepdims=True, dtype=np.float64)
        if weights is None:
            weights = np.ones(len(held))
        held = np.minimum(held / np.maximum(whole, 1e-300), 1.0)
        return HeldCurves(np.asarray(shares, np.float64), held, weights)


def lost_share(curves: HeldCurves, ratios: Floats) -> float:
    """Return the predicted loss, in [0, 1], of keeping ``ratios`` [num_layers]."""
    lost = [
        1.0 - float(np.interp(ratio, *_hull(*edges)))
        for ratio, edges in zip(ratios, _edges(curves), strict=True)
    ]
    return float(np.average(lost, weights=curves.weights))


def ratios_for_tokens(
    curves: HeldCurves, keep_share: float, floor: float = 0.0
) -> npt.NDArray[np.float64]:
    """Return the ratios of least loss whose mean is ``keep_share``.

    Args:
        curves: of the model.
        keep_share: tokens to keep over all layers, in [0, 1]; the share of the bytes.
        floor: every layer keeps this share at least (what is always kept), even if
            that is more.
    """
    ratios = np.full(curves.num_layers, min(max(floor, 0.0), 1.0))
    left = keep_share * curves.num_layers - float(ratios.sum())
    for piece in _pieces(curves, float(ratios[0])):
        if left <= 0.0:
            break
        taken = min(piece.width, left)
        ratios[piece.layer] += taken
        left -= taken
    # Sums of widths may pass 1 by a rounding.
    return ratios.clip(0.0, 1.0)


def ratios_for_quality(
    curves: HeldCurves, max_lost_share: float, floor: float = 0.0
) -> npt.NDArray[np.float64]:
    """Return the ratios of smallest mean whose predicted loss is in the budget.

    Args:
        curves: of the model.
        max_lost_share: the quality budget: share of the weighted long-range mass that
            may be lost, in [0, 1].
        floor: every layer keeps this share at least.
    """
    ratios = np.full(curves.num_layers, min(max(floor, 0.0), 1.0))
    excess = lost_share(curves, ratios) - max_lost_share
    for piece in _pieces(curves, float(ratios[0])):
        if excess <= 0.0 or piece.slope <= 0.0:
            break
        taken = min(piece.width, excess / piece.slope)
        ratios[piece.layer] += taken
        excess -= taken * piece.slope
    # Sums of widths may pass 1 by a rounding.
    return ratios.clip(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A straight piece of a layer's curve: what a unit of its tokens wins."""

    slope: float
    layer: int
    width: float


def _pieces(curves: HeldCurves, floor: float) -> list[_Piece]:
    """Return the pieces above ``floor``, steepest first, those of a layer in order."""
    weights = curves.weights / curves.weights.sum()
    pieces = []
    for layer, edges in enumerate(_edges(curves)):
        x, held = _hull(*edges)
        slopes = weights[layer] * np.diff(held) / np.diff(x)
        widths = x[1:] - np.maximum(x[:-1], floor)
        pieces += [
            _Piece(float(slope), layer, float(width))
            for slope, width in zip(slopes, widths, strict=True)
            if width > 0.0
        ]
    # Stable, and a hull's slopes fall: a layer's pieces stay in order.
    return sorted(pieces, key=lambda piece: -piece.slope)


def _edges(curves: HeldCurves) -> list[tuple[Floats, Floats]]:
    """Return per layer the curve's points with its two ends."""
    begin = np.concatenate([[0.0], curves.shares])
    x = begin if begin[-1] >= 1.0 else np.concatenate([begin, [1.0]])
    found = []
    for row in curves.held:
        held = np.concatenate([[0.0], row, [1.0]])[: len(x)]
        held[-1] = 1.0
        found.append((x, held))
    return found


def _hull(x: Floats, held: Floats) -> tuple[Floats, Floats]:
    """Return the corners of the smallest concave curve above the points."""
    corners: list[int] = []
    for place in range(len(x)):
        while len(corners) >= 2:
            first, second = corners[-2:]
            rise = (held[second] - held[first]) * (x[place] - x[first])
            if rise > (held[place] - held[first]) * (x[second] - x[first]):
                break
            corners.pop()
        corners.append(place)
    return x[corners], held[corners]
