"""Prometheus series: what is emulated carries the label in every series."""

import pytest

prometheus_client = pytest.importorskip("prometheus_client")

from sgl_tiered.serving.prometheus import PrometheusSink  # noqa: E402

EDGE = {"bytes": 10.0, "seconds": 0.5, "pages": 2, "failed_pages": 1}
TIER = {
    "tokens_hit": 32,
    "tokens_missed": 16,
    "requests_hit": 1,
    "requests_missed": 2,
    "evictions": 3,
}


@pytest.fixture
def sink():
    """The sink of this process, taken out of the global registry again."""
    yield PrometheusSink(16)
    registry = prometheus_client.REGISTRY
    for name, collector in dict(registry._names_to_collectors).items():
        if name.startswith("sgl_tiered:") and name in registry._names_to_collectors:
            registry.unregister(collector)


def snapshot(emulated, bytes_moved=10.0):
    edge = {**EDGE, "bytes": bytes_moved}
    return {
        "edges": {"host->device": edge, "cxl->device": edge, "host->cxl": edge},
        "tiers": {"host": TIER, "cxl": TIER},
        "counters": {"tokens_total": 7},
        "occupancy": {"cxl": {"used": 4}},
        "emulated": emulated,
        "copies_at_once": not emulated,
    }


def value(name, **labels):
    return prometheus_client.REGISTRY.get_sample_value(name, labels)


def test_series_of_an_emulated_tier_say_so(sink):
    """Its edges, its hits and its occupancy, and nobody else's."""
    sink.publish(snapshot(["cxl"]))
    edges = "sgl_tiered:edge_bytes_total"
    assert value(edges, edge="host->device", emulated="no") == 10
    assert value(edges, edge="cxl->device", emulated="yes") == 10
    assert value(edges, edge="host->cxl", emulated="yes") == 10
    assert value(edges, edge="cxl->device", emulated="no") is None
    hits = "sgl_tiered:tokens_hit_total"
    assert value(hits, tier="host", emulated="no") == 32
    assert value(hits, tier="cxl", emulated="yes") == 32
    pages = "sgl_tiered:occupancy_pages"
    assert value(pages, tier="cxl", state="used", emulated="yes") == 4


def test_whether_new_pages_are_copied_is_a_series(sink):
    """One while they are, and zero while they are not."""
    for emulated, wanted in ([], 1), (["cxl"], 0):
        sink.publish(snapshot(emulated))
        assert value("sgl_tiered:copies_at_once") == wanted


def test_counters_advance_by_the_difference(sink):
    """A second snapshot adds what is new, and no series is counted twice."""
    sink.publish(snapshot([]))
    sink.publish(snapshot([], bytes_moved=25.0))
    name = "sgl_tiered:edge_bytes_total"
    assert value(name, edge="cxl->device", emulated="no") == 25
    assert value("sgl_tiered:events_total", event="tokens_total") == 7
