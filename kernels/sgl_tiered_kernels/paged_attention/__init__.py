"""Attention of new query rows over one request's paged keys and values, on a CPU."""

from __future__ import annotations

from sgl_tiered_kernels.paged_attention.cpu import (
    DecodeBatch,
    Gathered,
    PagedAttention,
    RequestRows,
    padded_length,
    plan_decode,
)
from sgl_tiered_kernels.paged_attention.reference import attend_reference

__all__ = [
    "DecodeBatch",
    "Gathered",
    "PagedAttention",
    "RequestRows",
    "attend_reference",
    "padded_length",
    "plan_decode",
]
