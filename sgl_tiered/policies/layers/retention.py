"""How many layers of a prompt stay on the device, and which: LayerKV's Eq. 3 and 4.

Source: LayerKV (papers: layerkv), sections 3.1.1 and 3.1.2. Of L layers x are retained,
the other L - x go to host memory while the prompt is computed. With T_prefill the time
of the prefill (Eq. 3) and

    T_offload = beta * tokens * (L - x) * layer_token_bytes / bandwidth             (4)

x is the least that has T_offload <= T_prefill. Both times come from the planner's
calibrated costs, not from data sheets: Eq. 3's alpha and Eq. 4's beta are in them. A
long prompt computes longer than it copies, so its x is 0.

x is what must stay, not what may: ``retained_in_room`` keeps as much as fits.

The layers that stay are spread evenly, the last one among them (of 8 layers 4: 1, 3, 5
and 7), so that the copies of an offloaded layer have the computation of the layers
around it to hide under, and the layer computed last has no copy to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BUFFER_LAYERS",
    "layer_offload_s",
    "least_retained",
    "prefill_layer_pages",
    "regained",
    "retained_in_room",
    "retained_layers",
    "thinned",
]

BUFFER_LAYERS = 2
"""Of a prompt that is computed: one layer is written while the one before is copied."""


def layer_offload_s(
    num_tokens: int, layer_token_bytes: float, bytes_per_s: float, beta: float = 1.0
) -> float:
    """Return the seconds that one layer of so many tokens takes to the host (Eq. 4).

    Args:
        num_tokens: of the prompt.
        layer_token_bytes: keys and values of a token in one layer, of this rank.
        bytes_per_s: of the link, one direction.
        beta: real time over that; 1 where the bandwidth was measured.
    """
    return beta * num_tokens * layer_token_bytes / bytes_per_s


def least_retained(num_layers: int, offload_s: float, prefill_s: float) -> int:
    """Return x: the layers that must stay for the copies of the rest to be hidden.

    Args:
        num_layers: L, of the model.
        offload_s: of one layer, as ``layer_offload_s`` returns it; 0 or more.
        prefill_s: T_prefill of the prompt (Eq. 3).

    Returns:
        0 to ``num_layers``; never more for a longer prefill or a faster link.
    """
    if offload_s * num_layers <= prefill_s:
        return 0
    return max(num_layers - int(prefill_s / offload_s), 0)


def retained_layers(num_layers: int, num_retained: int) -> tuple[int, ...]:
    """Return which layers stay, ascending: evenly spread, the last one among them."""
    return thinned(range(num_layers), num_retained)


def thinned(layers: Sequence[int], num_kept: int) -> tuple[int, ...]:
    """Return ``num_kept`` of some layers, evenly spread over them, the last included.

    Args:
        layers: ascending.
        num_kept: 0 or more; all of them where there are no more.
    """
    num = len(layers)
    if num_kept >= num:
        return tuple(layers)
    return tuple(layers[(n + 1) * num // num_kept - 1] for n in range(num_kept))


def regained(
    num_layers: int, retained: Sequence[int], num_more: int
) -> tuple[int, ...]:
    """Return which layers to pull back next: each halves the longest run on the host.

    Args:
        num_layers: of the model.
        retained: layers on the device, ascending.
        num_more: layers wanted; fewer are returned where fewer are away.

    Returns:
        In the order in which they are worth it; the first of several equal runs first.
    """
    held = set(retained)
    chosen: list[int] = []
    while len(chosen) < num_more and len(held) < num_layers:
        start, length = _longest_run(num_layers, held)
        # The upper middle: its copies have the longer part of the run to come under.
        layer = start + length // 2
        chosen.append(layer)
        held.add(layer)
    return tuple(chosen)


def retained_in_room(
    num_layers: int, least: int, num_pages: int, room_layer_pages: int
) -> int:
    """Return how many layers of a prompt to keep where there is room: all that fit.

    Args:
        num_layers: of the model.
        least: x, as ``least_retained`` returned it.
        num_pages: of the prompt, in one layer.
        room_layer_pages: on the device, layer-pages that nobody else will want soon.

    Returns:
        ``least`` to ``num_layers``. That ``least`` itself fits is not checked.
    """
    fits = num_layers if num_pages <= 0 else max(room_layer_pages, 0) // num_pages
    return max(min(fits, num_layers), least)


def prefill_layer_pages(num_layers: int, num_retained: int, num_pages: int) -> int:
    """Return the layer-pages that computing a prompt takes on the device at a time.

    Its retained layers, and for the others the pages in which they are written before
    and while they are copied.
    """
    buffers = min(num_layers - num_retained, BUFFER_LAYERS)
    return (num_retained + buffers) * num_pages


def _longest_run(num_layers: int, held: set[int]) -> tuple[int, int]:
    """Return the first and the number of layers of the longest run that is away."""
    best_start, best, length = 0, 0, 0
    for layer in range(num_layers):
        length = 0 if layer in held else length + 1
        if length > best:
            best_start, best = layer - length + 1, length
    return best_start, best
