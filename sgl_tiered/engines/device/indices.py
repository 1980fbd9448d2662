"""Where the tokens of a forward lie in a pool whose layers have their own places.

Pure functions. A forward's *list of pages* holds the pages of its requests, one request
after the other, oldest page first. ``places`` name, for one layer, the physical
layer-page of each entry of such a list; tokens are told apart once per forward
(``positions`` in the list, ``offsets`` in the page), so that a layer costs one gather
and one sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "fill_slots",
    "leading_pages",
    "new_token_pages",
    "page_positions",
    "page_starts",
    "request_rows",
]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def page_positions(slots: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """Return int32 [n]: the position in the list of pages of each token's page.

    Args:
        slots: int [n], logical slots of whole prefixes of requests, one after the
            other, on any device. Each begins with the first token of a page.
        page_tokens: tokens in one page.
    """
    begins_page = slots % page_tokens == 0
    return torch.cumsum(begins_page, 0, dtype=torch.int32) - 1


def page_starts(places: npt.NDArray[np.integer], page_tokens: int) -> Int32s:
    """Return int32 [n]: the first slot of each physical layer-page.

    Raises:
        RuntimeError: a page has no place (-1): it would be read where nothing is.
        OverflowError: the tensor has more slots than int32 can number.
    """
    if len(places) and int(places.min()) < 0:
        raise RuntimeError("a page is read or written that has no place in this layer")
    if len(places) and (int(places.max()) + 1) * page_tokens > np.iinfo(np.int32).max:
        raise OverflowError("the pool has more slots than FlashInfer's indices reach")
    return places.astype(np.int32) * np.int32(page_tokens)


def fill_slots(
    out: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write where tokens lie in one layer: ``starts[positions] + offsets``.

    Queued on the calling thread's stream; nothing waits.

    Args:
        out: int32 [n], written in place: the index buffer of a planned wrapper.
        starts: int32 [num_pages], see ``page_starts``.
        positions: int32 [n], into ``starts``.
        offsets: int32 [n], of the tokens in their pages.
    """
    torch.index_select(starts, 0, positions, out=out)
    out.add_(offsets)


def leading_pages(indptr: Int64s, num_tokens: Int64s, page_tokens: int) -> Int64s:
    """Return the entries of a list of pages that hold each request's first tokens.

    Args:
        indptr: int64 [num_requests + 1], where each request's pages begin.
        num_tokens: int64 [num_requests], none beyond the request's pages.
        page_tokens: tokens in one page.
    """
    counts = -(-num_tokens // page_tokens)
    assert np.all(counts <= np.diff(indptr)), "more tokens than pages"
    first = np.cumsum(counts) - counts
    steps = np.arange(int(counts.sum()), dtype=np.int64)
    kept: Int64s = steps + np.repeat(indptr[:-1] - first, counts)
    return kept


def new_token_pages(
    indptr: Int64s, num_context: Int64s, num_new: Int64s, page_tokens: int
) -> tuple[Int64s, Int32s]:
    """Return position in the list of pages, and offset, of each token to be written.

    Args:
        indptr: int64 [num_requests + 1], where each request's pages begin.
        num_context: int64 [num_requests], tokens before the new ones.
        num_new: int64 [num_requests].
        page_tokens: tokens in one page.

    Returns:
        int64 [sum of num_new] and int32 of the same length, request by request.
    """
    first = np.cumsum(num_new) - num_new
    steps = np.arange(int(num_new.sum()), dtype=np.int64)
    tokens = steps + np.repeat(num_context - first, num_new)
    positions = np.repeat(indptr[:-1], num_new) + tokens // page_tokens
    return positions, (tokens % page_tokens).astype(np.int32)


def request_rows(num_new: Int64s, order: Int64s) -> Int64s:
    """Return int64 [sum of num_new]: a batch's rows, request by request in an order.

    Args:
        num_new: int64 [num_requests], rows of each request, as they lie.
        order: int64 [num_requests], every request once.
    """
    assert len(order) == len(num_new), "an order of other requests"
    begins = np.cumsum(num_new) - num_new
    counts = num_new[order]
    first = np.cumsum(counts) - counts
    steps = np.arange(int(counts.sum()), dtype=np.int64)
    rows: Int64s = steps + np.repeat(begins[order] - first, counts)
    return rows
