"""What the benches of movement share: prompts, tiers emptied, and ratios of pairs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.harness.statistics import Interval, median_interval
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, random_tokens
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = [
    "ANSWER_TOKENS",
    "Prompts",
    "answered",
    "drop",
    "interval",
    "send",
    "stats",
    "use_policy",
    "wait_for_pages",
]

ANSWER_TOKENS = 2
_POLL_S = 0.2
_IDLE_POLL_S = 0.02
_PATIENCE_S = 120.0


@dataclass(slots=True)
class Prompts:
    """Draws prompts; ``fresh`` never gives the same tokens twice."""

    generator: np.random.Generator

    def tokens(self, count: int) -> tuple[int, ...]:
        """Return random token ids."""
        return tuple(random_tokens(self.generator, count, VOCAB_TOKENS))

    def after(self, prefix: Sequence[int], num_new: int, key: str) -> PlannedRequest:
        """Return a request for a known prefix and fresh tokens."""
        prompt = (*prefix, *self.tokens(num_new))
        return PlannedRequest(key, prompt, ANSWER_TOKENS)


def answered(record: RequestRecord) -> RequestRecord:
    """Return the record, or stop the bench: a request that failed has no time."""
    if record.error is not None:
        raise RuntimeError(f"{record.key} failed: {record.error}")
    return record


def drop(server: SglangServer, *tiers: str) -> None:
    """Empty tiers of a server on which nothing runs."""
    for tier in tiers:
        _when_idle(server, f"/tiered/drop?tier={tier}")


def use_policy(server: SglangServer, policy: str) -> None:
    """Let an idle server load by another policy."""
    _when_idle(server, f"/tiered/load-policy?policy={policy}")


def _when_idle(server: SglangServer, path: str) -> None:
    """Post what an idle server takes; it is one shortly after its last answer."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            server.post(path, {})
            return
        except RuntimeError:
            if time.monotonic() > give_up_s:
                raise
        time.sleep(_IDLE_POLL_S)


def stats(server: SglangServer) -> dict[str, Any]:
    """Return the state of the tiers of the only scheduler."""
    found: list[dict[str, Any]] = server.get("/tiered/stats")
    return found[0]


async def wait_for_pages(server: SglangServer, tier: str, num_pages: int) -> None:
    """Wait until a tier holds as many pages.

    Raises:
        RuntimeError: it never did.
    """
    give_up_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_s:
        occupancy = (await asyncio.to_thread(stats, server))["occupancy"][tier]
        if occupancy["used"] - occupancy["pinned"] >= num_pages:
            return
        await asyncio.sleep(_POLL_S)
    raise RuntimeError(f"{server.spec.name}: {tier} never held {num_pages} pages")


async def send(server: SglangServer, requests: Sequence[PlannedRequest]) -> list[float]:
    """Send requests at once; return their TTFTs in seconds."""
    async with StreamingClient(server.url, logprobs=False) as client:
        tasks = [client.send(request, n) for n, request in enumerate(requests)]
        records = await asyncio.gather(*tasks)
    return [answered(record).ttft_s for record in records]


def interval(samples: Sequence[float]) -> Interval:
    """Return the median with its 95 % interval, or its range for few samples."""
    if len(samples) >= 6:
        return median_interval(samples)
    return Interval(float(np.median(samples)), min(samples), max(samples))
