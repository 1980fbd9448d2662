"""Attention of new query rows over one request's paged keys and values, on a CPU."""

from __future__ import annotations

from sgl_tiered_kernels.paged_attention.cpu import PagedAttention, RequestRows
from sgl_tiered_kernels.paged_attention.reference import attend_reference

__all__ = ["PagedAttention", "RequestRows", "attend_reference"]
