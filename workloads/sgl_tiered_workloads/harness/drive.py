"""Sends the sessions of a workload to one server, when they should leave.

A session's turns are causal: a turn leaves only after the answer to the one before,
and carries it. In the open processes a session begins at its own time, whatever is
running, and each later turn is targeted at the end of the answer before plus the time
that the user thinks. In the closed loop ``concurrency`` requests run at any time:
the next one is targeted at the moment when a place gets free, thinking is left out,
and the turns of all sessions are mixed in an order that only the seed decides, so that
sessions rest for shorter and longer while others speak. A session whose turn failed is
left out from then on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from sgl_tiered_workloads.harness.clients import Client
from sgl_tiered_workloads.harness.errors import HarnessError
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest

__all__ = ["Each", "Session", "mixed_turns", "run_closed", "run_open"]

Each = Callable[[RequestRecord], None]


class Session(Protocol):
    """A conversation; one request alone is a session of one turn."""

    @property
    def num_turns(self) -> int:
        """How many turns it has."""
        ...

    @property
    def finished(self) -> bool:
        """Whether every turn is answered."""
        ...

    def think_s(self) -> float:
        """Seconds between the last answer and the next turn."""
        ...

    def next_request(self) -> PlannedRequest:
        """Return the next turn's request, which carries the whole history."""
        ...

    def record_answer(self, answer: Sequence[int]) -> None:
        """Take the model's answer; it becomes part of the next prompt."""
        ...


def mixed_turns(num_turns: Sequence[int], generator: np.random.Generator) -> list[int]:
    """Return an order of all turns, as places of their sessions.

    Every session's first turn comes before any second one, and so on; within such a
    round the sessions are shuffled, so that rests are short and long, as with real
    users. A strict round robin would be LRU's worst case.
    """
    order: list[int] = []
    for turn in range(max(num_turns, default=0)):
        alive = [place for place, num in enumerate(num_turns) if num > turn]
        order.extend(int(place) for place in generator.permutation(alive))
    return order


async def run_closed(
    client: Client,
    sessions: Sequence[Session],
    concurrency: int,
    generator: np.random.Generator,
    each: Each,
) -> list[RequestRecord]:
    """Keep ``concurrency`` requests running until every session is finished."""
    waiting = mixed_turns([session.num_turns for session in sessions], generator)
    busy: set[int] = set()
    counter = itertools.count()
    records: list[RequestRecord] = []
    freed = asyncio.Condition()

    def pick() -> int | None:
        """Take the first waiting turn whose session is not being answered."""
        for index, place in enumerate(waiting):
            if place not in busy:
                return waiting.pop(index)
        return None

    async def work() -> None:
        while True:
            targeted_s = client.now_s()
            async with freed:
                while (place := pick()) is None:
                    if not waiting:
                        return
                    await freed.wait()
                    targeted_s = client.now_s()
                busy.add(place)
            record = await _turn(client, sessions[place], targeted_s, next(counter))
            records.append(record)
            each(record)
            async with freed:
                busy.discard(place)
                if record.error is not None:
                    waiting[:] = [other for other in waiting if other != place]
                freed.notify_all()

    await _all(work() for _ in range(concurrency))
    return records


async def run_open(
    client: Client,
    sessions: Sequence[Session],
    starts_s: Sequence[float],
    each: Each,
) -> list[RequestRecord]:
    """Begin each session at its own time, from now, and play it to its end."""
    zero_s = client.now_s()
    counter = itertools.count()
    records: list[RequestRecord] = []

    async def play(session: Session, start_s: float) -> None:
        targeted_s = zero_s + start_s
        while not session.finished:
            await asyncio.sleep(max(0.0, targeted_s - client.now_s()))
            record = await _turn(client, session, targeted_s, next(counter))
            records.append(record)
            each(record)
            if record.error is not None:
                return
            if not session.finished:
                targeted_s = record.token_times_s[-1] + session.think_s()

    await _all(
        play(session, start_s)
        for session, start_s in zip(sessions, starts_s, strict=True)
    )
    return records


async def _all(tasks: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run tasks together; the first that fails ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(task)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _turn(
    client: Client, session: Session, targeted_s: float, order: int
) -> RequestRecord:
    request = replace(session.next_request(), start_s=targeted_s)
    record = await client.send(request, order)
    if record.error is None and not record.output and session.num_turns > 1:
        raise HarnessError(
            f"{record.key}: the server tells no token ids, so the next turn cannot carry "
            "the answer; give the system a tokenizer or set extensions = true."
        )
    session.record_answer(record.output)
    return record
