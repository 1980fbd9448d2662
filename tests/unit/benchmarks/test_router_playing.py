"""A run of the comparison of routers, against played servers."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from routers import loads, playing
from routers.playing import ADDED_AT, KILLED_AT, play
from sgl_tiered_workloads.arrivals import OpenLoop
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import Turn, TurnSession

NAMES = ("s0", "s1", "s2", "s3")
GAP_S = 0.02


class PlayedServer:
    """Counts what it answers, and ends when it is killed."""

    def __init__(self) -> None:
        self.served, self.ended = 5, False

    def flush_cache(self) -> None:
        assert not self.ended

    def exit_code(self) -> int | None:
        return -9 if self.ended else None

    def get(self, path: str) -> str:
        assert path == "/metrics"
        assert not self.ended, "a killed server was asked"
        return (
            "# HELP sglang:num_requests_total Number of requests.\n"
            f'sglang:num_requests_total{{is_streaming="true"}} {self.served}.0\n'
            'sglang:num_requests_total{is_streaming="false"} 2.0\n'
            f'sglang:evicted_tokens_total{{rank="0"}} {16.0 * self.served}\n'
        )


class PlayedCluster:
    """Servers by name; whoever is killed is there again when restarted."""

    def __init__(self) -> None:
        self.servers: dict[str, Any] = {name: PlayedServer() for name in NAMES}
        self.seen: list[str] = []

    def kill(self, name: str) -> None:
        self.seen.append(f"kill {name}")
        self.servers[name].ended = True

    def restart(self, name: str) -> None:
        self.seen.append(f"restart {name}")
        self.servers[name] = PlayedServer()


class PlayedRouter:
    """Hands requests round robin to those that it knows and that run."""

    def __init__(self, cluster: PlayedCluster) -> None:
        self.url, self.known, self._cluster = self, list(NAMES[:-1]), cluster
        self._turns = itertools.count()

    def start(self) -> None:
        self._cluster.seen.append("start")

    def stop(self) -> None:
        self._cluster.seen.append("stop")

    def answer(self) -> None:
        servers = [self._cluster.servers[name] for name in self.known]
        running = [server for server in servers if not server.ended]
        running[next(self._turns) % len(running)].served += 1


class PlayedClient:
    """Sends to the router that is its address."""

    def __init__(self, url: Any, *, tells_session: bool, session_prefix: str) -> None:
        assert tells_session
        assert session_prefix == "7."
        self._router = url

    async def __aenter__(self) -> PlayedClient:
        return self

    async def __aexit__(self, *failure: object) -> None:
        return None

    def now_s(self) -> float:
        return time.monotonic()

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        self._router.answer()
        now_s = self.now_s()
        return RequestRecord(
            request.key,
            order,
            request.prompt,
            now_s,
            now_s,
            (now_s,),
            (1,),
            cached_by_tier={"host": 3},
        )


def run(monkeypatch: pytest.MonkeyPatch, refusal: OSError | None) -> Any:
    cluster = PlayedCluster()
    router = PlayedRouter(cluster)

    def add(front: Any, member: Any) -> None:
        if refusal is not None:
            raise refusal
        cluster.seen.append(f"add {member.name}")
        front.service.known.append(member.name)

    monkeypatch.setattr(playing, "StreamingClient", PlayedClient)
    monkeypatch.setattr(playing, "add_instance", add)
    members = [SimpleNamespace(name=name) for name in NAMES]
    count = 20
    sessions = [TurnSession(f"chats-s{n}", [Turn((1, 2), 1)]) for n in range(count)]
    arrivals = OpenLoop(tuple(GAP_S * n for n in range(count)))
    front: Any = SimpleNamespace(service=router, name="session")
    told = asyncio.run(
        play(cluster, front, members, sessions, arrivals, "7.")  # type: ignore[arg-type]
    )
    return told, cluster


def test_a_server_is_killed_and_another_one_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this order and at their places; who served what is counted from then on."""
    told, cluster = run(monkeypatch, None)
    assert cluster.seen == ["start", "kill s1", "add s3", "stop", "restart s1"]
    span_s = GAP_S * 19
    assert told.struck.killed_s >= KILLED_AT * span_s - GAP_S
    assert told.struck.added_s >= ADDED_AT * span_s - GAP_S
    assert told.struck.added_s > told.struck.killed_s
    assert told.struck.why_not == ""
    assert set(told.served) == set(NAMES)
    assert told.served["s3"] > 0
    assert told.served["s1"] > 0
    # One that came between the count and the kill may be missing.
    assert 18 <= sum(told.served.values()) <= len(told.records) == 20
    assert told.evicted_tokens == 16 * sum(told.served.values())
    assert told.cached == {"host": 60}
    assert told.lost == []
    assert not cluster.servers["s1"].ended


def test_an_added_server_that_is_refused_is_in_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run goes on to its end, and says what the router said."""
    told, cluster = run(monkeypatch, ConnectionRefusedError("no room"))
    assert cluster.seen == ["start", "kill s1", "stop", "restart s1"]
    assert told.struck.killed_s is not None
    assert told.struck.added_s is None
    assert "s3 was not added: no room" in told.struck.why_not
    assert told.served["s3"] == 0
    assert len(told.records) == 20
    assert loads.kind_of(told.records[0].key) == "chats"


def test_a_counter_that_has_not_begun_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has evicted nothing yet does not name the metric."""
    server: Any = PlayedServer()
    assert playing.counted(server) == {"evicted": 80, "served": 7}
    monkeypatch.setattr(server, "get", lambda path: "# nothing\n")
    assert playing.counted(server) == {"evicted": 0, "served": 0}
