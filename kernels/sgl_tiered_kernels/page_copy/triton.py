"""The page copies between device buffers, as Triton programs.

Tensors are 2-D, contiguous and on one device; host memory that CUDA pinned works too,
read and written in place over the link. Bytes move as 32-bit words where everything is
a multiple of four, else as bytes.

``scatter_parts`` and ``gather_parts`` take a table of addresses, so that one launch
moves the keys and values of a layer, or of all layers. What divides these addresses
only the caller knows, for the table is on the device; where that is 16 they move 128
bits at a time. Nothing else that varies from call to call makes another program: those
of a pool can all be compiled when it is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = [
    "FORMS",
    "Form",
    "copy_layer",
    "copy_rows",
    "gather_layer",
    "gather_parts",
    "scatter_parts",
]

# 4 KiB per program: enough loads in flight per block, and a page of a common model
# (8 to 64 KiB per layer) still spreads over several programs.
_BLOCK_WORDS = 1024
_UNIT_BYTES = 16
"""What a thread loads or stores at a time, where everything is a multiple of it."""
MAX_PROGRAMS = 64
"""Programs of a copy over the link. 4 KiB in flight in each cover the latency of the
link (55 GB/s times 2 us is 110 KB), and the other cores are left to the forward."""


class Form(NamedTuple):
    """How a program of ``scatter_parts`` and ``gather_parts`` moves bytes.

    Attributes:
        block_words: of 4 bytes, that are read before the first of them is written.
        num_warps: that do it.
        streams: nothing is kept in the caches: each byte is used once.
    """

    block_words: int = _BLOCK_WORDS
    num_warps: int = 4
    streams: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes that a program has in flight."""
        return 4 * self.block_words


FORMS = {
    "": Form(),
    "streams": Form(streams=True),
    "wide": Form(4096, 8),
    "wide_streams": Form(4096, 8, streams=True),
}
"""Candidates, by name; the first is what the product takes. Which one is best on a GPU
is not known yet: ``benchmarks/gpu`` measures them. HiCache's kernels stream."""


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


@triton.jit(
    do_not_specialize=[
        "table",
        "pages",
        "rows",
        "row_units",
        "first_unit",
        "part_units",
        "num_parts",
        "num_blocks",
        "num_items",
    ]
)
def _parts_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    table,  # noqa: ANN001
    pages,  # noqa: ANN001
    whole,  # noqa: ANN001
    rows,  # noqa: ANN001
    row_units,  # noqa: ANN001
    first_unit,  # noqa: ANN001
    part_units,  # noqa: ANN001
    num_parts,  # noqa: ANN001
    num_blocks,  # noqa: ANN001
    num_items,  # noqa: ANN001
    SCATTER: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    STREAMS: tl.constexpr,  # noqa: N803
):
    # In words: that all are multiples of UNIT is what the compiler learns by this.
    row_words = row_units * UNIT
    first_word = first_unit * UNIT
    part_words = part_units * UNIT
    item = tl.program_id(0)
    while item < num_items:
        # Blocks of a part, then the parts of a page: neighbours in memory go together.
        block = item % num_blocks
        part = (item // num_blocks) % num_parts
        page = item // (num_blocks * num_parts)
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < part_words
        address = tl.load(table + part)
        # The hint on the address itself is lost where it becomes a pointer.
        buffer = tl.multiple_of(address.to(whole.dtype), ALIGNMENT)
        at = tl.load(pages + page) * part_words + column
        frm = tl.load(rows + page) * row_words + first_word + part * part_words + column
        source, target = buffer + at, whole + frm
        if SCATTER:
            source, target = whole + frm, buffer + at
        if STREAMS:
            # Past the first cache, and the first to leave the second.
            words = tl.load(source, mask=inside, cache_modifier=".cg")
            tl.store(target, words, mask=inside, cache_modifier=".cs")
        else:
            tl.store(target, tl.load(source, mask=inside), mask=inside)
        item += tl.num_programs(0)


def scatter_parts(
    table: torch.Tensor,
    pages: torch.Tensor,
    src: torch.Tensor,
    src_rows: torch.Tensor,
    first_byte: int,
    part_bytes: int,
    *,
    alignment: int,
    max_programs: int = MAX_PROGRAMS,
    form: Form = FORMS[""],
) -> None:
    """Copy parts that follow each other in rows of ``src`` to one buffer each.

    With the keys and values of a layer as the table it is ``copy_layer`` in one launch.

    Args:
        table: ``[parts]`` int64 on the device, the address of each buffer: pages of
            ``part_bytes`` in a row.
        pages: ``[n]`` int64 on the device, pages of the buffers, each at most once.
        src: ``[rows, row]``, on the device or pinned.
        src_rows: ``[n]`` int64 on the device.
        first_byte: Bytes from the start of a row to the first part.
        part_bytes: Bytes of a part of a page.
        alignment: Divides all addresses of the table (``dma.common_alignment``).
        max_programs: How many run at a time; more take cores from other work.
        form: Of a program.

    Raises:
        ValueError: as for ``copy_rows``.
    """
    ways = (alignment, max_programs, form)
    _launch_parts(
        table, pages, src, src_rows, first_byte, part_bytes, *ways, scatter=True
    )


def gather_parts(
    dst: torch.Tensor,
    dst_rows: torch.Tensor,
    first_byte: int,
    table: torch.Tensor,
    pages: torch.Tensor,
    part_bytes: int,
    *,
    alignment: int,
    max_programs: int = MAX_PROGRAMS,
    form: Form = FORMS[""],
) -> None:
    """Copy a part from each buffer into rows of ``dst``: the inverse of scatter_parts.

    Raises:
        ValueError: as for ``copy_rows``.
    """
    ways = (alignment, max_programs, form)
    _launch_parts(
        table, pages, dst, dst_rows, first_byte, part_bytes, *ways, scatter=False
    )


def _launch_parts(
    table: torch.Tensor,
    pages: torch.Tensor,
    whole: torch.Tensor,
    rows: torch.Tensor,
    first_byte: int,
    part_bytes: int,
    alignment: int,
    max_programs: int,
    form: Form,
    *,
    scatter: bool,
) -> None:
    data = whole.view(torch.uint8)
    if data.ndim != 2 or not data.is_contiguous():
        raise ValueError("whole pages must be a 2-D contiguous tensor")
    row_bytes = data.shape[1]
    end = first_byte + table.numel() * part_bytes
    if first_byte < 0 or part_bytes < 0 or end > row_bytes:
        raise ValueError(
            f"bytes {first_byte} to {end} lie outside a row, which has {row_bytes}"
        )
    if pages.shape != rows.shape:
        raise ValueError("pages and rows differ in length")
    if not pages.numel() or not part_bytes or not table.numel():
        return
    sizes = (row_bytes, first_byte, part_bytes, data.data_ptr(), alignment)
    word = 4 if all(size % 4 == 0 for size in sizes) else 1
    unit = _UNIT_BYTES if all(size % _UNIT_BYTES == 0 for size in sizes) else word
    data = data.view(torch.int32) if word == 4 else data
    num_blocks = triton.cdiv(part_bytes // word, form.block_words)
    num_items = pages.numel() * table.numel() * num_blocks
    _parts_kernel[(min(num_items, max_programs),)](
        table,
        pages,
        data,
        rows,
        row_bytes // unit,
        first_byte // unit,
        part_bytes // unit,
        table.numel(),
        num_blocks,
        num_items,
        SCATTER=scatter,
        UNIT=unit // word,
        ALIGNMENT=unit,
        BLOCK=form.block_words,
        STREAMS=form.streams,
        num_warps=form.num_warps,
    )
