"""What the hooks of the scheduler tell the tiers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_tiered.engines.sglang import reporting


class Cache:
    """A tree over tiers, as far as hooks ask it."""

    def __init__(self):
        self.observed = []
        self.tiered = SimpleNamespace(
            admission=None,
            config=SimpleNamespace(layerkv=None),
            observe_prefill=lambda prefix, new, seconds: self.observed.append(new),
        )

    def repair_loads(self, runner, batch):
        """Say that all is well."""
        del runner, batch
        return False


def batch_of(cache, req, num_new, launch_ts, consumer_index):
    return SimpleNamespace(
        reqs=[req],
        extend_lens=[num_new],
        prefix_lens=[0],
        launch_ts=launch_ts,
        hicache_consumer_index=consumer_index,
        tree_cache=cache,
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True),
    )


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_prefill_with_loads_teaches_nothing_of_computing(is_overlapped):
    """Also where its results come with SGLang's copy, which lacks the loads' index."""
    cache, req = Cache(), SimpleNamespace()
    scheduler = SimpleNamespace(tree_cache=cache)
    worker = SimpleNamespace(model_runner=None)
    for launch_ts, num_new, index in [(1.0, 100, 0), (2.0, 200, -1)]:
        batch = batch_of(cache, req, num_new, launch_ts, index)
        reporting._forward(lambda worker, batch: None, worker, batch)
        if is_overlapped:
            batch = batch_of(cache, req, num_new, launch_ts, -1)
        reporting._observe_step(None, scheduler, batch, None)
    assert cache.observed == [200]
