"""Answers that calibrate the gate: with one wrong page, and rounded otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    negative_control,
    widest_spread,
)
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, swap_page

__all__ = [
    "answer_in_parts",
    "answer_with_swapped_pages",
    "rounding_spread",
    "swappable",
]


async def answer_with_swapped_pages(
    client: StreamingClient,
    first: RequestRecord,
    second: RequestRecord,
    page: int,
    page_size: int,
) -> list[RequestRecord]:
    """Let a server answer two prompts as if one page of each were the other's.

    The records claim the right prompts, as those of a server with a wrong page would.
    """
    wrong = []
    for record, donor in ((first, second), (second, first)):
        request = PlannedRequest(record.key, record.prompt, len(record.output))
        damaged = swap_page(request, donor.prompt, page, page_size)
        answer = await client.send(damaged, record.order)
        wrong.append(replace(answer, prompt=record.prompt))
    return wrong


async def answer_in_parts(
    client: StreamingClient, record: RequestRecord, page_size: int
) -> RequestRecord:
    """Let a server with an empty cache compute a prompt in three passes.

    Matrix products of other heights round otherwise, on plain SGLang too. That is what
    a tiered server may do to an answer when it computes a part of a prompt only.
    """
    num_pages = (len(record.prompt) - 1) // page_size
    for place, end in enumerate((num_pages // 16, num_pages // 2)):
        if end:
            part = record.prompt[: end * page_size]
            await client.send(PlannedRequest(f"{record.key}.part{place}", part, 1), 0)
    request = PlannedRequest(record.key, record.prompt, len(record.output))
    return await client.send(request, record.order)


async def rounding_spread(
    server: SglangServer,
    records: Sequence[RequestRecord],
    page_size: int,
    num_prompts: int = 6,
    beside: Sequence[Spread] = (),
) -> Spread:
    """Measure how a prompt computed in parts differs; a wrong page must show in it.

    Args:
        server: plain SGLang with its radix cache, idle.
        records: of the prompts; some are taken, evenly.
        page_size: tokens per page.
        num_prompts: how many to take at most.
        beside: spreads that are to count as well; a wrong page must show in all.

    Raises:
        NegativeControlError: another prompt's page would pass within this spread.
        ValueError: no two of the prompts differ in a page.
    """
    whole, parts = [], []
    async with StreamingClient(server.url) as client:
        for record in records[:: -(-len(records) // num_prompts)]:
            await asyncio.to_thread(server.flush_cache)
            request = PlannedRequest(record.key, record.prompt, len(record.output))
            whole.append(await client.send(request, record.order))
            await asyncio.to_thread(server.flush_cache)
            parts.append(await answer_in_parts(client, record, page_size))
        spread = widest_spread([measure_spread(whole, parts), *beside])
        pair = swappable(whole, page_size)
        if pair is None:
            raise ValueError("no two prompts differ in a page")
        await asyncio.to_thread(server.flush_cache)
        first, second, page = pair
        wrong = await answer_with_swapped_pages(client, first, second, page, page_size)
    caught = check_equality(
        [first, second], wrong, page_size=page_size, spread=spread, forced=False
    )
    negative_control({"another prompt's page": caught})
    return spread


def swappable(
    records: Sequence[RequestRecord], page_size: int
) -> tuple[RequestRecord, RequestRecord, int] | None:
    """Find two prompts and a page to swap; None where no two prompts differ so.

    The page is the second that differs. The first ends what the two share, so hits stop
    before the swapped page, and damaged and right prompts are computed alike.
    """
    for first, second in combinations(records, 2):
        num_pages = (min(len(first.prompt), len(second.prompt)) - 1) // page_size
        differing = [
            page
            for page in range(num_pages)
            if _page(first, page, page_size) != _page(second, page, page_size)
        ]
        if len(differing) > 1:
            return first, second, differing[1]
    return None


def _page(record: RequestRecord, page: int, page_size: int) -> tuple[int, ...]:
    return record.prompt[page * page_size : (page + 1) * page_size]
