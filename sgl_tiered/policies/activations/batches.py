"""Mini-batches in which rebuilding takes as long as loading: greedy bin packing.

Source: HybridServe (papers: hybridserve), section 4.3.3. A mini-batch goes through the
buffers for activations and for KV, which bound it. With

    balance = T_kv_gen(#ACT) / T_load_kv(#KV)                                      (12)
    F_b = max(balance, 1 / balance)                                                (13)

a request joins the mini-batch if it fits and does not make F_b worse than both what it
is and what it is for all requests that are left. The paper says "reduces F_b"; of
requests with one ratio none does, and each would be a mini-batch by itself, though it
wants few of them. What is left has to be placed, so its F_b is as good as it gets.

All mini-batches finish a layer before the next one begins, so its weights are loaded
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_tiered.policies.activations.base import PageLine

__all__ = ["BufferPages", "RequestPages", "imbalance", "mini_batches"]

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RequestPages:
    """Pages of one request that go through the buffers, in one layer."""

    num_act: int
    num_kv: int


@dataclass(frozen=True, slots=True)
class BufferPages:
    """#ACT_max and #KV_max: pages of one layer that one half of the buffers holds."""

    max_act: int
    max_kv: int


def imbalance(num_act: int, num_kv: int, kv_gen: PageLine, load_kv: PageLine) -> float:
    """Return F_b: 1 or more; 1 for nothing at all, infinite for one kind alone."""
    gen_s, load_s = kv_gen.seconds(num_act), load_kv.seconds(num_kv)
    if gen_s == load_s:
        return 1.0
    if not min(gen_s, load_s):
        return math.inf
    return max(gen_s / load_s, load_s / gen_s)


def mini_batches(
    requests: Sequence[RequestPages],
    buffers: BufferPages,
    kv_gen: PageLine,
    load_kv: PageLine,
) -> tuple[tuple[int, ...], ...]:
    """Return the mini-batches as positions in ``requests``.

    Each request is in exactly one, and no mini-batch is empty. One that is larger than
    a buffer is a mini-batch by itself; who loads it has to do so in parts. Mini-batches
    are filled in the order of ``requests``, and so are their members, but for those
    that had to wait for another one. O(requests^2) at worst.
    """

    def worth(pages: RequestPages) -> float:
        return imbalance(pages.num_act, pages.num_kv, kv_gen, load_kv)

    left = list(range(len(requests)))
    formed = []
    while left:
        bar = worth(_sum([requests[n] for n in left]))
        chosen, left = [left[0]], left[1:]
        total = requests[chosen[0]]
        is_growing = True
        while is_growing:
            is_growing = False
            passed_over = []
            for position in left:
                grown = _sum([total, requests[position]])
                limit = max(bar, worth(total)) * (1.0 + _ROUNDING)
                if _fits(grown, buffers) and worth(grown) <= limit:
                    chosen.append(position)
                    total = grown
                    is_growing = True
                else:
                    passed_over.append(position)
            left = passed_over
        formed.append(tuple(chosen))
    return tuple(formed)


def _sum(requests: Sequence[RequestPages]) -> RequestPages:
    num_act = sum(pages.num_act for pages in requests)
    return RequestPages(num_act, sum(pages.num_kv for pages in requests))


def _fits(pages: RequestPages, buffers: BufferPages) -> bool:
    return pages.num_act <= buffers.max_act and pages.num_kv <= buffers.max_kv
