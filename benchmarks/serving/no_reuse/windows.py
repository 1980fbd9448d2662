"""What is measured: windows of prompts that never come again, in turns.

A window sends the same prompts to each server as to the others, ``USERS`` at a time:
first prompts with short answers (nearly all of it prefill), then short prompts with
long answers (nearly all of it decode). A block is a window on every server and then
another on every server in the opposite order (ABBA), so that a steady drift of the
machine is the same for all; who begins changes from block to block. All servers but
the one that is measured are asleep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from sgl_tiered_workloads.arrivals import ClosedLoop
from sgl_tiered_workloads.client import StreamingClient
from sgl_tiered_workloads.driver import run_workload
from sgl_tiered_workloads.harness.turns import PATIENCE_S, rotated
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import PlannedRequest, no_reuse
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS
from sgl_tiered_workloads.workload import Workload

__all__ = ["PARTS", "USERS", "Part", "Window", "block_order", "prompts", "run_block"]

USERS = 4
_LOOK_S = 0.25
_QUIET_CPU_S = 0.02
"""CPU seconds between two looks at which a server counts as at rest."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a window: so many prompts, and tokens of each and of its answer."""

    name: str
    num_prompts: int
    prompt_tokens: int
    answer_tokens: int


PARTS = (Part("short_answers", 6, 1000, 8), Part("long_answers", 4, 120, 64))
"""Together 15 CPU seconds with the bench model: many short blocks in a run tell more
than a few long ones, as the machine changes from minute to minute."""


@dataclass(frozen=True, slots=True)
class Window:
    """One window on one server.

    Attributes:
        server: its name.
        start: which one of the server.
        block: of which it is one of two windows of this server.
        seconds: by part, from the first request to the last answer.
        cpu_s: of all processes of the server, until it was at rest again.
        prompts: sent.
    """

    server: str
    start: int
    block: int
    seconds: Mapping[str, float]
    cpu_s: float
    prompts: int


def prompts(
    seed: int, number: int, parts: Sequence[Part] = PARTS
) -> list[list[PlannedRequest]]:
    """Return the requests of window ``number``, by part; no two windows share any."""
    generator = np.random.default_rng([seed, number])
    return [
        no_reuse(
            part.num_prompts,
            part.prompt_tokens,
            part.answer_tokens,
            generator,
            VOCAB_TOKENS,
        )
        for part in parts
    ]


def block_order(names: Sequence[str], block: int) -> list[str]:
    """Return whose turn it is in a block: there, and back again."""
    there = rotated(names, block)
    return [*there, *reversed(there)]


async def run_block(
    servers: Mapping[str, SglangServer],
    start: int,
    block: int,
    seed: int,
    parts: Sequence[Part] = PARTS,
) -> list[Window]:
    """Measure two windows on every server.

    Raises:
        RuntimeError: a request failed, or a server never came to rest.
    """
    windows = []
    for place, name in enumerate(block_order(list(servers), block)):
        # The way back brings other prompts than the way there.
        requests = prompts(seed, 2 * block + place // len(servers), parts)
        by_part = dict(zip((part.name for part in parts), requests, strict=True))
        windows.append(await _window(servers[name], start, block, by_part))
    return windows


async def _window(
    server: SglangServer,
    start: int,
    block: int,
    parts: Mapping[str, Sequence[PlannedRequest]],
) -> Window:
    before_s = _cpu_s(server)
    seconds = {}
    async with StreamingClient(server.url, logprobs=False) as client:
        for part, requests in parts.items():
            work = Workload("no-reuse", ClosedLoop(USERS), requests=tuple(requests))
            began_s = time.perf_counter()
            records = await run_workload(client, work)
            seconds[part] = time.perf_counter() - began_s
            for record in records:
                if record.error is not None:
                    name = server.spec.name
                    raise RuntimeError(f"{name}: {record.key} failed: {record.error}")
    # What it still copies is of this window's prompts.
    cpu_s = await _cpu_s_at_rest(server) - before_s
    num = sum(map(len, parts.values()))
    return Window(server.spec.name, start, block, seconds, cpu_s, num)


async def _cpu_s_at_rest(server: SglangServer) -> float:
    """Return the CPU seconds of a server so far, once it computes nothing any more.

    Nothing is asked of the server meanwhile: that would cost it CPU seconds.
    """
    before_s = _cpu_s(server)
    for _ in range(int(PATIENCE_S / _LOOK_S)):
        await asyncio.sleep(_LOOK_S)
        now_s = _cpu_s(server)
        if now_s - before_s < _QUIET_CPU_S:
            return now_s
        before_s = now_s
    raise RuntimeError(f"{server.spec.name} is never idle")


def _cpu_s(server: SglangServer) -> float:
    """Return the CPU seconds of all processes of a server so far, ended ones too."""
    root = psutil.Process(server.pid)
    every = (root, *root.children(recursive=True))
    # User and system time, and those of children that have ended.
    return float(sum(sum(each.cpu_times()[:4]) for each in every))
