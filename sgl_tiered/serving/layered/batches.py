"""In which order a forward's requests are staged: mini-batches of Eq. 12 and 13."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sgl_tiered.layered.base import PassRequest
from sgl_tiered.policies.activations.base import PageLine
from sgl_tiered.policies.activations.batches import (
    BufferPages,
    RequestPages,
    mini_batches,
)

__all__ = ["Packing", "StagedKinds"]

Int64s = npt.NDArray[np.int64]
StagedKinds = Callable[[Sequence[PassRequest]], tuple[Int64s, Int64s]]
"""Pages of each request that would be staged: as activations, and as KV."""


class Packing:
    """Brings the requests of a mini-batch together.

    What is rebuilt goes through the same half as what is loaded, so both kinds share
    it, in the ratio in which pages are kept.

    Args:
        staged_kinds: of the manager.
        half_pages: layer-pages of one half of the staging memory.
        share: of pages that are activations.
        kv_gen, load_kv: time to rebuild pages of a layer, and to load them as KV.
    """

    def __init__(
        self,
        staged_kinds: StagedKinds,
        half_pages: int,
        share: float,
        kv_gen: PageLine,
        load_kv: PageLine,
    ) -> None:
        self._staged_kinds = staged_kinds
        self._half_pages = half_pages
        max_act = min(max(round(share * half_pages), 1), half_pages)
        self._buffers = BufferPages(max_act, half_pages - max_act)
        self._kv_gen, self._load_kv = kv_gen, load_kv

    def order(self, requests: Sequence[PassRequest]) -> list[int]:
        """Return all positions, those of a mini-batch next to each other."""
        same = list(range(len(requests)))
        if len(requests) < 2:
            return same
        num_act, num_kv = self._staged_kinds(requests)
        staged = int(num_act.sum() + num_kv.sum())
        if staged <= self._half_pages or not num_act.any():
            # One group, or nothing to be balanced.
            return same
        pages = [
            RequestPages(int(act), int(kv))
            for act, kv in zip(num_act, num_kv, strict=True)
        ]
        packed = mini_batches(pages, self._buffers, self._kv_gen, self._load_kv)
        return [position for batch in packed for position in batch]
