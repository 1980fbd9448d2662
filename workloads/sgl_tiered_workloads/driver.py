"""Plays sessions concurrently against a client, keeping causal order in each.

Every record's ``targeted_s`` is on the client's clock: a first turn is due at its
arrival, a later one when the previous answer ended plus the session's pause. So
``started_s - targeted_s`` is the client's own lag.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from sgl_tiered_workloads.arrivals import Arrivals, ClosedLoop, OpenLoop
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import Session
from sgl_tiered_workloads.workload import Workload

__all__ = ["Client", "run_sessions", "run_workload"]

Each = Callable[[RequestRecord], None]


class Client(Protocol):
    """What a session needs of a client; ``StreamingClient`` is one."""

    def now_s(self) -> float:
        """Seconds on the client's clock."""

    async def send(self, request: PlannedRequest, order: int = 0) -> RequestRecord:
        """Send one request and return its record; failures are values."""


async def run_workload(
    client: Client, workload: Workload, each: Each | None = None
) -> list[RequestRecord]:
    """Play a workload and return its records in the order of sending."""
    return await run_sessions(client, workload.as_sessions(), workload.arrivals, each)


async def run_sessions(
    client: Client,
    sessions: Sequence[Session],
    arrivals: Arrivals,
    each: Each | None = None,
) -> list[RequestRecord]:
    """Play sessions as they arrive and return their records in the order of sending.

    A session whose turn failed ends there; the others go on. Under a closed loop a
    user takes the next session, in order, when the one before is finished.

    Args:
        client: sends the requests.
        sessions: not begun; they are used up.
        arrivals: a start for each session, or a concurrency.
        each: sees every record when its answer has ended, for progress.

    Raises:
        ValueError: there are not as many starts as sessions.
    """
    if isinstance(arrivals, OpenLoop) and len(arrivals.times_s) != len(sessions):
        raise ValueError(f"{len(arrivals.times_s)} starts for {len(sessions)} sessions")
    records: list[RequestRecord] = []
    orders = itertools.count()
    zero_s = client.now_s()

    async def play(session: Session, due_s: float) -> None:
        while True:
            await _sleep_until(client, due_s)
            request = replace(session.next_request(), start_s=due_s)
            record = await client.send(request, next(orders))
            ended_s = client.now_s()
            records.append(record)
            if each is not None:
                each(record)
            session.record_answer(record.output)
            if record.error is not None or session.finished:
                return
            due_s = ended_s + session.think_s

    if isinstance(arrivals, ClosedLoop):
        waiting = iter(sessions)

        async def user() -> None:
            for session in waiting:
                await play(session, client.now_s())

        tasks = [user() for _ in range(arrivals.concurrency)]
    else:
        starts = zip(sessions, arrivals.times_s, strict=True)
        tasks = [play(session, zero_s + start_s) for session, start_s in starts]
    await asyncio.gather(*tasks)
    return sorted(records, key=lambda record: record.order)


async def _sleep_until(client: Client, due_s: float) -> None:
    left_s = due_s - client.now_s()
    if left_s > 0:
        await asyncio.sleep(left_s)
