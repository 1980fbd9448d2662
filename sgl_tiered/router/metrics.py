"""The router's Prometheus metrics, in a registry of its own.

Names begin with ``sgl_tiered_router_``; seconds and tokens are the units.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

__all__ = ["RouterMetrics"]

_PREFIX = "sgl_tiered_router"
_DECISION_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
_FIRST_BYTE_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class RouterMetrics:
    """What is counted; each router has its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=_PREFIX, registry=self.registry)
        gauge = partial(Gauge, namespace=_PREFIX, registry=self.registry)
        histogram = partial(Histogram, namespace=_PREFIX, registry=self.registry)
        self.requests = counter(
            "requests",
            "Requests that ended, by path and by what the client got: a status, or "
            "broken (an answer that broke off), or gone (the client left).",
            ["path", "outcome"],
        )
        self.attempts = counter(
            "attempts",
            "Requests sent to an instance, by outcome: ok, status, refused, broken, "
            "timeout.",
            ["instance", "outcome"],
        )
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of routed requests."
        )
        self.cached_tokens = counter(
            "cached_tokens",
            "Those of them that the chosen instance was seen to hold, by place.",
            ["place"],
        )
        self.decision_seconds = histogram(
            "decision_seconds",
            "From a read prompt to a chosen instance: keys, lookup, policy.",
            buckets=_DECISION_BUCKETS,
        )
        self.first_byte_seconds = histogram(
            "first_byte_seconds",
            "From a request's arrival to the first byte of a streamed answer.",
            buckets=_FIRST_BYTE_BUCKETS,
        )
        self.under_way = gauge(
            "under_way",
            "Requests that an instance has and has not answered in full.",
            ["instance"],
        )
        self.up = gauge(
            "instance_up",
            "1 where requests may go, 0 where not (down or draining).",
            ["instance", "kind"],
        )
        self.events = counter(
            "events",
            "What happened on a feed of KV events: batches, gaps, restarts, replays, "
            "drops, malformed, unanswered (replays that did not come in time).",
            ["instance", "what"],
        )
        self.nodes = gauge(
            "tree_nodes", "Pages in the prompt tree of a kind of instance.", ["kind"]
        )
        self.refusals = counter(
            "refusals",
            "What was refused or not believed, by reason: keys (key, admin_key), "
            "origins, hosts, bodies, times, connections, the tokenizer's troubles, "
            "answers of instances (answer), requests that are no HTTP (http).",
            ["reason"],
        )
        self.task_failures = counter(
            "task_failures",
            "Background tasks that failed and began again, by task.",
            ["task"],
        )
        self.connections = gauge("connections", "Connections of clients that are open.")
        self.body_bytes = gauge(
            "body_bytes", "Bytes of the bodies of requests under way."
        )
        self.registry_up = gauge(
            "registry_up",
            "1 where the pool's registry can be used; 0 where not, or without one.",
        )
        self.leads = gauge("leads", "1 where this replica leads the others.")
        self.leader = gauge(
            "leader", "1 for the replica that leads, as this one knows it.", ["replica"]
        )

    def refuse(self, reason: str) -> None:
        """Count a refusal."""
        self.refusals.labels(reason).inc()

    def fail(self, task: str) -> None:
        """Count a background task that failed."""
        self.task_failures.labels(task).inc()

    def show_registry(self, is_up: bool) -> None:
        """Show whether the registry can be used; never called without one."""
        self.registry_up.set(is_up)

    def show_leader(self, leader: str, *, leads: bool) -> None:
        """Show who leads the replicas (empty for nobody), and whether it is us."""
        self.leads.set(leads)
        self.leader.clear()
        if leader:
            self.leader.labels(leader).set(1)

    def render(self) -> bytes:
        """Return the text that ``/metrics`` answers."""
        return generate_latest(self.registry)

    def forget(self, instance: str, kind: str) -> None:
        """Stop showing the gauges of an instance that was removed."""
        for gauge, labels in (
            (self.under_way, (instance,)),
            (self.up, (instance, kind)),
        ):
            if labels in gauge._metrics:
                gauge.remove(*labels)
