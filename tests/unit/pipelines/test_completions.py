"""The completion queue."""

import threading

import numpy as np

from sgl_tiered.core.plans import TransferResult
from sgl_tiered.pipelines.completions import CompletionQueue, OffloadFinished
from tests.unit.pipelines.pipeline_support import PATIENCE_S, offload_plan


def completion(number):
    result = TransferResult.failed(1, 0.0, "x")
    return OffloadFinished(offload_plan([0], plan_id=number), result)


def numbers(completions):
    return [c.plan.plan_id for c in completions]


def test_drains_in_order_and_once():
    """Completions come out oldest first, each once."""
    queue = CompletionQueue()
    assert queue.drain() == []
    for number in range(3):
        queue.post(completion(number))
    assert len(queue) == 3
    assert numbers(queue.drain()) == [0, 1, 2]
    assert queue.drain() == []


def test_wait_ends_with_a_post():
    """A waiter is woken by a post from another thread."""
    queue = CompletionQueue()
    assert not queue.wait(0.0)
    poster = threading.Thread(target=queue.post, args=(completion(5),))
    poster.start()
    assert queue.wait(PATIENCE_S)
    poster.join()
    assert numbers(queue.drain()) == [5]
    assert not queue.wait(0.0)


def test_nothing_is_lost_between_threads():
    """Posts from several threads while another drains all arrive, in their order."""
    queue = CompletionQueue()
    per_thread = 500

    def post_all(base):
        for number in range(per_thread):
            queue.post(completion(base + number))

    posters = [threading.Thread(target=post_all, args=(i * 1000,)) for i in range(4)]
    for poster in posters:
        poster.start()
    got = []
    while len(got) < 4 * per_thread:
        assert queue.wait(PATIENCE_S), f"only {len(got)} arrived"
        got += numbers(queue.drain())
    for poster in posters:
        poster.join()
    for base in range(4):
        mine = [n for n in got if n // 1000 == base]
        assert np.array_equal(mine, base * 1000 + np.arange(per_thread))
