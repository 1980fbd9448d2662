"""One router in front of three servers, one of which is killed and another added.

A request ends in one of three ways, in the words of ``tests/cluster``: *answered*;
*broken*, if it had begun to stream and its server was killed: nobody can go on with it,
so the user asks again, and its time runs from the first try; *lost*, if it failed
before its first token, which a router is there to prevent.
"""

from __future__ import annotations

import asyncio
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

__all__ = ["ADDED_AT", "KILLED_AT", "Asking", "Played", "evicted_tokens", "play"]

KILLED_AT, ADDED_AT = 0.4, 0.7
"""Shares of the sessions that have begun when a server is killed, and one added."""
_TRIES = 3
_EVICTED = "sglang:evicted_tokens_total"


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
class Played:
    """What became of the requests of one measurement.

    Attributes:
        records: all of them; a lost one has an error.
        num_broken: streams that broke and were asked for again.
        evicted_tokens: that devices gave up meanwhile.
        cached: prompt tokens by the tier that had them.
    """

    records: list[RequestRecord]
    num_broken: int
    evicted_tokens: int
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> list[RequestRecord]:
        """Requests without a whole answer."""
        return [record for record in self.records if record.error is not None]


def evicted_tokens(server: SglangServer) -> int:
    """Return what a server's device has given up since it started, in tokens."""
    text = str(server.get("/metrics"))
    lines = [line for line in text.splitlines() if line.startswith(_EVICTED)]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


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
    before = await _evictions(cluster, members)
    killed, added = members[1], members[-1]
    after: dict[str, int] = {}
    await asyncio.to_thread(front.service.start)
    strike = asyncio.create_task(
        _strike(cluster, front, killed, added, arrivals, after)
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
    after |= await _evictions(cluster, alive)
    await asyncio.to_thread(cluster.restart, killed.name)
    cached: Counter[str] = Counter()
    for record in records:
        cached.update(record.cached_by_tier)
    return Played(
        records,
        asking.num_broken,
        sum(after[name] - before[name] for name in before),
        dict(cached),
    )


async def _strike(
    cluster: Cluster,
    front: Front,
    killed: Member,
    added: Member,
    arrivals: OpenLoop,
    after: dict[str, int],
) -> None:
    """Kill a server when so many sessions have begun, and add one later.

    What the killed one had evicted is noted in ``after``, as nobody can ask it later.
    """
    times_s = arrivals.times_s
    kill_s, add_s = (
        times_s[int(share * (len(times_s) - 1))] for share in (KILLED_AT, ADDED_AT)
    )
    await asyncio.sleep(kill_s)
    server = cluster.servers[killed.name]
    after[killed.name] = await asyncio.to_thread(evicted_tokens, server)
    cluster.kill(killed.name)
    await asyncio.sleep(max(0.0, add_s - kill_s))
    await asyncio.to_thread(add_instance, front, added)


async def _evictions(cluster: Cluster, members: Sequence[Member]) -> dict[str, int]:
    return {
        member.name: await asyncio.to_thread(
            evicted_tokens, cluster.servers[member.name]
        )
        for member in members
    }
