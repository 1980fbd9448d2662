"""Token ids as the tiers keep them, and the pages that hold their KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.pipelines.page_numbers import PageNumbers
from sgl_tiered.pipelines.stream_pool import StreamPool

__all__ = ["device_pages", "page_numbers", "plain_tokens"]

_MAX_TOKEN_ID = 2**31 - 1


def plain_tokens(token_ids: Any, num_tokens: int) -> npt.NDArray[np.int32] | None:
    """Return the first tokens as int32; None where they are not plain token ids.

    Images and the like stand in a prompt as hashes of up to 64 bits. Cut to 32 bits,
    two of them could look alike, so such prompts stay out of the tiers.
    """
    wide = np.frombuffer(token_ids, dtype=np.int64, count=num_tokens)
    if len(wide) and (wide.max() > _MAX_TOKEN_ID or wide.min() < 0):
        return None
    return wide.astype(np.int32)


def page_numbers(
    device: DevicePool, firsts: torch.Tensor, page_tokens: int
) -> PageNumbers:
    """Return the pages that slots are the first ones of.

    On a device with streams the slots come of work that is queued behind the forward,
    and reading them would hold the scheduler until that has ended.

    Args:
        device: where the pages are.
        firsts: int [n], the first slot of each page.
        page_tokens: slots of a page.
    """
    if isinstance(device, StreamPool):
        return device.queue_pages(firsts.to(torch.int64) // page_tokens)
    pages: npt.NDArray[np.int64] = firsts.cpu().numpy().astype(np.int64) // page_tokens
    return pages


def device_pages(
    tree: Any, req: Any, positions: npt.NDArray[np.integer]
) -> PageNumbers:
    """Return the device's pages of a request.

    Args:
        tree: our cache.
        req: SGLang's request, which holds slots.
        positions: which of its pages, counted from its first.
    """
    page, device = tree.page_size, tree.tiered.parts.device
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    if isinstance(device, StreamPool) and len(positions):
        # A slice: the positions themselves would have to be brought to the device.
        begin, end = int(positions.min()), int(positions.max()) + 1
        pages = page_numbers(device, row[begin * page : end * page : page], page)
        return pages[positions - begin]
    firsts = torch.from_numpy(positions.astype(np.int64) * page)
    return page_numbers(device, row[firsts.to(row.device)], page)
