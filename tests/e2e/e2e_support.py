"""What the end-to-end tests share: cases, schedules, references and small helpers.

A *case* is what plain SGLang and the tiered server have in common. Its reference is
recorded once, on plain SGLang whose pool holds everything (see the gate's docstring).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sgl_tiered_workloads.client import StreamingClient, run_chat
from sgl_tiered_workloads.gate import Spread, measure_spread, widest_spread
from sgl_tiered_workloads.records import RequestRecord
from sgl_tiered_workloads.server import SglangServer
from sgl_tiered_workloads.sessions import (
    ChatShape,
    PlannedRequest,
    chat_sessions,
    random_tokens,
    replay,
)
from sgl_tiered_workloads.systems import Device
from sgl_tiered_workloads.tokenizer import VOCAB_TOKENS

__all__ = [
    "FLOOR",
    "FORBIDDEN_IN_LOGS",
    "MODELS",
    "PATIENCE_S",
    "POOL_TOKENS",
    "Case",
    "Reference",
    "burst_requests",
    "drop",
    "edge",
    "open_loop",
    "pinned",
    "record_reference",
    "sequential",
    "settle",
    "stats",
    "wait_until",
]

MODELS = Path(__file__).parents[2] / ".cache" / "models"
POOL_TOKENS = 1536
"""Holds two of the longest prompts; the chats leave three times as much behind."""
REFERENCE_POOL_TOKENS = 16384
PATIENCE_S = 120.0
"""Upper bound of every wait: only a defect makes a test wait so long."""
START_TIMEOUT_S = 600.0
SHAPE = ChatShape(
    num_sessions=8,
    num_turns=3,
    system_tokens=128,
    first_tokens=400,
    user_tokens=40,
    answer_tokens=10,
)
BURST_PREFIX_TOKENS = 768
BURST_SIZE = 4
ANSWER_TOKENS = 8
FORBIDDEN_IN_LOGS = (
    "Traceback",
    "AssertionError",
    "leak detected",
    "double free",
    "use-after-free",
)
"""What no server's log may have: an invariant is broken."""
FLOOR = Spread(max_logprob=0.05, mean_logprob=0.005, max_gap=0.05, num_tokens=0)
"""Our CPU attention gives equal bits however a prompt is cut, but matrix products of
other heights round differently now and then, and a small sample may show none of it:
plain SGLang against itself moved a logprob by 0.095 on the demo's model. The negative
control must be caught with this floor in place."""


@dataclass(frozen=True, slots=True)
class Case:
    """What both servers have in common.

    Attributes:
        page_size: tokens per page.
        chunk_tokens: of a chunked prefill; None for SGLang's default.
        overlap: whether SGLang's overlap schedule is on.
        spins: whether an idle scheduler spins, as it does by default; else it sleeps,
            which leaves its core to others.
    """

    page_size: int
    chunk_tokens: int | None = None
    overlap: bool = True
    spins: bool = False

    @property
    def name(self) -> str:
        """Short name for tests and logs."""
        chunk = "" if self.chunk_tokens is None else f"-chunk{self.chunk_tokens}"
        return f"p{self.page_size}{chunk}{'' if self.overlap else '-sync'}"

    def device(self, model: Path, pool_tokens: int = POOL_TOKENS) -> Device:
        """Return the device level of a server of this case."""
        flags: tuple[str, ...] = ()
        if self.chunk_tokens is not None:
            flags += ("--chunked-prefill-size", str(self.chunk_tokens))
        if not self.overlap:
            flags += ("--disable-overlap-schedule",)
        if not self.spins:
            flags += ("--sleep-on-idle",)
        return Device(model, pool_tokens, self.page_size, flags)


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain SGLang's answers.

    Attributes:
        chat: multi-turn sessions, one request at a time, earlier prefixes cached.
        burst: prompts with one prefix, one at a time.
        spread: plain against itself, prefixes reused whole, by half or not at all.
    """

    chat: list[RequestRecord]
    burst: list[RequestRecord]
    spread: Spread


def burst_requests() -> list[PlannedRequest]:
    """Return prompts that share their first 768 tokens."""
    generator = np.random.default_rng(11)
    prefix = random_tokens(generator, BURST_PREFIX_TOKENS, VOCAB_TOKENS)
    return [
        PlannedRequest(
            f"b{i}", prefix + random_tokens(generator, 24, VOCAB_TOKENS), ANSWER_TOKENS
        )
        for i in range(BURST_SIZE)
    ]


def record_reference(server: SglangServer, shape: ChatShape = SHAPE) -> Reference:
    """Record a case's reference on a plain server with a large pool."""
    sessions = chat_sessions(shape, np.random.default_rng(5), VOCAB_TOKENS)

    async def talk() -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            return await run_chat(client, sessions)

    server.flush_cache()
    chat = asyncio.run(talk())
    # Every third one: enough tokens for the spread, and a third of the time.
    chosen = chat[::3]
    cold, halved = [], []
    for request in replay(chosen):
        server.flush_cache()
        cold += sequential(server, [request])
        server.flush_cache()
        half = request.prompt[: len(request.prompt) // 2]
        halved += sequential(server, [PlannedRequest("half", half, 1), request])[1:]
    server.flush_cache()
    burst = sequential(server, burst_requests())
    assert all(record.error is None for record in [*chat, *cold, *halved, *burst])
    spreads = [measure_spread(chosen, other) for other in (cold, halved)]
    return Reference(chat, burst, widest_spread([*spreads, FLOOR]))


def sequential(
    server: SglangServer,
    requests: Sequence[PlannedRequest],
    each: Callable[[RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send requests one after the other."""

    async def run() -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            return await client.run_sequential(requests, each)

    return asyncio.run(run())


def open_loop(
    server: SglangServer, requests: Sequence[PlannedRequest]
) -> list[RequestRecord]:
    """Send requests all at once, each as a request of its own."""

    async def run() -> list[RequestRecord]:
        async with StreamingClient(server.url, timeout_s=PATIENCE_S) as client:
            return await client.run_open_loop(requests)

    return asyncio.run(run())


def stats(server: SglangServer) -> dict[str, Any]:
    """Return the state of the tiers of a server with one scheduler."""
    (state,) = server.get("/tiered/stats", PATIENCE_S)
    assert isinstance(state, dict)
    return state


def pinned(state: dict[str, Any]) -> int:
    """Return how many slots of all tiers are in use by transfers."""
    return sum(int(tier["pinned"]) for tier in state["occupancy"].values())


def hang_the_first_store(server: SglangServer) -> None:
    """Send a prompt to a server whose first store is to hang; return once it does.

    Nothing else runs, so that no layer that leaves the device hangs in its stead.
    """
    server.generate(list(range(5, 105)), 1)
    wait_until(lambda: pinned(stats(server)) > 0, "the store hangs")


def edge(state: dict[str, Any], name: str, field: str = "pages") -> int:
    """Return a counter of an edge such as ``host->device``; 0 if unused."""
    return int(state["edges"].get(name, {}).get(field, 0))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_S:.0f} s in vain: {what}")
        time.sleep(0.05)


def change_weights(
    server: SglangServer, call: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Let a server take other weights, once its last request has left the batch.

    That is a moment after its answer: until then SGLang loads them and flushes nothing.
    """
    told: dict[str, Any] = {}

    def is_taken() -> bool:
        try:
            told.update(server.post(f"/{call}", request))
        except RuntimeError as error:
            if "requests are still running" not in str(error):
                raise
            return False
        return True

    wait_until(is_taken, "the batch is empty")
    return told


def settle(server: SglangServer) -> dict[str, Any]:
    """Wait until no transfer runs or is due; return the state then."""
    state: dict[str, Any] = {"edges": None, "occupancy": None}

    def still() -> bool:
        before = (state["edges"], state["occupancy"])
        state.clear()
        state.update(stats(server))
        same = before == (state["edges"], state["occupancy"]) and pinned(state) == 0
        if not same:
            # Two looks apart from each other: a demotion follows an offload.
            time.sleep(0.2)
        return same

    wait_until(still, "transfers end")
    # Not a third look: a write that a full disk refused may be tried again by then.
    return state


def drop(server: SglangServer, *tiers: str) -> None:
    """Let finished transfers settle, then make the server forget whole tiers."""
    settle(server)
    for tier in tiers:

        def dropped(tier: str = tier) -> bool:
            try:
                server.post(f"/tiered/drop?tier={tier}", {})
            except RuntimeError as error:
                # 409: the scheduler is not idle yet.
                if "409" not in str(error):
                    raise
                return False
            return True

        wait_until(dropped, f"the {tier} tier is dropped")
