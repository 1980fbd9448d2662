"""The bytes of one page: all layers, each as keys then values, page after page.

A page is kept page-first below the device: one page is one contiguous piece, so that a
disk moves it in one I/O and the host finds a layer of it at a fixed offset.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.core.ids import Encoding

__all__ = ["ALIGNMENT_BYTES", "PageLayout"]

ALIGNMENT_BYTES = 4096
"""O_DIRECT wants addresses, offsets and sizes in this unit on every disk seen."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of one page of KV.

    Attributes:
        num_layers: attention layers held by this rank.
        page_tokens: tokens in one page.
        token_bytes: bytes of the keys (and again of the values) of one token in one
            layer: ``kv_heads * head_dim * itemsize``.
    """

    num_layers: int
    page_tokens: int
    token_bytes: int

    @property
    def part_bytes(self) -> int:
        """Bytes of the keys (or of the values) of one page in one layer."""
        return self.page_tokens * self.token_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of keys and values of one page in one layer."""
        return 2 * self.part_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * self.layer_page_bytes

    @property
    def slot_bytes(self) -> int:
        """``page_bytes`` rounded up to ``ALIGNMENT_BYTES``: what a tier sets aside."""
        return -(-self.page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def encoding(self) -> Encoding:
        """How a copy below the device is written."""
        return Encoding.RAW

    def key_offset(self, layer: int) -> int:
        """Offset in bytes of a layer's keys inside a page."""
        return layer * self.layer_page_bytes

    def value_offset(self, layer: int) -> int:
        """Offset in bytes of a layer's values inside a page."""
        return layer * self.layer_page_bytes + self.part_bytes
