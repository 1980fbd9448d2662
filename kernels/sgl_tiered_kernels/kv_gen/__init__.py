"""K and V of tokens again, from the input that their layer's qkv projection had.

An activation (`act`) is the normed input of the projection, one row of ``hidden``
numbers per token and layer. ``rebuild_kv`` multiplies rows by the K and V part of the
weights, rotates K to its positions, and writes both into slots of a KV pool or of a
staging buffer. See README.md here for the maths, the bytes moved and the rounding.

All tensors are on one device, and activations, weights, K and V of one type: float32,
bfloat16 or float16. On a CPU it is plain torch and runs on torch's threads; the CUDA
form is Triton.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_tiered_kernels.kv_gen import cpu
from sgl_tiered_kernels.kv_gen.projection import KVProjection, Rotary
from sgl_tiered_kernels.tensors import check_rows

__all__ = ["KVProjection", "Rotary", "rebuild_kv"]


def rebuild_kv(
    acts: torch.Tensor,
    rows: torch.Tensor,
    projection: KVProjection,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> None:
    """Write K and V of ``n`` tokens into their slots; no other slot is touched.

    Numbers of rows for whole pages come from ``sgl_tiered_kernels.tensors.page_rows``.
    On a CPU nothing is copied on the way where ``rows`` and ``slots`` are consecutive.

    Args:
        acts: ``[num_rows, hidden]``; rows may have gaps between them.
        rows: ``[n]`` int64 or int32, the row of each token.
        projection: The layer's weights and positions.
        k_out: ``[num_slots, num_kv_heads, head_dim]``; slots and heads may have gaps
            between them. It must not overlap ``v_out`` or ``acts``.
        v_out: The same for the values.
        slots: ``[n]`` int64 or int32, where each token goes, each at most once.
        positions: ``[n]`` int64 or int32, the token's position in its text; not read
            where the projection has no rotary positions.

    Raises:
        ValueError: a shape, a type, a device or a number does not fit; nothing is
            written. Numbers of rows, slots and positions on an accelerator are the
            caller's to check.
    """
    count = _check(acts, rows, projection, k_out, v_out, slots)
    rotary = projection.rotary
    if rotary is not None:
        if positions is None:
            raise ValueError("positions are needed: the projection rotates its keys")
        check_rows("positions", positions, count, rotary.cos_sin.shape[0], acts.device)
    if count:
        _form(acts).rebuild_kv(acts, rows, projection, k_out, v_out, slots, positions)


def _form(acts: torch.Tensor) -> Any:
    if acts.is_cuda:
        from sgl_tiered_kernels.kv_gen import triton

        return triton
    return cpu


def _check(
    acts: torch.Tensor,
    rows: torch.Tensor,
    projection: KVProjection,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor,
) -> int:
    """Return the number of tokens."""
    dtype, device = projection.weight.dtype, projection.weight.device
    heads = (projection.num_kv_heads, projection.head_dim)
    if acts.ndim != 2 or acts.shape[1] != projection.hidden:
        raise ValueError(
            f"acts must be [rows, {projection.hidden}], not {list(acts.shape)}"
        )
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        if out.ndim != 3 or tuple(out.shape[1:]) != heads:
            raise ValueError(
                f"{name} must be [slots, {heads[0]}, {heads[1]}], not {list(out.shape)}"
            )
    for name, tensor in (("acts", acts), ("k_out", k_out), ("v_out", v_out)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} as weight, not {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, weight on {device}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have no gaps in its last dimension")
    if k_out.shape != v_out.shape:
        raise ValueError(
            f"k_out has {k_out.shape[0]} slots, and v_out {v_out.shape[0]}"
        )
    count = int(rows.numel())
    check_rows("rows", rows, count, acts.shape[0], device)
    check_rows("slots", slots, count, k_out.shape[0], device)
    return count
