"""Pages of which the tiers hold only some tokens: as many in every page and layer.

Which tokens they are differs from page to page and from layer to layer, and is known to
whoever stored them. What lies in a row is a smaller page of just these tokens, in their
order: its own layout says where.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout

__all__ = ["KeptLayout"]


@dataclass(frozen=True, slots=True)
class KeptLayout(PageLayout):
    """Shape of one page on the device, and of what is stored of it.

    Attributes:
        inner: of the smaller page that is stored; its ``page_tokens`` are those kept.
    """

    inner: PageLayout

    def __post_init__(self) -> None:
        """Check that the two belong together.

        Raises:
            ValueError: other layers or tokens, or more tokens than the page has.
        """
        inner = self.inner
        same = (inner.num_layers, inner.token_bytes) == (
            self.num_layers,
            self.token_bytes,
        )
        if not same or not 0 < inner.page_tokens <= self.page_tokens:
            raise ValueError(f"{inner} is no part of a page of {self.page_tokens}")

    @property
    def part_bytes(self) -> int:
        """Bytes that the kept keys (or values) of a layer take on the device."""
        return self.inner.part_bytes

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of what is stored of one page in one layer."""
        return self.inner.layer_page_bytes

    @property
    def encoding(self) -> Encoding:
        """SPARSE, whatever the kept tokens are written in."""
        return Encoding.SPARSE

    @property
    def form(self) -> str:
        """What the bytes depend on, besides the numbers: for namespaces."""
        return f"kept{self.inner.page_tokens}"

    def key_offset(self, layer: int) -> int:
        """Offset in bytes of a layer's keys inside a page."""
        return self.inner.key_offset(layer)

    def value_offset(self, layer: int) -> int:
        """Offset in bytes of a layer's values inside a page."""
        return self.inner.value_offset(layer)
