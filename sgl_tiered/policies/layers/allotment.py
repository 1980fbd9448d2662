"""How many layers of each running request the device holds, by their claims.

A request that lacks one layer has to be streamed, or wait, like one that lacks all. So
they are placed whole, in the order of their claims, and what is left after the last
whole one goes to the next in part: that much less of it is streamed (papers: layerkv,
section 3.1, keeps x of L layers for the same reason). Those behind hold nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["allotted_layers"]


def allotted_layers(
    num_layers: int, num_pages: Sequence[int], room_layer_pages: int
) -> tuple[int, ...]:
    """Return the layers that each request is to hold.

    Args:
        num_layers: of the model.
        num_pages: of each request in one layer, those that can move; the best claim
            first.
        room_layer_pages: of the device, for all of them; may be negative.

    Returns:
        As many numbers, 0 to ``num_layers``: ``num_layers`` for some, then at most one
        that is between, then 0. A request without pages takes nothing, and has all.
    """
    left = max(room_layer_pages, 0)
    is_full = False
    allotted = []
    for pages in num_pages:
        if not pages:
            allotted.append(num_layers)
            continue
        num = 0 if is_full else min(num_layers, left // pages)
        is_full = num < num_layers
        left -= num * pages
        allotted.append(num)
    return tuple(allotted)
