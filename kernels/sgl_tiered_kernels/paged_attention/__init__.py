"""Attention of new query rows over one request's paged keys and values, on a CPU."""

from __future__ import annotations

from sgl_tiered_kernels.paged_attention.cpu import (
    DecodeBatch,
    PagedAttention,
    RequestRows,
    plan_decode,
)
from sgl_tiered_kernels.paged_attention.reference import attend_reference

__all__ = [
    "DecodeBatch",
    "PagedAttention",
    "RequestRows",
    "attend_reference",
    "plan_decode",
]
