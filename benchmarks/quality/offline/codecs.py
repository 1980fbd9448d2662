"""The product's own encodings, as what comes back from them."""

from __future__ import annotations

import numpy as np
import torch
from offline.llama import LayerKV, LlamaShape
from offline.measure import Codec
from sgl_tiered_kernels import kv_codec

from sgl_tiered.core import encoded
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.policies.sparsity.base import KeepSets

__all__ = ["make_codecs"]

_RAW_BYTES = 2
"""Of a number on the device: bfloat16."""


def make_codecs(
    names: tuple[str, ...], shape: LlamaShape, page_tokens: int = 16
) -> dict[str, Codec]:
    """Return codecs by the names ``fp8``, ``int8``, ``int4``."""
    return {name: _codec(Encoding[name.upper()], shape, page_tokens) for name in names}


def _codec(encoding: Encoding, shape: LlamaShape, page_tokens: int) -> Codec:
    width = shape.num_kv_heads * shape.head_dim
    raw = PageLayout(1, page_tokens, width * _RAW_BYTES)
    layout = encoded.encoded_layout(raw, encoding, shape.num_kv_heads, shape.head_dim)

    def round_trip(kv: LayerKV) -> LayerKV:
        num_pages = len(kv[0]) // page_tokens
        whole = num_pages * page_tokens
        pages = np.arange(num_pages)
        # Through bfloat16, as the device has it; a page that is not full is not stored.
        sources = [
            part[:whole].to(torch.bfloat16).contiguous().cpu().view(torch.uint16)
            for part in kv
        ]
        region = np.zeros((num_pages, layout.page_bytes), np.uint8)
        kv_codec.encode_layer(
            layout, 0, region, pages, *(s.numpy() for s in sources), pages
        )
        targets = [np.empty_like(source.numpy()) for source in sources]
        kv_codec.decode_layer(layout, 0, *targets, pages, region, pages)
        back = [torch.from_numpy(t).view(torch.bfloat16) for t in targets]
        key, value = (
            torch.cat([new.to(part), part[whole:]])
            for new, part in zip(back, kv, strict=True)
        )
        return key, value

    def bytes_ratio(num_tokens: int, kept: KeepSets | None = None) -> float:
        whole = num_tokens // page_tokens * page_tokens
        layers = [np.arange(num_tokens)] if kept is None else kept
        num_bytes = 0
        for tokens in layers:
            stored = np.zeros(whole, np.bool_)
            stored[tokens[tokens < whole]] = True
            pages = stored.reshape(1, -1, page_tokens)
            num_bytes += int(encoded.kept_bytes(layout, pages).sum())
            num_bytes += int((tokens >= whole).sum()) * 2 * layout.token_bytes
        return num_bytes / (len(layers) * num_tokens * 2 * layout.token_bytes)

    return Codec(round_trip, bytes_ratio)
