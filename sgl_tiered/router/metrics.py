"""The router's Prometheus metrics, in a registry of its own.

Names begin with ``sgl_tiered_router_``; seconds and tokens are the units.
"""

from __future__ import annotations

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
        self.requests = Counter(
            f"{_PREFIX}_requests",
            "Requests that ended, by path and by what the client got: a status, or "
            "broken (an answer that broke off), or gone (the client left).",
            ["path", "outcome"],
            registry=self.registry,
        )
        self.attempts = Counter(
            f"{_PREFIX}_attempts",
            "Requests sent to an instance, by outcome: ok, status, refused, broken, "
            "timeout.",
            ["instance", "outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            f"{_PREFIX}_prompt_tokens",
            "Prompt tokens of routed requests.",
            registry=self.registry,
        )
        self.cached_tokens = Counter(
            f"{_PREFIX}_cached_tokens",
            "Those of them that the chosen instance was seen to hold, by place.",
            ["place"],
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            f"{_PREFIX}_decision_seconds",
            "From a read prompt to a chosen instance: keys, lookup, policy.",
            buckets=_DECISION_BUCKETS,
            registry=self.registry,
        )
        self.first_byte_seconds = Histogram(
            f"{_PREFIX}_first_byte_seconds",
            "From a request's arrival to the first byte of a streamed answer.",
            buckets=_FIRST_BYTE_BUCKETS,
            registry=self.registry,
        )
        self.under_way = Gauge(
            f"{_PREFIX}_under_way",
            "Requests that an instance has and has not answered in full.",
            ["instance"],
            registry=self.registry,
        )
        self.up = Gauge(
            f"{_PREFIX}_instance_up",
            "1 where requests may go, 0 where not (down or draining).",
            ["instance", "kind"],
            registry=self.registry,
        )
        self.events = Counter(
            f"{_PREFIX}_events",
            "What happened on a feed of KV events: batches, gaps, restarts, replays, "
            "drops, malformed, unanswered (replays that did not come in time).",
            ["instance", "what"],
            registry=self.registry,
        )
        self.nodes = Gauge(
            f"{_PREFIX}_tree_nodes",
            "Pages in the prompt tree of a kind of instance.",
            ["kind"],
            registry=self.registry,
        )
        self.refusals = Counter(
            f"{_PREFIX}_refusals",
            "What was refused or not believed, by reason: keys (key, admin_key), "
            "origins, hosts, bodies, times, connections, the tokenizer's troubles, "
            "answers of instances (answer), requests that are no HTTP (http).",
            ["reason"],
            registry=self.registry,
        )
        self.task_failures = Counter(
            f"{_PREFIX}_task_failures",
            "Background tasks that failed and began again, by task.",
            ["task"],
            registry=self.registry,
        )
        self.connections = Gauge(
            f"{_PREFIX}_connections",
            "Connections of clients that are open.",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            f"{_PREFIX}_body_bytes",
            "Bytes of the bodies of requests under way.",
            registry=self.registry,
        )
        self.registry_up = Gauge(
            f"{_PREFIX}_registry_up",
            "1 where the pool's registry can be used; 0 where not, or without one.",
            registry=self.registry,
        )
        self.leads = Gauge(
            f"{_PREFIX}_leads",
            "1 where this replica leads the others.",
            registry=self.registry,
        )
        self.leader = Gauge(
            f"{_PREFIX}_leader",
            "1 for the replica that leads, as this one knows it.",
            ["replica"],
            registry=self.registry,
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
