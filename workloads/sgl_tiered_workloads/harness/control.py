"""The gate's negative control: answers as a cache with one wrong page gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.sessions import PlannedRequest, swap_page

__all__ = ["answer_with_swapped_pages", "swappable"]


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
