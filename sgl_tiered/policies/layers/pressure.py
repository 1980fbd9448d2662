"""Which layers leave the device when it fills, and what is to be left free of it.

Source: LayerKV (papers: layerkv), section 3.1.1: "When the available GPU KV blocks fall
below the preset threshold, [...] the retained x layers of KV cache will be offloaded to
the CPU. We prioritize offloading the most recently processed requests, starting with
x/2 layers. If this proves insufficient, the full offloading will be executed." So
half of the layers of the most recent request, of the one before, and so on; then, again
from the most recent one, the rest. That is done where room is needed at once, or will
be; whose layers come back, the paper's "free prefetching", says ``allotment.py``.

Available is what Eq. 5 (``forecast.py``) has at the worst of the coming stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LOW_SHARE", "RETURN_SHARE", "LayerChange", "LayersHeld", "Pressure"]

LOW_SHARE = 0.02
"""Of the device's layer-pages; the paper's threshold is not stated. What is kept free
decodes nobody: in the simulator 5 % cost 7 % of the tokens of a device of four prompts,
2 % next to nothing. Layers that are on the host already leave at once."""
RETURN_SHARE = 0.04
"""Twice the lower threshold: what is pulled back does not cause the next offload."""


@dataclass(frozen=True, slots=True)
class LayersHeld:
    """A request's layers on the device.

    Attributes:
        num_held: layers of it that are there.
        num_pages: whole pages of it in one layer, those that can move.
    """

    num_held: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class LayerChange:
    """How many layers of a request are to be on the device.

    Attributes:
        position: of the request in what the policy was shown.
        num_layers: from now on.
    """

    position: int
    num_layers: int


class Pressure:
    """Compares what will be free with two thresholds. Keeps nothing.

    Attributes:
        low, high: the thresholds, in layer-pages.

    Args:
        num_layers: of the model.
        capacity: layer-pages of the device.
        low_share: below this share of them, layers leave.
        return_share: above it, layers come back; not below ``low_share``.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        low_share: float = LOW_SHARE,
        return_share: float = RETURN_SHARE,
    ) -> None:
        assert 0.0 <= low_share <= return_share <= 1.0, (low_share, return_share)
        self._num_layers = num_layers
        self.low = int(low_share * capacity)
        self.high = int(return_share * capacity)

    def shortage(self, avail: int) -> int:
        """Return the layer-pages that must leave: up to the lower threshold.

        Args:
            avail: least of the forecast; may be negative.
        """
        return max(self.low - avail, 0)

    def to_keep(self, avail: int, ahead: int) -> int:
        """Return the layer-pages that a new prompt may keep beyond the least.

        Below 0 where there are none.

        Args:
            avail: free, or as good as.
            ahead: that those who decode will take (``taken_ahead``).
        """
        return avail - ahead - self.low

    def reserve(self, ahead: int, step: int) -> int:
        """Return the layer-pages that nobody's layers are allotted.

        Args:
            ahead: that those who decode will take (``taken_ahead``).
            step: that pages take which begin in the step that comes: who ends within
                the stage has its next page before that.
        """
        return max(ahead, step, 0) + self.low

    def offloads(
        self, held: Sequence[LayersHeld], num_needed: int
    ) -> tuple[LayerChange, ...]:
        """Return what leaves: halves first, then all; the most recent request first.

        Args:
            held: first come first; those that must not move are left out.
            num_needed: layer-pages.

        Returns:
            In the order in which it is to be done, each request once or (half, then
            all) twice; together they free ``num_needed`` or all that there is. No
            change goes further than it has to, to a layer.
        """
        changes: list[LayerChange] = []
        left = [one.num_held for one in held]
        for floor in ([n - n // 2 for n in left], [0] * len(left)):
            for position in reversed(range(len(held))):
                if num_needed <= 0:
                    return tuple(changes)
                num_pages = held[position].num_pages
                can = left[position] - floor[position]
                if can <= 0 or num_pages <= 0:
                    continue
                num = min(can, -(-num_needed // num_pages))
                left[position] -= num
                num_needed -= num * num_pages
                changes.append(LayerChange(position, left[position]))
        return tuple(changes)
