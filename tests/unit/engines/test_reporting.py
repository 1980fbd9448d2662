"""What the hooks of the scheduler tell the tiers."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

from sgl_tiered.engines.sglang import reporting
from sgl_tiered.engines.sglang.step_times import PassTimes
from sgl_tiered.serving.options import Options


class Cache:
    """A tree over tiers, as far as hooks ask it."""

    def __init__(self):
        self.observed = []
        self.seconds = []
        self.tiered = SimpleNamespace(
            admission=None,
            config=SimpleNamespace(layerkv=None),
            pass_times=PassTimes(),
            observe_prefill=self.observe_prefill,
        )

    def observe_prefill(self, prefix, num_new, seconds):
        """Note a prefill."""
        self.observed.append(num_new)
        self.seconds.append(seconds)

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


def test_a_prefill_is_not_charged_for_the_pass_before_it(monkeypatch):
    """The overlap schedule launches it while that one is still computed."""
    cache, req = Cache(), SimpleNamespace()
    scheduler = SimpleNamespace(tree_cache=cache)
    now = [0.0]
    monkeypatch.setattr(reporting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    decode = batch_of(cache, req, 1, 10.0, -1)
    decode.forward_mode.is_extend_without_speculative = lambda: False
    # The decode step from 10 to 14; prefills launched at 11, at 15 and, idle, at 30.
    never_launched = batch_of(cache, req, 100, None, -1)
    passes = [(decode, 14.0), (never_launched, 14.0)] + [
        (batch_of(cache, req, 100, launch_ts, -1), end_s)
        for launch_ts, end_s in [(11.0, 16.0), (15.0, 19.0), (30.0, 31.0)]
    ]
    for batch, end_s in passes:
        now[0] = end_s
        reporting._observe_step(None, scheduler, batch, None)
    assert cache.seconds == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("busy", ["nothing", "running", "chunked", "launched"])
def test_a_scheduler_idles_only_where_nothing_was_launched(busy):
    """The overlap schedule takes no note of a prefill it has launched until later."""
    cache = Cache()
    cache.watch_queue = lambda scheduler: None
    cache.tiered.config = Options()
    cache.tiered.lengths = cache.tiered.pool = None
    running = SimpleNamespace(is_empty=lambda: busy != "running")
    scheduler = SimpleNamespace(
        tree_cache=cache,
        running_batch=running,
        waiting_queue=[],
        chunked_req=object() if busy == "chunked" else None,
        last_batch=object() if busy == "launched" else None,
    )
    try:
        reporting._attach_scheduler(None, scheduler)
        assert gc.get_freeze_count() > 0, "a full collection goes through all imports"
    finally:
        gc.unfreeze()
    assert cache.tiered.engine_idle() == (busy == "nothing")
    assert cache.tiered.engine_free() == (busy == "nothing")
