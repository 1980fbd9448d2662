"""Bandwidth of layers up and of whole pages down, by size of a piece and by way.

A piece is the keys (or values) of one page in one layer. Beside each figure stands that
of one plain copy of as many bytes from pinned memory, which is the roof.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from movement.place import Place, Shape, Store

__all__ = ["LAYERS", "measure_copies"]

LAYERS = 2


def measure_copies(
    place: Place, piece_sizes: list[int], num_bytes: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield one record per size, way and direction; bytes are compared first.

    Where there are several ways of a load, one more record per size says which of them
    the product would choose, by measuring as it does when a server starts.

    Args:
        place: where.
        piece_sizes: bytes of a piece; multiples of 256.
        num_bytes: of keys and values of a layer, about; two layers are moved.
        repeats: runs per record.

    Raises:
        AssertionError: a copy put wrong bytes somewhere; nothing is reported then.
    """
    for size in piece_sizes:
        count = max(num_bytes // (2 * size), 1)
        # A token of 256 bytes, so that the size of a page is the size of a piece.
        shape = Shape(LAYERS, 1, 128, size // 256, count + count // 2 + 1)
        for way in place.ways:
            store = Store(place, shape, way, count)
            try:
                yield from _both_directions(place, store, way, repeats)
            finally:
                store.close()
        if len(place.ways) > 1:
            store = Store(place, shape, place.ways[0], count)
            try:
                store.pool.tune(store.region, store.rows, store.pages)
                yield {
                    "kind": "chosen",
                    "piece_bytes": size,
                    "way": store.pool.way.value,
                }
            finally:
                store.close()


def _both_directions(
    place: Place, store: Store, way: str, repeats: int
) -> Iterator[dict[str, Any]]:
    num_bytes = LAYERS * len(store.rows) * store.layout.layer_page_bytes
    loads = [_load(store) for _ in range(repeats + 1)][1:]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(store.layer(layer), store.wanted(layer))
    facts = {
        "kind": "copy",
        "way": way,
        **store.facts(),
        "pieces": 2 * LAYERS * len(store.rows),
        "num_bytes": num_bytes,
    }
    yield {
        **facts,
        "direction": "up",
        "seconds": [device_s for device_s, _ in loads],
        "queueing_s": [host_s for _, host_s in loads],
        "plain_s": _plain(place, num_bytes, repeats, up=True),
    }
    stores = [_store(store) for _ in range(repeats + 1)][1:]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(store.layer(layer), store.wanted(layer))
    yield {
        **facts,
        "direction": "down",
        "seconds": stores,
        "plain_s": _plain(place, num_bytes, repeats, up=False),
    }


def _load(store: Store) -> tuple[float, float]:
    """Return the seconds of copies of all layers, and of the thread that queued them.

    All, since one way brings several layers at once.
    """
    device_s = host_s = 0.0
    for layer in range(LAYERS):
        began = time.perf_counter()
        arrival = store.pool.load_layer(
            layer, store.region, store.rows, store.pages, after=store.pool.mark()
        )
        queued_s = time.perf_counter() - began
        device_s += queued_s if arrival is None else arrival.finish()
        host_s += queued_s
    return device_s, host_s


def _store(store: Store) -> float:
    store.region[:] = 0
    mark = store.pool.mark()
    began = time.perf_counter()
    store.pool.store_pages(store.region, store.rows, store.pages, mark)
    return time.perf_counter() - began


def _plain(place: Place, num_bytes: int, repeats: int, *, up: bool) -> list[float]:
    """Return the seconds of one copy in a piece, by the wall clock."""
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=place.is_cuda)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=place.device)
    to, frm = (there, host) if up else (host, there)
    seconds = []
    for _ in range(repeats + 1):
        place.synchronize()
        began = time.perf_counter()
        to.copy_(frm, non_blocking=True)
        place.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
