"""Measures a cell on a running server.

Prompts are random token ids that follow from the cell alone, so every system gets the
same ones. Answers are greedy. A prompt of a hit has half a page more than the hit's
length, so that exactly that length can be found and the rest is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from comparison.loads import run_load
from comparison.plan import LOAD_NAMES, Cell, num_prompts
from comparison.settings import Model, Sizes, patience_s
from comparison.systems import DISK, GATE, NO_REUSE, PLAIN, TTFT, System
from movement.servers import FLOOR
from reuse.parts import empty_above_disk, make_cold
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.gate import NegativeControlError, Spread
from sgl_tiered_workloads.harness.control import rounding_spread
from sgl_tiered_workloads.harness.turns import PATIENCE_S, bytes_by_edge, settle
from sgl_tiered_workloads.records import RequestRecord, make_header, write_records
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, no_reuse, random_tokens

__all__ = ["COMPUTED", "DEVICE", "HOST", "ON_DISK", "Measure", "warm_up"]

COMPUTED, DEVICE, HOST, ON_DISK = "computed", "device", "host", "disk"
_WARM = "warm-up"
"""State of what does not count."""
_PARTS = (GATE, TTFT, DISK, NO_REUSE, *LOAD_NAMES)
_WARM_TOKENS = 1500
_SLOWEST_DISK_BYTES_PER_S = 100e6
_LOOK_S, _QUIET_S = 0.02, 1.0


def warm_up(model: Model, pool_tokens: int) -> PlannedRequest:
    """Return a request that is sent thrice before anything counts."""
    tokens = min(_WARM_TOKENS, pool_tokens // 2, model.context_tokens // 2)
    prompt = random_tokens(np.random.default_rng(0), tokens, _ids(model))
    return PlannedRequest("warm", prompt, 4)


def _ids(model: Model) -> int:
    # Special tokens are the last ids of a vocabulary, or the first few.
    return max(model.vocabulary * 3 // 4, 64)


class Measure:
    """The cells of one system, while its server runs.

    Args:
        system: which one.
        server: its server, warmed up.
        model: that it serves.
        sizes: how much.
        page_size: tokens per page.
        pool_tokens: of the device.
        records: folder for records with logprobs.
        store: folder of its disk; None where it has none.
        say: takes progress lines.
    """

    def __init__(
        self,
        system: System,
        server: SglangServer,
        model: Model,
        sizes: Sizes,
        page_size: int,
        pool_tokens: int,
        records: Path,
        store: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._system, self._server = system, server
        self._model, self._sizes = model, sizes
        self._page_size, self._pool_tokens = page_size, pool_tokens
        self._records, self._store = records, store
        self._say = say
        self._warm_loads: set[str] = set()

    async def run(self, cell: Cell) -> dict[str, Any]:
        """Return what a cell found.

        Raises:
            RuntimeError: a request failed, or the server never came to rest.
        """
        await asyncio.to_thread(self._server.flush_cache)
        if cell.part == GATE:
            return await self._gate(cell.start)
        if cell.part == TTFT:
            return await self._ttft(cell.case)
        if cell.part == DISK:
            return await self._disk(cell.case)
        if cell.part == NO_REUSE:
            return await self._no_reuse(cell.start)
        assert cell.part in LOAD_NAMES, f"no part {cell.part}"
        if cell.part not in self._warm_loads:
            await self._load(cell.part)
            self._warm_loads.add(cell.part)
        return await self._load(cell.part)

    async def _load(self, name: str) -> dict[str, Any]:
        return await run_load(
            name,
            getattr(self._sizes, name),
            self._sizes.load_pools,
            self._pool_tokens,
            self._server,
            self._model,
            self._records.parent / "bench_serving",
        )

    def _prompts(self, part: str, length: int, count: int) -> list[tuple[int, ...]]:
        """Return the prompts of hits of a length."""
        rng = np.random.default_rng([_PARTS.index(part), length])
        tokens = length + self._page_size // 2
        return [random_tokens(rng, tokens, _ids(self._model)) for _ in range(count)]

    def _client(self, tokens: int, *, logprobs: bool = False) -> StreamingClient:
        """Return a client whose requests end after at most so many tokens."""
        return StreamingClient(
            self._server.url, logprobs=logprobs, timeout_s=patience_s(tokens)
        )

    async def _settle(self, tokens: int) -> None:
        """Wait until the KV of so many tokens is where it belongs."""
        written_s = tokens * self._model.token_bytes / _SLOWEST_DISK_BYTES_PER_S
        await settle(self._server, self._store, PATIENCE_S + written_s)

    async def _ttft(self, length: int) -> dict[str, Any]:
        """Compute prompts that push each other out, then hit each below, and again."""
        count = num_prompts(length, self._pool_tokens)
        prompts = self._prompts(TTFT, length, count)
        below = HOST if self._system.tiers else COMPUTED
        seen: list[dict[str, Any]] = []
        async with self._client(length) as client:

            async def send(number: int, state: str) -> None:
                answer = self._sizes.answer_tokens
                request = PlannedRequest(f"p{number}", prompts[number], answer)
                record = _answered(await client.send(request, len(seen)))
                seen.append(_told(record, state, number))

            for number in range(count):
                await send(number, COMPUTED if number else _WARM)
            await self._settle(count * length)
            for hit in range(self._sizes.hits + 1):
                await send(hit % count, below if hit else _WARM)
                await send(hit % count, DEVICE if hit else _WARM)
        return {"hit_tokens": length, "requests": seen}

    async def _disk(self, length: int) -> dict[str, Any]:
        """Compute prompts, then hit them with nothing above the disk, which is cold."""
        # The first ones of those whose answers plain SGLang gives.
        prompts = self._prompts(TTFT, length, self._sizes.disk_prompts)
        store = self._store
        assert store is not None, f"{self._system.name} has no disk"
        seen: list[dict[str, Any]] = []
        async with self._client(length) as client:

            async def send(number: int, state: str) -> dict[str, Any]:
                answer = self._sizes.answer_tokens
                request = PlannedRequest(f"p{number}", prompts[number], answer)
                record = _answered(await client.send(request, len(seen)))
                seen.append(_told(record, state, number))
                return seen[-1]

            for number in range(len(prompts)):
                await send(number, _WARM)
            await self._settle(len(prompts) * length)
            for hit in range(self._sizes.disk_hits + 1):
                await self._empty_above_disk()
                share = await asyncio.to_thread(make_cold, store)
                told = await send(hit % len(prompts), ON_DISK if hit else _WARM)
                told["resident_share"] = share
        return {"hit_tokens": length, "requests": seen}

    async def _no_reuse(self, start: int) -> dict[str, Any]:
        """Send prompts that never come again, so many at a time, until all is done.

        What a server still offloads after the last token is its own cost: the time
        goes on until it has come to rest, where it can be asked.
        """
        sizes = self._sizes
        rng = np.random.default_rng([_PARTS.index(NO_REUSE), start])
        num_warm = max(1, sizes.stream_prompts // 4)
        requests = no_reuse(
            num_warm + sizes.stream_prompts,
            sizes.stream_prompt_tokens,
            sizes.stream_answer_tokens,
            rng,
            _ids(self._model),
        )
        each = sizes.stream_prompt_tokens + sizes.stream_answer_tokens
        async with self._client(each * sizes.stream_concurrency) as client:
            await self._stream(client, requests[:num_warm])
            await self._settle(each * num_warm)
            before = await asyncio.to_thread(bytes_by_edge, self._server)
            records = await self._stream(client, requests[num_warm:])
            end_s = max(record.token_times_s[-1] for record in records)
            rest_s = await self._rest_s(client, end_s)
        after = await asyncio.to_thread(bytes_by_edge, self._server)
        return {
            "seconds": end_s - min(record.started_s for record in records),
            "drain_s": rest_s - end_s,
            "tokens": sum(len(one.prompt) + len(one.output) for one in records),
            "ttft_s": [record.ttft_s for record in records],
            "outputs": [list(record.output) for record in records],
            "moved_bytes": {edge: n - before.get(edge, 0) for edge, n in after.items()},
        }

    async def _stream(
        self, client: StreamingClient, requests: Sequence[PlannedRequest]
    ) -> list[RequestRecord]:
        """Keep as many requests running as are wanted; return records in order."""
        records: list[RequestRecord] = []
        waiting = deque(enumerate(requests))

        async def one_after_the_other() -> None:
            while waiting:
                order, request = waiting.popleft()
                records.append(await client.send(request, order))
                if records[-1].error is not None:
                    waiting.clear()

        workers = range(self._sizes.stream_concurrency)
        await asyncio.gather(*(one_after_the_other() for _ in workers))
        return sorted(map(_answered, records), key=lambda record: record.order)

    async def _rest_s(self, client: StreamingClient, end_s: float) -> float:
        """Return when a server moved its last byte, on the client's clock.

        Args:
            client: of the stream.
            end_s: when the last token came; the answer where nobody can be asked.

        Raises:
            RuntimeError: it never came to rest.
        """
        moved = await asyncio.to_thread(bytes_by_edge, self._server)
        if not moved:
            return end_s
        quiet_s = client.now_s()
        limit_s = quiet_s + PATIENCE_S
        while (now_s := client.now_s()) < quiet_s + _QUIET_S:
            if now_s > limit_s:
                raise RuntimeError(f"it still offloads after {PATIENCE_S:.0f} s")
            await asyncio.sleep(_LOOK_S)
            told = await asyncio.to_thread(bytes_by_edge, self._server)
            if told != moved:
                moved, quiet_s = told, client.now_s()
                end_s = quiet_s
        return end_s

    async def _gate(self, start: int) -> dict[str, Any]:
        """Answer prompts cold, and again from below; keep records with logprobs.

        Plain SGLang answers each one's second time from the device, with the same
        length found: computed alike on both sides, so that equal bits may be asked.
        """
        length = self._sizes.lengths[0]
        prompts = self._prompts(GATE, length, self._sizes.gate_prompts)
        cold, again = (
            [
                PlannedRequest(f"g{number}.{word}", prompt, self._answer())
                for number, prompt in enumerate(prompts)
            ]
            for word in ("cold", "again")
        )
        is_plain = not self._system.tiers
        async with self._client(length, logprobs=True) as client:
            first = await client.run_sequential(cold)
            if not is_plain:
                await self._push_below(length, len(prompts))
            second = [
                await client.send(request, len(cold) + place)
                for place, request in enumerate(again)
            ]
        records = [_answered(record) for record in (*first, *second)]
        name = f"{self._system.name}.gate.{start}.jsonl"
        facts: dict[str, Any] = {"page_size": self._page_size, "hit_tokens": length}
        header = make_header(self._system.name, facts)
        write_records(self._records / name, header, records)
        found: dict[str, Any] = {"records": name}
        if self._system.name == PLAIN and start == 0:
            spread, why = await self._spread(records[: len(cold)])
            found |= {"spread": None if spread is None else asdict(spread)}
            found |= {"why_no_spread": why}
        return found

    def _answer(self) -> int:
        return self._sizes.gate_answer_tokens

    async def _empty_above_disk(self) -> None:
        """Empty device and host; a server is idle shortly after its last answer."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                await asyncio.to_thread(empty_above_disk, self._server)
            except RuntimeError:
                if time.monotonic() > give_up_s:
                    raise
            else:
                return
            await asyncio.sleep(_LOOK_S)

    async def _push_below(self, length: int, num_seen: int) -> None:
        """Leave nothing of the gate's prompts on the device, nor above a disk."""
        await self._settle(num_seen * length)
        if self._system.has_disk:
            await self._empty_above_disk()
            return
        count = num_prompts(length, self._pool_tokens)
        others = self._prompts(GATE, length, num_seen + count)[num_seen:]
        async with self._client(length) as client:
            for number, prompt in enumerate(others):
                _answered(await client.send(PlannedRequest(f"f{number}", prompt, 1)))
        await self._settle(count * length)

    async def _spread(self, records: list[RequestRecord]) -> tuple[Spread | None, str]:
        """Measure how plain's answers move where a prompt is computed in parts."""
        try:
            spread = await rounding_spread(
                self._server, records, self._page_size, beside=(FLOOR,)
            )
        except (NegativeControlError, ValueError) as problem:
            return None, str(problem).partition("\n")[0]
        self._say(
            f"    {self._system.name}: a wrong page is caught; computed in parts, "
            f"logprobs move {spread.max_logprob:.4f} at most"
        )
        return spread, ""


def _answered(record: RequestRecord) -> RequestRecord:
    if record.error is not None:
        raise RuntimeError(f"request {record.key} failed: {record.error}")
    return record


def _told(record: RequestRecord, state: str, number: int) -> dict[str, Any]:
    return {
        "state": state,
        "prompt": number,
        "ttft_s": record.ttft_s,
        "e2e_s": record.e2e_s,
        "cached_tokens": record.cached_tokens,
        "cached_by_tier": dict(record.cached_by_tier),
        "output": list(record.output),
    }
