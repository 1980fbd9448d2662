"""SGLang's allocator of pages, which tells the pool what is given back."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

__all__ = ["LayeredAllocator"]


class LayeredAllocator(PagedTokenToKVPoolAllocator):
    """Gives a page's places on the device back as soon as the page is free."""

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for ids in page_ids:
            self._kvcache.forget(ids)
        super()._release_page_ids(*page_ids)

    def clear(self) -> None:
        """Make every page free."""
        super().clear()
        self._kvcache.forget(self.free_pages)
