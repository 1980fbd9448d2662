"""Table 3's programs between real processes, by every transport that is installed."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import pytest
from programs.migration import Migration, take_migrated
from programs.sequence_parallel import Pattern

from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.pool.layouts import Way
from sgl_tiered.testing.transport_peer import open_transport
from tests.unit.benchmarks.program_support import (
    FAR_S,
    RUNNING,
    TRANSPORTS,
    Instance,
    Part,
    QueueChannel,
    serve_until,
    wait,
)
from tests.unit.benchmarks.toy_decoder import PAGE, SHAPE, ToyDecoder

PROMPT = np.random.default_rng(9).integers(0, 40, 7 * PAGE).astype(np.int32)
NUM_PAGES = (3, 1, 3)
NUM_STEPS = 10
STEPS_BEFORE = 5
WAITING_S = 2 * FAR_S


def rest() -> None:
    time.sleep(1e-3)


def migrate(
    rank: int,
    inboxes: Sequence[Queue[Any]],
    results: Queue[Any],
    stop: Event,
    transport: str,
) -> None:
    """Instance 0 begins a request and instance 1 ends it."""
    node = Instance(rank, 2, QueueChannel(inboxes, rank), transport, rest)

    def poll() -> None:
        node.pool.poll()
        rest()

    if rank == 1:
        arrivals: list[Any] = []
        wait(lambda: bool(arrivals.extend(node.pool.take_arrivals()) or arrivals), poll)
        request = take_migrated(arrivals[0])
        assert request is not None
        done = node.decode(request, NUM_STEPS - STEPS_BEFORE)
        results.put((rank, done.tokens.tolist()))
        serve_until(stop, node)
    request = node.prefill("r", PROMPT, 8)
    migration = Migration(node.pool, 1, 12, page_tokens=PAGE, way=Way.BY_LAYER)
    for _ in range(STEPS_BEFORE):
        migration.copy(request.blocks, request.num_computed)
        request = node.decode(request, 1)
        node.pool.poll()
        migration.poll()
    migration.hand_over(request)
    wait(lambda: migration.poll() is not RUNNING, poll)
    results.put((rank, migration.error))
    serve_until(stop, node)


def prefill_part(
    rank: int,
    inboxes: Sequence[Queue[Any]],
    results: Queue[Any],
    stop: Event,
    transport: str,
) -> None:
    """Every process computes a part; the last one answers."""
    num = len(NUM_PAGES)
    node = Instance(rank, num, QueueChannel(inboxes, rank), transport, rest)
    for pattern in Pattern:
        part = Part(node, range(num), rank, NUM_PAGES, PROMPT, pattern)
        for _ in part.steps():
            rest()
        assert part.logits is not None, part.exchange.error
        results.put((rank, pattern.value, part.logits.tobytes()))
    serve_until(stop, node)


def run(program: Any, num: int, transport: str, num_results: int) -> list[Any]:
    """Run a program in so many processes; return what they say."""
    try:
        open_transport(TRANSPORTS[transport]).close()
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    context = multiprocessing.get_context("spawn")
    inboxes = [context.Queue() for _ in range(num)]
    results, stop = context.Queue(), context.Event()
    processes = [
        context.Process(target=program, args=(rank, inboxes, results, stop, transport))
        for rank in range(num)
    ]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=WAITING_S) for _ in range(num_results)]
    finally:
        stop.set()
        for process in processes:
            process.join(WAITING_S)
            process.kill()
            process.join()
        for inbox in inboxes:
            inbox.cancel_join_thread()
            inbox.close()
        results.close()


def reference() -> tuple[bytes, list[int]]:
    """Logits of the prompt, and all tokens, on one instance."""
    (num_pages,) = (len(PROMPT) // PAGE + NUM_STEPS // PAGE + 2,)
    page_bytes = SHAPE.num_layers * 2 * SHAPE.page_tokens * SHAPE.num_heads * 32
    model = ToyDecoder(np.zeros((num_pages, page_bytes), np.uint8))
    blocks = np.arange(num_pages, dtype=np.uint64)
    logits = model.compute(PROMPT, 0, blocks)
    first = logits.tobytes()
    tokens = np.append(PROMPT, np.argmax(logits)).astype(np.int32)
    for done in range(len(PROMPT), len(PROMPT) + NUM_STEPS):
        logits = model.compute(tokens[done : done + 1], done, blocks)
        tokens = np.append(tokens, np.argmax(logits)).astype(np.int32)
    return first, tokens.tolist()


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_a_request_migrates_between_processes(transport: str) -> None:
    """It goes on in the other process with the tokens of a single one."""
    said = dict(run(migrate, 2, transport, 2))
    _, tokens = reference()
    assert said == {0: "", 1: tokens}


@pytest.mark.parametrize("transport", list(TRANSPORTS))
def test_a_prompt_in_parts_over_processes(transport: str) -> None:
    """Three processes, both patterns: the last one's logits are those of one."""
    num = len(NUM_PAGES)
    said = run(prefill_part, num, transport, 2 * num)
    logits, _ = reference()
    for pattern in Pattern:
        by_rank = {rank: found for rank, what, found in said if what == pattern.value}
        assert len(by_rank) == num
        assert by_rank[num - 1] == logits
