"""Counters of edges and tiers."""

import json
import threading

import numpy as np

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.plans import TransferResult
from sgl_tiered.metrics.registry import MetricsRegistry


def test_edges_add_up():
    """Each edge counts its own transfers, failures included."""
    metrics = MetricsRegistry()
    ok = TransferResult(ok=np.array([True, True]), num_bytes=200, seconds=0.5)
    half = TransferResult(
        ok=np.array([True, False]), num_bytes=100, seconds=0.25, error="x"
    )
    for result in (ok, half):
        metrics.record_result(TierId.DISK, TierId.HOST, result)
    metrics.record_result(TierId.HOST, TierId.DISK, ok)
    edges = metrics.snapshot()["edges"]
    assert edges["disk->host"] == {
        "ops": 2,
        "pages": 3,
        "bytes": 300,
        "seconds": 0.75,
        "failures": 1,
        "failed_pages": 1,
    }
    assert edges["host->disk"]["ops"] == 1


def test_tiers_count_hits_misses_and_evictions():
    """A request hits a tier if it used one page of it."""
    metrics = MetricsRegistry()
    metrics.record_lookup(TierId.HOST, pages_hit=3, pages_missed=1, page_tokens=16)
    metrics.record_lookup(TierId.HOST, pages_hit=0, pages_missed=2, page_tokens=16)
    metrics.record_evictions(TierId.HOST, 5)
    assert metrics.snapshot()["tiers"]["host"] == {
        "pages_hit": 3,
        "tokens_hit": 48,
        "pages_missed": 3,
        "tokens_missed": 48,
        "requests_hit": 1,
        "requests_missed": 1,
        "evictions": 5,
    }


def test_snapshot_is_json_and_a_copy():
    """A snapshot can be written as JSON and does not change afterwards."""
    metrics = MetricsRegistry()
    metrics.add("offload_dropped_pages", 2)
    metrics.record_evictions(TierId.DISK, 1)
    before = metrics.snapshot()
    metrics.add("offload_dropped_pages", 3)
    metrics.record_evictions(TierId.DISK, 1)
    assert json.loads(json.dumps(before)) == before
    assert before["counters"] == {"offload_dropped_pages": 2}
    assert before["tiers"]["disk"]["evictions"] == 1
    assert metrics.snapshot()["tiers"]["disk"]["evictions"] == 2


def test_publish_hands_the_snapshot_on():
    """A sink gets what ``snapshot`` gives."""
    metrics = MetricsRegistry()
    metrics.add("x")

    class Keeps:
        def publish(self, snapshot):
            self.snapshot = snapshot

    sink = Keeps()
    metrics.publish(sink)
    assert sink.snapshot == metrics.snapshot()


def test_threads_lose_no_count():
    """Counts from several threads add up exactly."""
    metrics = MetricsRegistry()

    def count():
        for _ in range(2000):
            metrics.record_transfer(
                TierId.HOST, TierId.DEVICE, num_pages=1, num_bytes=7, seconds=0.5
            )

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    edge = metrics.snapshot()["edges"]["host->device"]
    assert (edge["ops"], edge["bytes"], edge["seconds"]) == (8000, 56000, 4000.0)
