"""The reference's answers, and the gate that compares every system with them.

The reference is plain SGLang whose device pool holds everything: what others load from
below, it finds on the device, with equal lengths. So equal bits may be asked of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from reuse.results import Findings
from reuse.schedules import PAGE_SIZE
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import (
    Spread,
    check_equality,
    measure_spread,
    negative_control,
    plain_spread,
    widest_spread,
)
from sgl_tiered_workloads.harness.control import (
    answer_in_parts,
    answer_with_swapped_pages,
)
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest

__all__ = ["Reference"]

_SWAPPED_PAGE = 4
_IN_PARTS = 2


class Reference:
    """Answers by label of the schedule.

    Args:
        findings: told when the gate is red.
        say: takes progress lines.
    """

    def __init__(self, findings: Findings, say: Callable[[str], None]) -> None:
        self.answers: dict[str, list[RequestRecord]] = {}
        self._spread: Spread | None = None
        self._findings = findings
        self._say = say

    async def answer(
        self, server: SglangServer, label: str, requests: Sequence[PlannedRequest]
    ) -> list[RequestRecord]:
        """Let the reference answer a schedule, from empty caches."""
        await asyncio.to_thread(server.flush_cache)
        async with StreamingClient(server.url) as client:
            records = await client.run_sequential(requests)
        self.answers[label] = records
        self._say(f"  reference: {label}, {len(records)} requests")
        return records

    async def control(self, server: SglangServer) -> None:
        """Demand that a wrong page is caught.

        Two cold prompts are answered as if one early page were the other's; the records
        claim the right prompts, as those of a server with a wrong page would.

        Raises:
            NegativeControlError: the gate let it pass.
        """
        await asyncio.to_thread(server.flush_cache)
        right = next(iter(self.answers.values()))[:2]
        async with StreamingClient(server.url) as client:
            wrong = await answer_with_swapped_pages(
                client, right[0], right[1], _SWAPPED_PAGE, PAGE_SIZE
            )
        caught = check_equality(
            right, wrong, page_size=PAGE_SIZE, min_exact_fraction=0.0
        )
        negative_control({"another prompt's page": caught})
        self._say(f"  negative control: caught, {caught.differences[0].reason}")

    async def measure_rounding(self, server: SglangServer) -> None:
        """Compute some prompts of each schedule in parts, for the near-tie rule."""
        whole, parts = [], []
        for label, records in self.answers.items():
            for record in [r for r in records if not r.cached_tokens][:_IN_PARTS]:
                await asyncio.to_thread(server.flush_cache)
                async with StreamingClient(server.url) as client:
                    part = await answer_in_parts(client, record, PAGE_SIZE)
                # Working sets of different sizes have the same keys.
                key = f"{label}: {record.key}"
                parts.append(replace(part, key=key))
                whole.append(replace(record, key=key))
        self._spread = measure_spread(whole, parts)
        self._say(
            "  plain against itself, computed in parts: top-5 logprobs move "
            f"{self._spread.max_logprob:.4f} at most"
        )

    def check(
        self,
        label: str,
        name: str,
        records: Sequence[RequestRecord],
        must_cover: Iterable[str],
        plain: Sequence[RequestRecord] | None = None,
    ) -> None:
        """Compare a system's answers with the reference's.

        Args:
            label: of the schedule.
            name: of the system.
            records: its answers.
            must_cover: tiers that must be behind an answer that was compared exactly.
            plain: plain SGLang with the small pool on the same schedule. It recomputes
                where the reference hits, which together with ``measure_rounding`` gives
                what a decision to recompute may rightly cause. Without it only exact
                requests count.
        """
        reference = self.answers[label]
        spread = None
        if plain is not None:
            spread = plain_spread(reference, plain, PAGE_SIZE)
            if self._spread is not None:
                spread = widest_spread([spread, self._spread])
        result = check_equality(
            reference,
            records,
            page_size=PAGE_SIZE,
            spread=spread,
            min_exact_fraction=0.5,
            must_cover=must_cover,
        )
        self._say(f"  {label}, {name}: {result.summary()}")
        if not result.passed:
            self._findings.outputs_identical = False
            self._findings.problems.append(f"{label}, {name}: the gate is red")
