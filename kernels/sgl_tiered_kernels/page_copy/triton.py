"""The page copies between device buffers, one Triton program per row and block.

Tensors are 2-D, contiguous and on one device; a source in pinned host memory that the
device can address works too. Bytes move as 32-bit words where everything is a
multiple of four, else as bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["copy_layer", "copy_rows", "gather_layer"]

# 4 KiB per program: enough loads in flight per block, and a page of a common model
# (8 to 64 KiB per layer) still spreads over several programs.
_BLOCK_WORDS = 1024


@triton.jit
def _copy_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    dst,  # noqa: ANN001
    dst_rows,  # noqa: ANN001
    dst_stride,  # noqa: ANN001
    dst_offset,  # noqa: ANN001
    src,  # noqa: ANN001
    src_rows,  # noqa: ANN001
    src_stride,  # noqa: ANN001
    src_offset,  # noqa: ANN001
    num_words,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_words
    to = tl.load(dst_rows + row) * dst_stride + dst_offset
    frm = tl.load(src_rows + row) * src_stride + src_offset
    words = tl.load(src + frm + column, mask=inside)
    tl.store(dst + to + column, words, mask=inside)


def copy_rows(
    dst: torch.Tensor,
    dst_rows: torch.Tensor,
    dst_offset: int,
    src: torch.Tensor,
    src_rows: torch.Tensor,
    src_offset: int,
    nbytes: int,
) -> None:
    """Copy ``nbytes`` from each source row to the destination row beside it.

    Args:
        dst: ``[rows, row]``.
        dst_rows: ``[n]`` int64 row numbers on the device, each at most once.
        dst_offset: Bytes from the start of a destination row.
        src: ``[rows, row]``.
        src_rows: ``[n]`` int64 row numbers on the device.
        src_offset: Bytes from the start of a source row.
        nbytes: Bytes per row.

    Raises:
        ValueError: if a tensor is not 2-D and contiguous, or a block lies outside its
            row. Row numbers stay on the device and are the caller's to check.
    """
    to, frm = dst.view(torch.uint8), src.view(torch.uint8)
    for name, data, offset in (("dst", to, dst_offset), ("src", frm, src_offset)):
        if data.ndim != 2 or not data.is_contiguous():
            raise ValueError(f"{name} must be a 2-D contiguous tensor")
        if offset < 0 or nbytes < 0 or offset + nbytes > data.shape[1]:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} lie outside a row of {name}, "
                f"which has {data.shape[1]}"
            )
    if dst_rows.shape != src_rows.shape:
        raise ValueError("dst_rows and src_rows differ in length")
    if not dst_rows.numel() or not nbytes:
        return
    sizes = (to.shape[1], frm.shape[1], dst_offset, src_offset, nbytes)
    starts = (to.data_ptr(), frm.data_ptr())
    word = 4 if all(size % 4 == 0 for size in (*sizes, *starts)) else 1
    if word == 4:
        to, frm = to.view(torch.int32), frm.view(torch.int32)
    num_words = nbytes // word
    grid = (dst_rows.numel(), triton.cdiv(num_words, _BLOCK_WORDS))
    _copy_rows_kernel[grid](
        to,
        dst_rows,
        to.shape[1],
        dst_offset // word,
        frm,
        src_rows,
        frm.shape[1],
        src_offset // word,
        num_words,
        BLOCK=_BLOCK_WORDS,
    )


def copy_layer(
    k_dst: torch.Tensor,
    v_dst: torch.Tensor,
    dst_rows: torch.Tensor,
    src: torch.Tensor,
    src_rows: torch.Tensor,
    k_offset: int,
    v_offset: int,
    nbytes: int,
) -> None:
    """Copy one layer's keys and values out of whole pages; see ``copy_rows``."""
    copy_rows(k_dst, dst_rows, 0, src, src_rows, k_offset, nbytes)
    copy_rows(v_dst, dst_rows, 0, src, src_rows, v_offset, nbytes)


def gather_layer(
    dst: torch.Tensor,
    dst_rows: torch.Tensor,
    k_offset: int,
    v_offset: int,
    k_src: torch.Tensor,
    v_src: torch.Tensor,
    src_rows: torch.Tensor,
    nbytes: int,
) -> None:
    """Copy one layer's keys and values into whole pages; see ``copy_rows``."""
    copy_rows(dst, dst_rows, k_offset, k_src, src_rows, 0, nbytes)
    copy_rows(dst, dst_rows, v_offset, v_src, src_rows, 0, nbytes)
