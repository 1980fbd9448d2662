"""Which answers of two runs were computed by the same passes (see gate.py).

A page of KV is named by the chain of tokens up to its end. Following a schedule
in order, this keeps the set of *tainted* pages: those whose bits may rightly
differ between the two servers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np

from sgl_tiered_workloads.records import RequestRecord

__all__ = ["exact_orders", "page_keys"]

Pair = tuple[RequestRecord, RequestRecord]


def exact_orders(
    pairs: Sequence[Pair], page_size: int, unlike: Collection[int] = ()
) -> frozenset[int]:
    """Return the schedule places whose answers must agree bit for bit.

    Args:
        pairs: (reference, candidate) records of the same prompts in schedule
            order; records that share an ``order`` ran as one forced batch, and
            stand or fall together.
        page_size: tokens per page, on both servers.
        unlike: places whose batches are known to have differed.
    """
    exact: set[int] = set()
    tainted: set[bytes] = set()
    computed: tuple[set[bytes], set[bytes]] = (set(), set())
    for order, grouped in groupby(pairs, key=lambda pair: pair[0].order):
        batch = list(grouped)
        alike = order not in unlike
        alike = alike and all(_alike(pair, page_size, tainted) for pair in batch)
        if alike:
            exact.add(order)
        # Within one batch the same new page may be computed by several requests;
        # the tree keeps one, and the tiers copy what the tree keeps, so that
        # counts once. A page computed again later has two copies that may differ.
        for side, seen in enumerate(computed):
            fresh = {
                key for pair in batch for key in _fresh_keys(pair[side], page_size)
            }
            tainted |= fresh if not alike else fresh & seen
            seen |= fresh
    return frozenset(exact)


def page_keys(record: RequestRecord, page_size: int) -> list[bytes]:
    """Return chained digests of the whole pages of a record's prompt and answer.

    The last output token is left out: its KV is never computed.
    """
    tokens = np.asarray(record.prompt + record.output[:-1], dtype=np.uint32)
    keys = []
    key = b""
    for end in range(page_size, len(tokens) + 1, page_size):
        page = tokens[end - page_size : end].tobytes()
        key = hashlib.blake2b(key + page, digest_size=16).digest()
        keys.append(key)
    return keys


def _alike(pair: Pair, page_size: int, tainted: set[bytes]) -> bool:
    ours, theirs = pair
    if ours.cached_tokens != theirs.cached_tokens or ours.is_split or theirs.is_split:
        return False
    reused = -(-ours.cached_tokens // page_size)
    return tainted.isdisjoint(page_keys(ours, page_size)[:reused])


def _fresh_keys(record: RequestRecord, page_size: int) -> list[bytes]:
    """Keys of the pages that the request computed itself; of a split one, all."""
    first = 0 if record.is_split else record.cached_tokens // page_size
    return page_keys(record, page_size)[first:]
