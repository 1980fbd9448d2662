"""One router in front of three servers, one of which is killed and another added.

A request ends in one of three ways, in the words of ``tests/cluster``: *answered*;
*broken*, if it had begun to stream and its server was killed: nobody can go on with it,
so the user asks again, and its time runs from the first try; *lost*, if it failed
before its first token, which a router is there to prevent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from routers.arms import Front, add_instance
from sgl_tiered_workloads.arrivals import OpenLoop
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.cluster.members import Member
from sgl_tiered_workloads.cluster.running import Cluster
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import Session

__all__ = ["ADDED_AT", "KILLED_AT", "Asking", "Played", "Struck", "counted", "play"]

KILLED_AT, ADDED_AT = 0.4, 0.7
"""Shares of the sessions that have begun when a server is killed, and one added."""
_TRIES = 3
_END_S = 5.0
_COUNTS = {
    "evicted": "sglang:evicted_tokens_total",
    "served": "sglang:num_requests_total",
}
"""Tokens that the device gave up, and whole answers, as servers count them."""


class Asking:
    """A client that asks again where its stream broke.

    Args:
        client: that sends.

    Attributes:
        num_broken: streams that broke after their first token.
    """

    def __init__(self, client: StreamingClient) -> None:
        self._client = client
        self.num_broken = 0

    def now_s(self) -> float:
        """Seconds on the client's clock."""
        return self._client.now_s()

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        """Send a request, again if its stream broke; times run from the first try."""
        first_s: float | None = None
        for _ in range(_TRIES):
            record = await self._client.send(request, order)
            first_s = record.started_s if first_s is None else first_s
            if record.error is None or not record.output:
                break
            self.num_broken += 1
        return replace(record, started_s=first_s)


@dataclass(slots=True)
class Struck:
    """What became of the kill and of the add.

    Attributes:
        killed_s, added_s: when, from the start of the load; None where it did not
            happen.
        before_kill: what the killed server had counted, as nobody can ask it later.
        why_not: what the router said to the added one.
    """

    killed_s: float | None = None
    added_s: float | None = None
    before_kill: dict[str, int] = field(default_factory=dict)
    why_not: str = ""


@dataclass(slots=True)
class Played:
    """What became of the requests of one run.

    Attributes:
        records: all of them; a lost one has an error.
        num_broken: streams that broke and were asked for again.
        evicted_tokens: that devices gave up meanwhile.
        served: answers by server; of the killed one those before the kill.
        struck: the kill and the add.
        cached: prompt tokens by the tier that had them.
    """

    records: list[RequestRecord]
    num_broken: int
    evicted_tokens: int
    served: dict[str, int]
    struck: Struck
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> list[RequestRecord]:
        """Requests without a whole answer."""
        return [record for record in self.records if record.error is not None]


def counted(server: SglangServer) -> dict[str, int]:
    """Return what a server has counted since it started, by the names of ``_COUNTS``.

    A counter that has not begun yet is 0.
    """
    lines = str(server.get("/metrics")).splitlines()
    return {
        name: int(
            sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith(metric)
            )
        )
        for name, metric in _COUNTS.items()
    }


async def play(
    cluster: Cluster,
    front: Front,
    members: Sequence[Member],
    sessions: Sequence[Session],
    arrivals: OpenLoop,
    prefix: str,
) -> Played:
    """Play sessions through a router, from empty caches; leave all servers running.

    Args:
        cluster: in which the servers run.
        front: the router, not started; it begins with all members but the last.
        members: the second one is killed, the last one added.
        sessions: not begun.
        arrivals: a start for each.
        prefix: of the sessions' names, so that each run hashes them anew.
    """
    for member in members:
        await asyncio.to_thread(cluster.servers[member.name].flush_cache)
    before = await _counts(cluster, members)
    killed, added = members[1], members[-1]
    struck = Struck()
    await asyncio.to_thread(front.service.start)
    strike = asyncio.create_task(
        _strike(cluster, front, killed, added, arrivals, struck)
    )
    try:
        async with StreamingClient(
            front.service.url, tells_session=True, session_prefix=prefix
        ) as client:
            asking = Asking(client)
            records = await run_sessions(asking, sessions, arrivals)
        await strike
    finally:
        strike.cancel()
        await asyncio.to_thread(front.service.stop)
    alive = [member for member in members if member is not killed]
    after = {killed.name: struck.before_kill, **await _counts(cluster, alive)}
    await asyncio.to_thread(cluster.restart, killed.name)
    cached: Counter[str] = Counter()
    for record in records:
        cached.update(record.cached_by_tier)
    return Played(
        records,
        asking.num_broken,
        sum(after[name]["evicted"] - before[name]["evicted"] for name in before),
        {name: after[name]["served"] - before[name]["served"] for name in before},
        struck,
        dict(cached),
    )


async def _strike(
    cluster: Cluster,
    front: Front,
    killed: Member,
    added: Member,
    arrivals: OpenLoop,
    struck: Struck,
) -> None:
    """Kill a server when so many sessions have begun, and add one later.

    A router that refuses the added one is no end of the run: ``struck`` says so.
    """
    began_s = time.monotonic()
    times_s = arrivals.times_s
    kill_s, add_s = (
        times_s[int(share * (len(times_s) - 1))] for share in (KILLED_AT, ADDED_AT)
    )
    await asyncio.sleep(kill_s)
    server = cluster.servers[killed.name]
    struck.before_kill = await asyncio.to_thread(counted, server)
    cluster.kill(killed.name)
    if await asyncio.to_thread(_has_ended, server):
        struck.killed_s = round(time.monotonic() - began_s, 2)
    await asyncio.sleep(max(0.0, began_s + add_s - time.monotonic()))
    try:
        await asyncio.to_thread(add_instance, front, added)
    except OSError as error:
        struck.why_not = f"{added.name} was not added: {error}"[:200]
    else:
        struck.added_s = round(time.monotonic() - began_s, 2)


def _has_ended(server: SglangServer) -> bool:
    """Whether a killed server's process is gone; waited for."""
    until_s = time.monotonic() + _END_S
    while server.exit_code() is None and time.monotonic() < until_s:
        time.sleep(0.05)
    return server.exit_code() is not None


async def _counts(
    cluster: Cluster, members: Sequence[Member]
) -> dict[str, dict[str, int]]:
    return {
        member.name: await asyncio.to_thread(counted, cluster.servers[member.name])
        for member in members
    }
