"""What several operations ask of their tensors, and of tensors of row numbers."""

from __future__ import annotations

import torch

__all__ = [
    "FLOAT_TYPES",
    "check_rows",
    "check_tensor",
    "first_of_run",
    "page_rows",
]

FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of activations, keys and values that the operations take."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse a tensor of another shape, type or device, or with gaps.

    Raises:
        ValueError: says which, and what it should have been.
    """
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {list(shape)} of {dtype}, not {list(tensor.shape)} of "
            f"{tensor.dtype}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the others on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def check_rows(
    name: str, rows: torch.Tensor, count: int, end: int, device: torch.device
) -> None:
    """Refuse what are not ``count`` numbers of rows, each from 0 to ``end - 1``.

    Numbers on an accelerator stay there unread: their range is the caller's to check.

    Raises:
        ValueError: says which, and what is wrong.
    """
    if rows.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, not {rows.dtype}")
    check_tensor(name, rows, (count,), rows.dtype, device)
    if count and device.type == "cpu":
        low, high = (int(bound) for bound in rows.aminmax())
        if low < 0 or high >= end:
            raise ValueError(
                f"{name} holds {low if low < 0 else high}, which is not from 0 to "
                f"{end - 1}"
            )


def first_of_run(rows: torch.Tensor) -> int:
    """Return the first of consecutive ascending numbers; -1 if they are not that."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first != rows.numel() - 1:
        return -1
    return first if bool((rows.diff() == 1).all()) else -1


def page_rows(pages: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Return the rows of whole pages, ``[num_pages * page_tokens]``, of their type.

    Args:
        pages: ``[num_pages]`` page (or layer-page) numbers.
        page_tokens: Rows of a page; those of page 0 are the first.
    """
    tokens = torch.arange(page_tokens, dtype=pages.dtype, device=pages.device)
    return (pages[:, None] * page_tokens + tokens).reshape(-1)
