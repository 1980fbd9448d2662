"""HiCache's copies between host and device pool, done by our copy routine.

A host pool is seen as rows of bytes, and so is each layer of the device pool. What one
row is depends on HiCache's layout: a token in ``page_first`` (a token's layers lie side
by side, so a layer of a page is ``page_size`` pieces), a page in ``page_first_direct``
(a layer of a page is one piece, as in ours).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sgl_tiered_kernels import page_copy

__all__ = ["LAYOUTS", "HostRows", "host_rows", "load_layer", "store_layers"]

LAYOUTS = ("page_first", "page_first_direct")

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]


class HostRows:
    """A HiCache host pool and its device pool as rows of bytes.

    Args:
        pool: ``MHATokenToKVPoolHost`` or anything with its buffers and layout.

    Raises:
        ValueError: a layout that this baseline does not copy.
    """

    def __init__(self, pool: Any) -> None:
        if pool.layout not in LAYOUTS:
            raise ValueError(
                f"HiCache layout {pool.layout!r} is not supported on a CPU here; "
                f"use {' or '.join(LAYOUTS)}."
            )
        self.row_tokens = 1 if pool.layout == "page_first" else int(pool.page_size)
        self.host = tuple(
            _rows(buffer, buffer.shape[0]) for buffer in (pool.k_buffer, pool.v_buffer)
        )
        self.device = tuple(
            tuple(_rows(b, b.shape[0] // self.row_tokens) for b in buffers)
            for buffers in (pool.device_k_buffers, pool.device_v_buffers)
        )
        self._last: tuple[torch.Tensor, torch.Tensor, Int64s, Int64s] | None = None

    def pair(self, host: torch.Tensor, device: torch.Tensor) -> tuple[Int64s, Int64s]:
        """Return the rows of two runs of whole pages, given as token indices."""
        return self._one(host), self._one(device)

    def pair_of_load(
        self, host: torch.Tensor, device: torch.Tensor
    ) -> tuple[Int64s, Int64s]:
        """Return ``pair``; the same tensors come once per layer, so keep the last."""
        last = self._last
        if last is None or last[0] is not host or last[1] is not device:
            last = (host, device, *self.pair(host, device))
            self._last = last
        return last[2], last[3]

    def _one(self, indices: torch.Tensor) -> Int64s:
        rows = indices[:: self.row_tokens].numpy() // self.row_tokens
        return np.ascontiguousarray(rows, dtype=np.int64)


def host_rows(pool: Any) -> HostRows:
    """Return the pool's rows, made at its first copy."""
    rows = getattr(pool, "_hicache_cpu_rows", None)
    if rows is None:
        page_copy.prepare()
        rows = pool._hicache_cpu_rows = HostRows(pool)
    return rows


def load_layer(
    pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, layer: int
) -> None:
    """Copy one layer of whole pages from the host pool to the device pool.

    On the thread that runs the model, torch's threads share the copy, as in ours.
    """
    by_team = threading.current_thread() is threading.main_thread()
    rows = host_rows(pool)
    host, device = rows.pair_of_load(host_indices, device_indices)
    for source, targets in zip(rows.host, rows.device, strict=True):
        nbytes = targets[layer].shape[1]
        page_copy.copy_rows(
            targets[layer],
            device,
            0,
            source,
            host,
            layer * nbytes,
            nbytes,
            by_team=by_team,
        )


def store_layers(
    pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor
) -> None:
    """Copy all layers of whole pages from the device pool to the host pool."""
    rows = host_rows(pool)
    host, device = rows.pair(host_indices, device_indices)
    for target, sources in zip(rows.host, rows.device, strict=True):
        for layer, source in enumerate(sources):
            nbytes = source.shape[1]
            page_copy.copy_rows(target, host, layer * nbytes, source, device, 0, nbytes)


def _rows(buffer: torch.Tensor, num_rows: int) -> Bytes:
    if not buffer.is_contiguous():
        raise ValueError("HiCache on a CPU needs contiguous KV buffers here.")
    return buffer.view(torch.uint8).reshape(num_rows, -1).numpy()
