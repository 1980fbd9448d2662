"""The shape of pages by which servers of a pool tell whether theirs are alike."""

from __future__ import annotations

from sgl_tiered.core.layout import PageLayout
from sgl_tiered.errors import ConfigError
from sgl_tiered.pool.layouts import KVShape

__all__ = ["pool_shape"]


def pool_shape(layout: PageLayout, kv_heads: int) -> KVShape:
    """Return the shape by which servers tell whether their pages are alike.

    Encoded pages are exchanged as they are: for them a token's part of a page is one
    head, whose size follows from the encoding.

    Raises:
        ConfigError: a page has no equal parts.
    """
    parts = 2 * layout.page_tokens
    if layout.part_bytes * 2 * layout.num_layers == layout.page_bytes:
        head_bytes, left = divmod(layout.token_bytes, kv_heads)
    else:
        kv_heads = 1
        head_bytes, left = divmod(layout.layer_page_bytes, parts)
    if left:
        raise ConfigError(
            "--tiered-pool",
            f"pages of {layout.layer_page_bytes} bytes a layer do not divide into "
            f"{parts} parts",
            "leave --tiered-encoding or --tiered-pool out",
        )
    return KVShape(layout.num_layers, kv_heads, head_bytes, layout.page_tokens)
