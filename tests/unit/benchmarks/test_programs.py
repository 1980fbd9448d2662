"""Table 3's programs: a migrated request and a prompt in parts give the same bits."""

from __future__ import annotations

import time

import numpy as np
import pytest
from programs.migration import Migration, RunningRequest, take_migrated
from programs.notes import read_note, write_note
from programs.sequence_parallel import Pattern

from sgl_tiered.pool.layouts import Way
from sgl_tiered.pool.mempool import PoolUsage
from sgl_tiered.pool.messages import as_entry
from sgl_tiered.pool.receiver import Arrival
from sgl_tiered.transport.base import TransferStatus
from tests.unit.benchmarks.program_support import (
    DONE,
    RUNNING,
    Instance,
    ListChannel,
    Part,
    wait,
)
from tests.unit.benchmarks.toy_decoder import PAGE

PROMPT = np.random.default_rng(5).integers(0, 40, 4 * PAGE + 3).astype(np.int32)
NUM_STEPS = 14
NOTHING = PoolUsage(0, 0, 0, 0, 0)


class Pair:
    """Instances of one process that know each other."""

    def __init__(self, num: int) -> None:
        inboxes: list[list] = [[] for _ in range(num)]
        self.nodes: list[Instance] = []
        for n in range(num):
            self.nodes.append(
                Instance(n, num, ListChannel(inboxes, n), "loopback", self.pump_all)
            )
        memory_of = {node.instance: as_entry(node.pool.info) for node in self.nodes}
        for node in self.nodes:
            node.memory_of = memory_of
            node.see(range(num))

    def pump_all(self) -> None:
        """Let everybody look after his affairs."""
        for node in self.nodes:
            node.pool.poll()
        time.sleep(1e-4)

    def close(self) -> None:
        """Close all transports."""
        for node in self.nodes:
            node.transport.close()


@pytest.fixture
def pair():
    """Two instances."""
    made = Pair(2)
    yield made
    made.close()


@pytest.fixture
def four():
    """Four instances."""
    made = Pair(4)
    yield made
    made.close()


def settled(world: Pair) -> None:
    wait(lambda: all(n.pool.usage() == NOTHING for n in world.nodes), world.pump_all)


def alone(pair: Pair, num_steps: int) -> tuple[RunningRequest, np.ndarray]:
    """The same request on one instance, its blocks free again, and its KV."""
    node = pair.nodes[0]
    request = node.decode(node.prefill("alone", PROMPT, 5), num_steps)
    kv = kv_of(node, request)
    assert not node.pool.free_mem(request.blocks)
    node.memory[:] = 0
    return request, kv


def kv_of(node: Instance, request: RunningRequest) -> np.ndarray:
    """The KV of a request's computed tokens, by position."""
    slots = (request.blocks & np.uint64(0xFFFFFFFF)).astype(np.int64)
    pages = node.model.kv[slots].transpose(1, 2, 0, 3, 4, 5)
    num_layers, halves, _, _, heads, width = pages.shape
    flat = pages.reshape(num_layers, halves, -1, heads, width)
    return flat[:, :, : request.num_computed].copy()


@pytest.mark.parametrize("way", [Way.BY_LAYER, Way.BY_REQUEST, Way.BY_REQUEST_AGG])
@pytest.mark.parametrize("steps_before", [0, 1, 9])
def test_a_migrated_request_goes_on_with_the_same_tokens(
    pair: Pair, way: Way, steps_before: int
) -> None:
    """KV, tokens and settings arrive; the answer is one instance's, bit for bit."""
    expected, kv = alone(pair, NUM_STEPS)
    here, there = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    migration = Migration(here.pool, 1, 12, page_tokens=PAGE, way=way)
    for _ in range(steps_before):
        migration.copy(request.blocks, request.num_computed)
        request = here.decode(request, 1)
        pair.pump_all()
        assert migration.poll() is RUNNING
    before = kv_of(here, request)
    migration.hand_over(request)
    wait(lambda: migration.poll() is not RUNNING, pair.pump_all)
    assert migration.poll() is DONE, migration.error
    (arrival,) = there.pool.take_arrivals()
    arrived = take_migrated(arrival)
    assert arrived is not None
    assert (arrived.rid, arrived.num_prompt) == ("r", len(PROMPT))
    assert arrived.settings == b"greedy"
    assert arrived.tokens.tolist() == request.tokens.tolist()
    assert kv_of(there, arrived).tobytes() == before.tobytes()
    finished = there.decode(arrived, NUM_STEPS - steps_before)
    assert finished.tokens.tolist() == expected.tokens.tolist()
    assert kv_of(there, finished).tobytes() == kv.tobytes()
    settled(pair)
    assert here.used() == 0
    assert there.used() == len(finished.blocks)


def test_pages_go_while_the_request_runs(pair: Pair) -> None:
    """Each full page once; the stop sends what is left."""
    here, _ = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    migration = Migration(here.pool, 1, 12, page_tokens=PAGE)
    migration.copy(request.blocks, request.num_computed)
    assert migration.num_sent == 4
    migration.copy(request.blocks, request.num_computed)
    assert migration.num_sent == 4
    request = here.decode(request, 2)
    migration.copy(request.blocks, request.num_computed)
    assert migration.num_sent == 5
    migration.hand_over(here.decode(request, 1))
    assert migration.num_sent == 6
    wait(lambda: migration.poll() is not RUNNING, pair.pump_all)
    assert not migration.error


def test_without_room_the_request_stays(pair: Pair) -> None:
    """Nothing is left there, and it decodes on here to the same answer."""
    expected, _ = alone(pair, 5)
    here, there = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    migration = Migration(here.pool, 1, 1000, page_tokens=PAGE)
    assert migration.poll() is TransferStatus.FAILED
    assert "no room for 1000" in migration.error
    assert here.decode(request, 5).tokens.tolist() == expected.tokens.tolist()
    assert there.used() == 0


@pytest.mark.parametrize("moment", ["copying", "last"])
def test_an_aborted_migration_leaves_nothing(pair: Pair, moment: str) -> None:
    """Blocks there are free again, those here are the request's still."""
    here, there = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    migration = Migration(here.pool, 1, 12, page_tokens=PAGE)
    migration.copy(request.blocks, request.num_computed)
    if moment == "last":
        migration.hand_over(request)

        # Up to where the last step has begun: nobody reads it there.
        def advance() -> None:
            here.pool.poll()
            time.sleep(1e-4)

        wait(lambda: migration.poll() is RUNNING and migration._last, advance)
    migration.abort()
    assert migration.may_have_arrived == (moment == "last")
    settled(pair)
    for arrival in there.pool.take_arrivals():
        assert not there.pool.free_mem(arrival.addresses)
    assert there.used() == 0
    assert not here.pool.free_mem(request.blocks)


def test_a_receiver_that_dies_fails_it(pair: Pair) -> None:
    """In one clause; the request's blocks are its own."""
    here, _ = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    migration = Migration(here.pool, 1, 12, page_tokens=PAGE)
    migration.copy(request.blocks, request.num_computed)
    here.see([0])
    assert migration.poll() is TransferStatus.FAILED
    assert migration.error == "instance 1 is gone"
    assert not migration.may_have_arrived
    assert not here.pool.free_mem(request.blocks)


def test_more_pages_than_room_fail_it(pair: Pair) -> None:
    """The request outgrew what was allocated; it goes on here."""
    here, there = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    migration = Migration(here.pool, 1, 4, page_tokens=PAGE)
    migration.hand_over(request)
    assert migration.poll() is TransferStatus.FAILED
    assert "do not fit" in migration.error
    settled(pair)
    assert there.used() == 0


# A prompt in parts.


def whole(pair: Pair, prompt: np.ndarray) -> tuple[np.ndarray, RunningRequest]:
    """Logits and KV of a prompt on one instance."""
    node = pair.nodes[-1]
    blocks = node.blocks(-(-len(prompt) // PAGE))
    logits = node.model.compute(prompt, 0, blocks)
    kv = kv_of(node, RunningRequest("w", prompt, len(prompt), len(prompt), blocks))
    request = RunningRequest(
        "w",
        np.append(prompt, np.argmax(logits)).astype(np.int32),
        len(prompt),
        len(prompt),
        blocks,
    )
    tokens = node.decode(request, 6)
    assert not node.pool.free_mem(tokens.blocks)
    node.memory[:] = 0
    return kv, RunningRequest("w", tokens.tokens, len(prompt), 0, blocks)


@pytest.mark.parametrize("pattern", list(Pattern))
@pytest.mark.parametrize("num_pages", [(3, 2), (1, 4, 2), (2, 2, 1, 3)])
def test_a_prompt_in_parts_equals_one_instance(
    four: Pair, pattern: Pattern, num_pages: tuple[int, ...]
) -> None:
    """The last member's KV, its logits and what it decodes are the same bits."""
    four.nodes = four.nodes[: len(num_pages)]
    size = PAGE * sum(num_pages)
    prompt = np.random.default_rng(8).integers(0, 40, size).astype(np.int32)
    kv, expected = whole(four, prompt)
    members = [node.instance for node in four.nodes]
    parts = [
        Part(node, members, rank, num_pages, prompt, pattern)
        for rank, node in enumerate(four.nodes)
    ]
    running = [part.steps() for part in parts]
    clear = object()

    def step() -> None:
        for steps in list(running):
            if next(steps, clear) is clear:
                running.remove(steps)

        time.sleep(1e-4)

    wait(lambda: not running, step)
    assert [part.exchange.error for part in parts] == [""] * len(parts)
    last = four.nodes[-1]
    blocks = parts[-1].exchange.blocks()
    logits = parts[-1].logits
    assert logits is not None
    tokens = np.append(prompt, np.argmax(logits)).astype(np.int32)
    request = RunningRequest("p", tokens, size, size, blocks)
    assert kv_of(last, request).tobytes() == kv.tobytes()
    assert last.decode(request, 6).tokens.tolist() == expected.tokens.tolist()
    settled(four)
    # The prompt in parts becomes historical like any other.
    assert last.pool.insert(prompt, blocks).num_inserted == sum(num_pages)
    assert last.pool.match(prompt).tolist() == blocks.tolist()


def test_a_ring_sends_to_one_neighbour_only(four: Pair) -> None:
    """All-gather has a lane to everybody after it; the ring forwards instead."""
    prompt = np.zeros(4 * PAGE, np.int32)
    for pattern, receivers, num in (
        (Pattern.RING, [{1}, {2}, {3}, set()], [1, 2, 3, 0]),
        (Pattern.ALL_GATHER, [{1, 2, 3}, {2, 3}, {3}, set()], [3, 2, 1, 0]),
    ):
        parts = [
            Part(node, range(4), rank, (1, 1, 1, 1), prompt, pattern)
            for rank, node in enumerate(four.nodes)
        ]
        lanes = [part.exchange._lanes for part in parts]
        assert [{lane.to for lane in some} for some in lanes] == receivers
        assert [len(some) for some in lanes] == num
        for part in parts:
            part.exchange.close()
            assert not part.node.pool.free_mem(part.own)
    settled(four)
    assert [node.used() for node in four.nodes] == [0, 0, 0, 0]


def test_a_member_that_dies_fails_the_exchange(four: Pair) -> None:
    """Those before it give up their lanes; nothing of theirs stays anywhere."""
    four.nodes = four.nodes[:3]
    prompt = np.zeros(3 * PAGE, np.int32)
    parts = [
        Part(node, range(3), rank, (1, 1, 1), prompt, Pattern.ALL_GATHER)
        for rank, node in enumerate(four.nodes)
    ]
    steps = parts[0].steps()
    next(steps, None)
    for node in four.nodes[:2]:
        node.see([0, 1])
    wait(lambda: bool(parts[0].exchange.error), parts[0].poll)
    assert "gone" in parts[0].exchange.error
    assert parts[0].exchange.is_over
    wait(lambda: four.nodes[1].used() == 1, four.pump_all)


def test_without_room_nothing_is_begun(four: Pair) -> None:
    """A receiver that is full refuses, and what was allocated before is given back."""
    four.nodes = four.nodes[:3]
    full = four.nodes[2].blocks(48)
    part = Part(four.nodes[0], range(3), 0, (2, 1, 1), PROMPT, Pattern.ALL_GATHER)
    assert "instance 2 has no room for 2 blocks" in part.exchange.error
    settled(four)
    assert four.nodes[1].used() == 0
    assert not four.nodes[2].pool.free_mem(full)


def test_a_layer_that_never_came_fails_the_exchange(pair: Pair) -> None:
    """Its note went to another exchange of that name: what is there is not read."""
    part = Part(pair.nodes[1], range(2), 1, (1, 1), PROMPT[: 2 * PAGE], Pattern.RING)
    head = {"name": "prompt by ring", "part": 0, "layer": 1}
    arrival = Arrival((0, 1), np.zeros(0, np.uint64), write_note("sequence", head), 0)
    assert part.exchange.poll([arrival]) == []
    assert "layer 1 of part 0 came out of its order" in part.exchange.error
    assert not part.exchange.has(0)


# Disaggregated inference by calls alone.


def test_prefill_here_and_decode_there(pair: Pair) -> None:
    """PD-Basic: the active KV goes by ``transfer``, the metadata in ``private``."""
    expected, _ = alone(pair, 6)
    here, there = pair.nodes
    request = here.prefill("r", PROMPT, 5)
    sent = here.pool.transfer(1, request.blocks, private=request.tokens.tobytes())
    wait(lambda: sent.status is not RUNNING, pair.pump_all)
    assert not sent.error
    assert not here.pool.free_mem(request.blocks)
    (arrival,) = there.pool.take_arrivals()
    tokens = np.frombuffer(arrival.private, np.int32)
    arrived = RunningRequest("r", tokens, len(PROMPT), len(PROMPT), arrival.addresses)
    assert there.decode(arrived, 6).tokens.tolist() == expected.tokens.tolist()


def test_notes_of_others_are_none_of_ours() -> None:
    """Anything may be in ``private``: it is no note, and no error."""
    note = write_note("a", {"x": 1}, b"rest")
    assert read_note("a", note) == ({"x": 1}, b"rest")
    for raw in (b"", b"\x02", b"\xff" * 9, b"\x02\0\0\0[]", note[:-12]):
        assert read_note("a", raw) is None
    assert read_note("b", note) is None
