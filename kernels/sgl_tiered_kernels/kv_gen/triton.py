"""The rebuild as one Triton program: product, bias, rotation and scatter.

A program owns a block of tokens and a block of pairs of columns, of K or of V. The two
numbers that a rotation mixes are columns of one pair, wherever they lie in the head, so
K is rotated in registers before it is written. Sums are float32; the sum is rounded to
the model's type before it is rotated in float32, as a linear layer and SGLang's CUDA
rotary kernel do one after the other.

The function takes checked arguments; see the entry in ``__init__.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sgl_tiered_kernels.kv_gen.projection import KVProjection

__all__ = ["TILES", "Tile", "rebuild_kv"]


class Tile(NamedTuple):
    """What a program computes, and how.

    Attributes:
        tokens, pairs: of the block of K or V; a pair is two columns.
        depth_bytes: of the inner dimension, at a time.
        num_warps: that compute it.
        num_stages: blocks of the inner dimension in shared memory.
    """

    tokens: int = 64
    pairs: int = 64
    depth_bytes: int = 128
    num_warps: int = 4
    num_stages: int = 3


TILES = {
    "64x64": Tile(),
    "64x64_4_stages": Tile(num_stages=4),
    "128x64": Tile(tokens=128, num_warps=8),
    "128x64_4_stages": Tile(tokens=128, num_warps=8, num_stages=4),
}
"""Candidates for 16-bit types, by name; the first is what the product takes. Which one
is best on a GPU is not known yet: ``benchmarks/gpu`` measures. (128 pairs spill.)"""
_WIDE = Tile(depth_bytes=64, num_warps=8)
"""Of float32, whose products no tensor core makes exactly: more of it at a time takes
more registers than there are."""


@triton.jit
def _columns(  # type: ignore[no-untyped-def]  # noqa: ANN202
    pair,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,  # noqa: N803
    ROTARY_DIM: tl.constexpr,  # noqa: N803
    NEOX: tl.constexpr,  # noqa: N803
):
    """Return the two columns of a head's pairs; without rotation any will do."""
    one = 2 * pair
    other = one + 1
    if NEOX:
        # Pairs of the rest of the head, which stays as it is, lie behind it.
        rest = pair + ROTARY_DIM // 2
        turned = pair < ROTARY_DIM // 2
        one = tl.where(turned, pair, rest)
        other = tl.where(turned, rest, rest + (HEAD_DIM - ROTARY_DIM) // 2)
    return one, other


# What varies from call to call, so that a layer has one program.
@triton.jit(do_not_specialize=["rows", "positions", "slots", "num_tokens"])
def _rebuild_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    acts,  # noqa: ANN001
    rows,  # noqa: ANN001
    weight,  # noqa: ANN001
    bias,  # noqa: ANN001
    cos_sin,  # noqa: ANN001
    positions,  # noqa: ANN001
    k_out,  # noqa: ANN001
    v_out,  # noqa: ANN001
    slots,  # noqa: ANN001
    num_tokens,  # noqa: ANN001
    num_pairs,  # noqa: ANN001
    hidden,  # noqa: ANN001
    act_row,  # noqa: ANN001
    k_slot,  # noqa: ANN001
    k_head,  # noqa: ANN001
    v_slot,  # noqa: ANN001
    v_head,  # noqa: ANN001
    HEAD_DIM: tl.constexpr,  # noqa: N803
    ROTARY_DIM: tl.constexpr,  # noqa: N803
    NEOX: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    WIDEN: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
):
    is_value = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    real = token < num_tokens
    flat_pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = flat_pair < num_pairs
    head = flat_pair // (HEAD_DIM // 2)
    wide_head = head.to(tl.int64)
    pair = flat_pair % (HEAD_DIM // 2)
    one, other = _columns(pair, HEAD_DIM, ROTARY_DIM, NEOX)

    first = is_value * 2 * num_pairs + head * HEAD_DIM
    one_at = weight + (first + one).to(tl.int64) * hidden
    other_at = weight + (first + other).to(tl.int64) * hidden
    act_at = acts + tl.load(rows + token, mask=real, other=0).to(tl.int64) * act_row
    ones = tl.zeros([TOKENS, PAIRS], tl.float32)
    others = tl.zeros([TOKENS, PAIRS], tl.float32)
    for begin in range(0, hidden, DEPTH):
        depth = begin + tl.arange(0, DEPTH)
        here = depth < hidden
        x = tl.load(
            act_at[:, None] + depth[None, :],
            mask=real[:, None] & here[None, :],
            other=0.0,
        )
        mask = inside[None, :] & here[:, None]
        to_one = tl.load(one_at[None, :] + depth[:, None], mask=mask, other=0.0)
        to_other = tl.load(other_at[None, :] + depth[:, None], mask=mask, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            to_one = to_one.to(tl.float32)
            to_other = to_other.to(tl.float32)
        ones = tl.dot(x, to_one, ones, input_precision="ieee")
        others = tl.dot(x, to_other, others, input_precision="ieee")
    if HAS_BIAS:
        add = tl.load(bias + first + one, mask=inside, other=0.0)
        ones += add.to(tl.float32)[None, :]
        add = tl.load(bias + first + other, mask=inside, other=0.0)
        others += add.to(tl.float32)[None, :]

    slot = tl.load(slots + token, mask=real, other=0).to(tl.int64)
    mask = real[:, None] & inside[None, :]
    if is_value != 0:
        at = v_out + slot[:, None] * v_slot + (wide_head * v_head)[None, :]
        tl.store(at + one[None, :], ones.to(v_out.dtype.element_ty), mask=mask)
        tl.store(at + other[None, :], others.to(v_out.dtype.element_ty), mask=mask)
    else:
        if ROTARY_DIM > 0:
            # Rounded first, as the model's own projection was.
            x_one = ones.to(k_out.dtype.element_ty).to(tl.float32)
            x_other = others.to(k_out.dtype.element_ty).to(tl.float32)
            turned = mask & (pair < ROTARY_DIM // 2)[None, :]
            position = tl.load(positions + token, mask=real, other=0).to(tl.int64)
            cos_at = cos_sin + (position * ROTARY_DIM)[:, None] + pair[None, :]
            cos = tl.load(cos_at, mask=turned, other=1.0).to(tl.float32)
            sin_at = cos_at + ROTARY_DIM // 2
            sin = tl.load(sin_at, mask=turned, other=0.0).to(tl.float32)
            # Chosen, not multiplied by 1 and 0: what is left alone may be infinite.
            ones = tl.where(turned, x_one * cos - x_other * sin, x_one)
            others = tl.where(turned, x_other * cos + x_one * sin, x_other)
        at = k_out + slot[:, None] * k_slot + (wide_head * k_head)[None, :]
        tl.store(at + one[None, :], ones.to(k_out.dtype.element_ty), mask=mask)
        tl.store(at + other[None, :], others.to(k_out.dtype.element_ty), mask=mask)


def rebuild_kv(
    acts: torch.Tensor,
    rows: torch.Tensor,
    projection: KVProjection,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    tile: Tile | None = None,
) -> None:
    """Write K and V of the tokens into their slots; with the first of TILES if None."""
    if tile is None:
        tile = _WIDE if acts.dtype is torch.float32 else TILES["64x64"]
    rotary = projection.rotary
    num_pairs = projection.width // 2
    # Tokens first: programs that follow each other then share their part of the
    # weights, and all the activations are read again from the cache.
    grid = (
        triton.cdiv(rows.numel(), tile.tokens),
        triton.cdiv(num_pairs, tile.pairs),
        2,
    )
    _rebuild_kernel[grid](
        acts,
        rows,
        projection.weight,
        acts if projection.bias is None else projection.bias,
        acts if rotary is None else rotary.cos_sin,
        rows if positions is None else positions,
        k_out,
        v_out,
        slots,
        rows.numel(),
        num_pairs,
        projection.hidden,
        acts.stride(0),
        k_out.stride(0),
        k_out.stride(1),
        v_out.stride(0),
        v_out.stride(1),
        HEAD_DIM=projection.head_dim,
        ROTARY_DIM=0 if rotary is None else rotary.rotary_dim,
        NEOX=rotary is None or rotary.neox,
        HAS_BIAS=projection.bias is not None,
        # Triton's interpreter multiplies bfloat16 as if it were integers.
        WIDEN=not acts.is_cuda,
        TOKENS=tile.tokens,
        PAIRS=tile.pairs,
        DEPTH=tile.depth_bytes // acts.element_size(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
