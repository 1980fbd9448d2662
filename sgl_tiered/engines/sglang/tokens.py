"""Token ids as the tiers keep them, and the pages that hold their KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["device_pages", "plain_tokens"]

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


def device_pages(
    tree: Any, req: Any, positions: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Return the device's pages of a request.

    Args:
        tree: our cache.
        req: SGLang's request, which holds slots.
        positions: which of its pages, counted from its first.
    """
    page = tree.page_size
    firsts = torch.from_numpy(positions.astype(np.int64) * page)
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    slots = row[firsts.to(row.device)].cpu().numpy().astype(np.int64)
    pages: npt.NDArray[np.int64] = slots // page
    return pages
