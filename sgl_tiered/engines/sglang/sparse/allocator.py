"""SGLang's allocator of pages, under which rows are given out and taken back.

Numbers of pages are plenty, rows are not: a page is handed out only if it gets all its
rows, but for the pages of a sparse load, which get the rows of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

from sgl_tiered.engines.sglang.sparse.capacity import SparseSizes

__all__ = ["SparseAllocator"]

Int64s = npt.NDArray[np.int64]


class SparseAllocator(PagedTokenToKVPoolAllocator):
    """Pages of a `SparsePool`; takes the arguments of SGLang's own."""

    # Made at the first ``clear``, which is a part of the parent's constructor.
    sizes: SparseSizes | None = None

    def available_size(self) -> int:
        """Return the tokens that fit, each in all layers, in whole pages."""
        assert self.sizes is not None
        return int(self.sizes.free_pages(self._free_logical) * self.page_size)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take whole pages; None where they or their rows are short."""
        if need_size // self.page_size > self._binding.free_pages:
            return None
        out = super().alloc(need_size)
        if out is not None:
            self._bind(out)
        return out

    def alloc_kept(
        self, num_tokens: int, kept: Sequence[Int64s]
    ) -> torch.Tensor | None:
        """Take pages with rows for some of their tokens only.

        Args:
            num_tokens: whole pages.
            kept: per layer, which of the tokens, ascending.

        Returns:
            int64 [num_tokens], slots; None where numbers or rows are short.
        """
        if sum(len(tokens) for tokens in kept) > self._binding.num_free:
            return None
        out = super().alloc(num_tokens)
        if out is not None:
            pages = _pages(out[:: self.page_size], self.page_size)
            self._binding.bind_kept(pages, kept)
            self.changed()
        return out

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Take slots for the new tokens of a prefill; None where rows are short."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu,
                page_size=self.page_size,
                prefix_lens=prefix_lens_cpu,
            )
        if num_new_pages > self._binding.free_pages:
            return None
        out = super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages,
        )
        if out is not None:
            self._bind(out)
        return out

    def alloc_decode(
        self,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
    ) -> torch.Tensor | None:
        """Take a slot for the next token of each request; None where rows are short."""
        num_new_pages = get_num_new_pages(
            seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True
        )
        if num_new_pages > self._binding.free_pages:
            return None
        out = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        if out is not None:
            self._bind(out)
        return out

    def room_for(self, num_rows: int, num_tokens: int) -> int:
        """Return what ``available_size`` has to be for a sparse load to fit.

        Args:
            num_rows: rows that it takes.
            num_tokens: tokens of its pages.
        """
        pages = -(-num_rows // self._binding.page_rows)
        if self._free_logical * self.page_size < num_tokens:
            pages = num_tokens // self.page_size
        return int(pages * self.page_size)

    def clear(self) -> None:
        """Make every page free."""
        plan, binding = self._kvcache.row_plan, self._binding
        self.num_pages = plan.num_pages
        binding.clear()
        if self.sizes is None:
            self.sizes = SparseSizes(binding, plan.num_pages)
        super().clear()
        self.changed()

    def changed(self) -> None:
        """Tell SGLang the size that its pool has now."""
        assert self.sizes is not None
        self.sizes.update(self._free_logical)

    @property
    def _binding(self) -> Any:
        return self._kvcache.binding

    @property
    def _free_logical(self) -> int:
        return len(self.free_pages) + int(self.num_staged_pages)

    def _bind(self, slots: torch.Tensor) -> None:
        """Give rows to the pages that begin among some slots: the new ones."""
        pages = _pages(slots[slots % self.page_size == 0], self.page_size)
        if len(pages):
            self._binding.bind(pages)
            gauge = self._kvcache.gauge
            if gauge is not None:
                gauge.forget(self._binding.slots(pages))
            self.changed()

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for ids in page_ids:
            self._binding.release(ids.cpu().numpy().astype(np.int64))
        super()._release_page_ids(*page_ids)
        self.changed()


def _pages(slots: torch.Tensor, page_size: int) -> Int64s:
    pages: Int64s = slots.cpu().numpy().astype(np.int64) // page_size
    return pages
