"""The rebuild on a CPU: torch's matrix product, then a rotation in place.

Products are ``linear``'s, and K is rotated in its own type with every product and sum
rounded, as SGLang's native rotary embedding does: where the machine's ``linear`` does
not care how many columns it computes, the bits are those of SGLang on a CPU.

The function takes checked arguments; see the entry in ``__init__.py``.
"""

from __future__ import annotations

import torch

from sgl_tiered_kernels.kv_gen.projection import KVProjection, Rotary
from sgl_tiered_kernels.tensors import first_of_run

__all__ = ["rebuild_kv"]

_TILE = 32


def rebuild_kv(
    acts: torch.Tensor,
    rows: torch.Tensor,
    projection: KVProjection,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
) -> None:
    """Write K and V of the tokens into their slots."""
    inputs = _take(acts, rows)
    first = first_of_run(slots)
    if first >= 0:
        run = slice(first, first + slots.numel())
        keys, values = k_out[run], v_out[run]
        _project_into(inputs, projection, 0, keys)
        _project_into(inputs, projection, projection.width, values)
        _rotate(keys, projection.rotary, positions)
        return
    # One product for both: a few per cent faster than two, and slots that lie apart
    # need a second place for its result anyway.
    both = torch.nn.functional.linear(inputs, projection.weight, projection.bias)
    shape = (len(both), 2, projection.num_kv_heads, projection.head_dim)
    keys, values = both.view(shape).unbind(1)
    _rotate(keys, projection.rotary, positions)
    # As fast as a loop of copies; index_copy_ takes up to twice as long.
    k_out[slots] = keys
    v_out[slots] = values


def _take(acts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows; a view where they are consecutive.

    Where a processor has units for bfloat16, oneDNN reads rows by ``_TILE`` numbers,
    and multiplies what stands in the gap behind a row by 0: a NaN makes all NaN.
    """
    first = first_of_run(rows)
    reads_no_gap = acts.shape[1] % _TILE == 0 or acts.stride(0) == acts.shape[1]
    if first >= 0 and reads_no_gap:
        return acts[first : first + rows.numel()]
    return acts.index_select(0, rows)


def _project_into(
    inputs: torch.Tensor, projection: KVProjection, begin: int, out: torch.Tensor
) -> None:
    """Write ``projection.width`` columns from ``begin`` on, by ``linear``'s product."""
    columns = slice(begin, begin + projection.width)
    weight = projection.weight[columns]
    bias = None if projection.bias is None else projection.bias[columns]
    if out.stride(1) != out.shape[2] and out.shape[1] > 1:
        # Heads with gaps between them are no matrix.
        product = torch.nn.functional.linear(inputs, weight, bias)
        out.copy_(product.view(out.shape))
        return
    flat = out.view(out.shape[0], projection.width)
    if bias is None:
        torch.mm(inputs, weight.t(), out=flat)
    else:
        torch.addmm(bias, inputs, weight.t(), out=flat)


def _rotate(
    keys: torch.Tensor, rotary: Rotary | None, positions: torch.Tensor | None
) -> None:
    """Rotate ``[n, num_kv_heads, head_dim]`` in place, if it is to be rotated."""
    if rotary is None:
        return
    assert positions is not None
    table = rotary.cos_sin.index_select(0, positions).to(keys.dtype).unsqueeze(1)
    cos, sin = table.chunk(2, dim=-1)
    turned = keys[..., : rotary.rotary_dim]
    if rotary.neox:
        one, other = turned.chunk(2, dim=-1)
    else:
        one, other = turned[..., ::2], turned[..., 1::2]
    from_one, from_other = one * sin, other * sin
    one.mul_(cos).sub_(from_other)
    other.mul_(cos).add_(from_one)
