"""The queue as eviction sees it: who waits for a page, and CaR's Score."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from sgl_tiered.cache.lookahead import QueueLookahead, short_keys
from sgl_tiered.cache.tiered_cache import TieredCache
from sgl_tiered.core.keys import Namespace, page_keys
from sgl_tiered.core.plans import Int32s, TransferResult, UInt64s

NOBODY = b""


def ids(digest: bytes, pages: Int32s) -> UInt64s:
    del digest
    return pages.astype(np.uint64)


def run(*pages: int) -> Int32s:
    return np.array(pages, np.int32)


@pytest.fixture
def queue() -> QueueLookahead:
    """A queue with a window of two, whose pages are numbers."""
    return QueueLookahead(1, window=2, keys_of=ids)


def test_a_waiting_request_wants_its_pages_until_it_runs(
    queue: QueueLookahead,
) -> None:
    """Its place counts from the start and does not change while the queue moves."""
    queue.entered("a", NOBODY, run(1, 2))
    queue.entered("b", NOBODY, run(1, 3))
    assert [queue.queued(page) for page in (1, 2, 3, 4)] == [2, 1, 1, 0]
    assert [queue.next_use(page) for page in (1, 3, 4)] == [1.0, 2.0, math.inf]
    queue.running("a")
    assert [queue.queued(page) for page in (1, 2, 3)] == [1, 0, 1]
    assert queue.next_use(1) == 2.0
    queue.finished("b")
    assert queue.queued(1) == 0
    assert queue.num_waiting == 0


def test_the_score_follows_the_paper(queue: QueueLookahead) -> None:
    """1 on entering the window, 1 more on running, 2 less at the end."""
    for name, page in (("a", 1), ("b", 2), ("c", 3)):
        queue.entered(name, NOBODY, run(page))
    assert [queue.score(page) for page in (1, 2, 3)] == [1.0, 1.0, 0.0]
    queue.running("a")
    # The first behind the window takes the place that is free.
    assert [queue.score(page) for page in (1, 2, 3)] == [2.0, 1.0, 1.0]
    queue.finished("a")
    queue.left("b")
    assert [queue.score(page) for page in (1, 2, 3)] == [0.0, 0.0, 1.0]


def test_one_that_runs_from_behind_the_window_counts_in_full(
    queue: QueueLookahead,
) -> None:
    """An order may take it early; its score ends at 0 all the same."""
    for name, page in (("a", 1), ("b", 2), ("c", 3)):
        queue.entered(name, NOBODY, run(page))
    queue.running("c")
    assert queue.score(3) == 2.0
    queue.finished("c")
    assert queue.score(3) == 0.0


def test_falls_are_told(queue: QueueLookahead) -> None:
    """Running, ending and giving up are; entering never lowers anything."""
    told: list[list[int]] = []
    queue.listen(lambda digest, pages: told.append(pages.tolist()))
    queue.entered("a", NOBODY, run(1))
    queue.entered("b", NOBODY, run(2))
    assert told == []
    queue.running("a")
    queue.running("a")
    queue.left("b")
    queue.finished("a")
    queue.finished("a")
    assert told == [[1], [2], [1]]


def test_a_request_enters_once(queue: QueueLookahead) -> None:
    """It is looked at in every pass; unknown ones are no matter."""
    queue.entered("a", NOBODY, run(1))
    queue.entered("a", NOBODY, run(1, 2))
    queue.running("nobody")
    queue.finished("nobody")
    assert (len(queue), queue.queued(1), queue.queued(2)) == (1, 1, 0)


def test_pages_go_by_their_keys_in_a_namespace() -> None:
    """Equal tokens under another namespace are another page."""
    queue = QueueLookahead(2)
    tokens = np.arange(5, dtype=np.int32)
    one, other = (Namespace(name, "bf16", 2).digest() for name in "ab")
    queue.entered("a", one, tokens)
    keys = short_keys(page_keys(one, tokens, 2)).tolist()
    others = short_keys(page_keys(other, tokens, 2)).tolist()
    assert [queue.queued(key) for key in keys] == [1, 1]
    assert [queue.queued(key) for key in others] == [0, 0]


def store(cache: TieredCache, digest: bytes, tokens: Int32s) -> None:
    plan = cache.plan_offload(digest, tokens)
    if plan is not None:
        ok = np.ones(len(plan.pages), np.bool_)
        cache.finish_offload(plan, TransferResult(ok, 0, 1e-3))


@pytest.mark.parametrize("policy", ["score", "cost"])
def test_a_tier_keeps_what_is_waited_for_and_only_so_long(
    make_cache: Callable[..., TieredCache], policy: str
) -> None:
    """The oldest prompt outlives younger ones, until its request has ended."""
    queue = QueueLookahead(4)
    cache = make_cache(host=6, eviction=policy, lookahead=queue)
    digest = cache.open_namespace(Namespace("m", "bfloat16", 4))
    prompts = [np.arange(8, dtype=np.int32) + 100 * n for n in range(8)]
    queue.entered("a", digest, prompts[0])
    for tokens in prompts[:5]:
        store(cache, digest, tokens)
    assert cache.lookup(digest, prompts[0], 0).num_found == 2
    assert cache.lookup(digest, prompts[1], 0).num_found == 0
    queue.running("a")
    queue.finished("a")
    for tokens in prompts[5:]:
        store(cache, digest, tokens)
    assert cache.lookup(digest, prompts[0], 0).num_found == 0
    cache.check()
