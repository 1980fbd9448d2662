"""Token ids as the tiers keep them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["plain_tokens"]

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
