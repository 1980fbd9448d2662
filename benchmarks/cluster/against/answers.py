"""Plain SGLang's answers, recorded once per schedule, and what of others is wrong.

Prompts do not depend on who answers them: they are those of the reference, so that
every system serves the same requests and each answer has one to be compared with. How
far plain SGLang is from itself (a prompt in parts, in other batches) is measured on
the same prompts, and a page of another prompt must be caught within it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_tiered_workloads.arrivals import ClosedLoop
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.driver import run_sessions
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
)
from sgl_tiered_workloads.harness.control import rounding_spread
from sgl_tiered_workloads.records import (
    RequestRecord,
    make_header,
    read_records,
    write_records,
)
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.turns import Session

__all__ = [
    "Reference",
    "Wrong",
    "is_answer",
    "judge",
    "kept_reference",
    "record_reference",
    "whole",
]

_IN_BATCHES = 48
"""Prompts that are asked for again, several at a time."""
_AT_A_TIME = 4
_SLACK = 2.0
"""As in the tests with free concurrency: batches are drawn anew in each run, and the
spread comes from one sample of them."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain SGLang's answers to a schedule.

    Attributes:
        records: in the order of sending.
        spread: how far plain SGLang is from itself on such prompts.
    """

    records: tuple[RequestRecord, ...]
    spread: Spread


@dataclass(frozen=True, slots=True)
class Wrong:
    """Answers that plain SGLang's own spread does not explain.

    Attributes:
        keys: of the requests.
        told: the first reasons.
        judged: answers that were compared.
    """

    keys: tuple[str, ...]
    told: tuple[str, ...]
    judged: int


def whole(record: RequestRecord) -> RequestRecord:
    """Return the record, or stop: without plain SGLang's answer nothing is judged."""
    if record.error is not None:
        raise RuntimeError(f"plain SGLang: {record.key} failed: {record.error}")
    return record


def kept_reference(path: Path) -> Reference | None:
    """Return a reference that an earlier call has written."""
    if not path.exists():
        return None
    header, records = read_records(path)
    return Reference(tuple(records), Spread(**header.facts["spread"]))


async def record_reference(
    server: SglangServer,
    sessions: Sequence[Session],
    page_size: int,
    path: Path,
    cut: Callable[[Sequence[RequestRecord]], Sequence[RequestRecord]],
) -> Reference:
    """Let plain SGLang answer a schedule, one request at a time, and keep that.

    Args:
        server: with a pool that holds all of it.
        sessions: with answers that the next turns carry.
        page_size: tokens in a page.
        path: of the file.
        cut: takes the records that are to be in the schedule.

    Raises:
        NegativeControlError: another prompt's page would pass as right.
    """
    await asyncio.to_thread(server.flush_cache)
    async with StreamingClient(server.url) as client:
        told = await run_sessions(client, sessions, ClosedLoop(1))
        records = [whole(record) for record in cut(told)]
        await asyncio.to_thread(server.flush_cache)
        batched = await _in_batches(client, records[:_IN_BATCHES])
    spreads = [measure_spread(records[:_IN_BATCHES], batched)]
    spread = await rounding_spread(server, records, page_size, beside=spreads)
    facts = {"spread": asdict(spread)}
    write_records(path, make_header("plain", facts), records)
    return Reference(tuple(records), spread)


async def _in_batches(
    client: StreamingClient, records: Sequence[RequestRecord]
) -> list[RequestRecord]:
    places = asyncio.Semaphore(_AT_A_TIME)

    async def ask(record: RequestRecord) -> RequestRecord:
        async with places:
            request = PlannedRequest(record.key, record.prompt, len(record.output))
            return whole(await client.send(request, record.order))

    return list(await asyncio.gather(*(ask(record) for record in records)))


def is_answer(record: RequestRecord) -> bool:
    """Whether a whole answer came."""
    return record.error is None


def judge(
    reference: Reference, answers: Sequence[RequestRecord], page_size: int
) -> Wrong:
    """Compare whole answers with plain SGLang's to the same prompts.

    A request without a whole answer is not judged here: it is counted as lost.
    """
    given = [record for record in answers if is_answer(record)]
    keys = {record.key for record in given}
    result = check_equality(
        [record for record in reference.records if record.key in keys],
        given,
        page_size=page_size,
        spread=reference.spread,
        forced=False,
        slack=_SLACK,
    )
    found = {each.key: f"{each.key}: {each.reason}" for each in result.differences}
    return Wrong(tuple(found), tuple(found.values())[:8], len(given))
