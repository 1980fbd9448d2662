"""One server at a time: a batch that decodes, prefixes that are reloaded, counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hybrid.arms import PAGE, Scale, question
from hybrid.window import Window, window_of
from movement.tools import answered, stats
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.fleet import Fleet
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import ServerSpec, SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = ["Decode", "Moved", "Reloads", "Servers", "decode", "moved", "reload"]

WARM_UP = PlannedRequest("warm", tuple(range(100, 900)), 16)
_TO_DEVICE = ("bytes_streamed", "bytes_pulled")
_COUNTED = (*_TO_DEVICE, "bytes_offloaded", "requests", "stall_s")
_ACTIVATIONS = ("act_pages", "kv_pages", "bytes_saved", "rebuild_s")
_REBUILT = ("rebuild_exposed_s", "rebuild_layer_pages")
_POLL_S = 0.1
_PATIENCE_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """What layers of some requests did, by the counters of ``GET /tiered/stats``.

    Attributes:
        figures: without ``layerkv_``; of activations only where there are any.
    """

    figures: Mapping[str, float]

    @property
    def to_device_bytes(self) -> float:
        """Bytes of KV and activations that crossed the link to the device."""
        return sum(self.figures[name] for name in _TO_DEVICE)

    @property
    def overlap(self) -> float | None:
        """Share of rebuilding that went on under loads; None where nothing was."""
        rebuild_s = self.figures.get("rebuild_s", 0.0)
        if rebuild_s <= 0:
            return None
        return 1.0 - self.figures["rebuild_exposed_s"] / rebuild_s

    @property
    def rebuild_token_s(self) -> float:
        """Mean seconds to rebuild a token of a layer.

        Raises:
            ZeroDivisionError: nothing was rebuilt.
        """
        tokens = PAGE * self.figures["rebuild_layer_pages"]
        return self.figures["rebuild_s"] / tokens

    @property
    def act_share(self) -> float:
        """Of the pages of the requests: what was kept as activations."""
        num_act = self.figures.get("act_pages", 0.0)
        num_pages = num_act + self.figures.get("kv_pages", 0.0)
        return num_act / num_pages if num_pages else 0.0


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> Moved:
    """Return the difference of two ``layerkv`` parts of the stats."""
    names = [*_COUNTED, *_ACTIVATIONS, *_REBUILT]
    keys = {name: f"layerkv_{name}" for name in names}
    return Moved(
        {
            name: float(after[key]) - float(before.get(key, 0.0))
            for name, key in keys.items()
            if key in after
        }
    )


@dataclass(frozen=True, slots=True)
class Decode:
    """One batch on one server.

    Attributes:
        window: its decode phase.
        records: of the requests, in their order.
        moved: by all steps of the batch, prompts included.
        total_s: from sending to the last token.
        layers: the ``layerkv`` part of the stats afterwards.
    """

    window: Window
    records: tuple[RequestRecord, ...]
    moved: Moved
    total_s: float
    layers: Mapping[str, Any]

    @property
    def num_generated(self) -> int:
        """Tokens that decode steps have made: all but each answer's first."""
        return sum(len(record.output) - 1 for record in self.records)

    @property
    def bytes_per_token(self) -> float:
        """Bytes over the link to the device per generated token."""
        return self.moved.to_device_bytes / self.num_generated

    @property
    def tokens_per_s(self) -> float:
        """Answers' tokens over all of it, prompts included."""
        return sum(len(record.output) for record in self.records) / self.total_s


@dataclass(frozen=True, slots=True)
class Reloads:
    """Questions to prefixes that only the host has.

    Attributes:
        ttft_s: of each.
        cached_tokens: that each found.
        bytes_each: over the link to the device, mean.
    """

    ttft_s: tuple[float, ...]
    cached_tokens: tuple[int, ...]
    bytes_each: float

    @property
    def p50_s(self) -> float:
        """Median TTFT."""
        return float(np.median(self.ttft_s))


class Servers:
    """Starts servers, one at a time unless they are compared run by run.

    Args:
        logs: folder of their logs.
        first_port: of the servers; None for any free ones.
        say: takes progress lines.
    """

    def __init__(self, logs: Path, first_port: int | None, say: Say) -> None:
        self._logs = logs
        self._first_port = first_port
        self._say = say

    @asynccontextmanager
    async def running(
        self, *specs: ServerSpec
    ) -> AsyncIterator[tuple[SglangServer, ...]]:
        """Let servers run, warmed up and empty.

        Raises:
            ServerStartError: one did not start.
        """
        named = {spec.name: spec for spec in specs}
        with Fleet(named, self._logs, self._first_port, self._say) as fleet:
            await fleet.only(named, WARM_UP)
            yield tuple(fleet.servers[name] for name in named)


async def decode(server: SglangServer, requests: Sequence[PlannedRequest]) -> Decode:
    """Send a batch as one message to an emptied server; wait for all of it."""
    await asyncio.to_thread(server.flush_cache)
    before = await _layers(server)
    async with StreamingClient(server.url, logprobs=False) as client:
        records = [answered(one) for one in await client.send_batch(requests)]
    after = await _layers(server, int(before["layerkv_requests"]) + len(requests))
    total_s = max(one.token_times_s[-1] for one in records) - records[0].started_s
    return Decode(
        window_of(records), tuple(records), moved(before, after), total_s, after
    )


async def reload(
    server: SglangServer, scale: Scale, generator: np.random.Generator
) -> Reloads:
    """Bring prefixes in, one pushing the other out, then ask each in turn.

    The device holds less than one of them. The first round does not count.
    """
    await asyncio.to_thread(server.flush_cache)
    prefixes = [
        random_tokens(generator, scale.prefix_tokens, VOCAB_TOKENS)
        for _ in range(scale.prefixes)
    ]
    rounds = -(-scale.reloads // scale.prefixes)
    ended = int((await _layers(server))["layerkv_requests"])
    async with StreamingClient(server.url, logprobs=False) as client:

        async def ask(name: str) -> list[RequestRecord]:
            asked = [
                question(prefix, generator, f"{name}.p{n}")
                for n, prefix in enumerate(prefixes)
            ]
            return [answered(one) for one in await client.run_sequential(asked)]

        for name in ("first", "warm"):
            await ask(name)
        before = await _layers(server, ended + 2 * len(prefixes))
        records = [one for n in range(rounds) for one in await ask(f"r{n}")]
        after = await _layers(server, int(before["layerkv_requests"]) + len(records))
    num_bytes = moved(before, after).to_device_bytes
    return Reloads(
        tuple(one.ttft_s for one in records),
        tuple(one.cached_tokens for one in records),
        num_bytes / len(records),
    )


async def _layers(server: SglangServer, num_requests: int = 0) -> dict[str, Any]:
    """Return the counters of layers, once so many requests have ended.

    Raises:
        RuntimeError: they never did.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        layers: dict[str, Any] = (await asyncio.to_thread(stats, server))["layerkv"]
        if layers["layerkv_requests"] >= num_requests:
            return layers
        if time.monotonic() > give_up_s:
            raise RuntimeError(
                f"{server.spec.name}: {layers['layerkv_requests']} requests have ended "
                f"and not {num_requests}"
            )
        await asyncio.sleep(_POLL_S)
