"""KV of answers on its way back: few at a time, and dropped where it cannot go."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from sgl_tiered.pool.base import BlockType
from sgl_tiered.serving.disagg.returning import AnswerReturns, Ended
from sgl_tiered.transport.base import TransferStatus

PREFILL = (3, 8)
TOKENS = np.arange(32, dtype=np.int32)
BLOCKS = np.arange(2, dtype=np.uint64)


@dataclass
class FakeTransfer:
    """One that a test ends."""

    status: TransferStatus = TransferStatus.RUNNING
    num_inserted: int = 2


class FakePool:
    """Notes what is sent; a test ends it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, np.ndarray, np.ndarray, dict]] = []
        self.transfers: list[FakeTransfer] = []
        self.held = BLOCKS

    def match(self, tokens, *, namespace=b""):
        assert namespace == b"model"
        return self.held

    def transfer_with_insert(self, id, tokens, blocks, **how):
        self.sent.append((id, tokens, blocks, how))
        self.transfers.append(FakeTransfer())
        return self.transfers[-1]


class Rig:
    """Returns over a fake pool, with one member."""

    def __init__(self) -> None:
        self.pool = FakePool()
        self.members = {PREFILL}
        self.counts: Counter[str] = Counter()
        self.returns = AnswerReturns(
            self.pool,
            lambda *place: place in self.members,
            lambda name, number: self.counts.update({name: number}),
        )

    def ended(self, count: int = 1) -> None:
        for _ in range(count):
            self.returns.add(Ended(PREFILL, b"model", TOKENS))

    def poll(self, times: int) -> None:
        for _ in range(times):
            self.returns.poll()


def test_an_answer_goes_back() -> None:
    """To who computed the prompt, into its host tier, checked, only what it lacks."""
    rig = Rig()
    rig.ended()
    rig.poll(1)
    ((instance, tokens, blocks, how),) = rig.pool.sent
    assert instance == 3
    assert tokens is TOKENS
    assert blocks is BLOCKS
    assert how.pop("timeout_s") > 0
    assert how == {
        "namespace": b"model",
        "type": BlockType.HOST,
        "only_missing": True,
        "checked": True,
    }
    assert rig.returns.num_under_way == 1
    rig.pool.transfers[0].status = TransferStatus.DONE
    rig.poll(1)
    assert rig.counts == {"returns": 1, "pages_returned": 2}
    assert rig.returns.num_under_way == 0


def test_a_poll_begins_one_and_four_run() -> None:
    """However many requests end at once."""
    rig = Rig()
    rig.ended(10)
    rig.poll(1)
    assert len(rig.pool.sent) == 1
    rig.poll(20)
    assert len(rig.pool.sent) == 4
    rig.pool.transfers[2].status = TransferStatus.DONE
    rig.poll(20)
    assert len(rig.pool.sent) == 5


def test_who_is_gone_gets_nothing() -> None:
    """Neither does the next start under its name: it has another incarnation."""
    rig = Rig()
    rig.members = {(3, 9)}
    rig.ended(2)
    rig.poll(3)
    assert not rig.pool.sent
    assert rig.counts == {"returns_dropped": 2}


def test_what_fails_is_not_tried_again() -> None:
    """The next turn computes it."""
    rig = Rig()
    rig.ended(2)
    rig.poll(2)
    rig.pool.transfers[0].status = TransferStatus.FAILED
    rig.pool.transfers[1].status = TransferStatus.TIMED_OUT
    rig.poll(5)
    assert len(rig.pool.sent) == 2
    assert rig.counts == {"returns_failed": 2}


def test_what_was_evicted_is_dropped() -> None:
    """Or never came to the host tier."""
    rig = Rig()
    rig.pool.held = BLOCKS[:0]
    rig.ended()
    rig.poll(1)
    assert not rig.pool.sent
    assert rig.counts == {"returns_dropped": 1}


def test_the_oldest_of_too_many_is_dropped() -> None:
    """What waits is bounded."""
    rig = Rig()
    rig.ended(300)
    assert rig.returns.num_under_way == 256
    assert rig.counts == {"returns_dropped": 44}


def test_what_waits_can_be_forgotten() -> None:
    """When the weights change, say."""
    rig = Rig()
    rig.ended(6)
    rig.poll(2)
    rig.returns.clear()
    rig.poll(2)
    assert len(rig.pool.sent) == 2
