"""Ranks agree: on the time, and on the order of the queue, over a real gloo group."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.sglang.agreement import SharedClock

NUM_RANKS = 2
NUM_PASSES = 40

PROGRAM = """
import json, sys
import numpy as np
import torch.distributed as dist
from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.sglang.agreement import SharedClock, group_broadcast
from sgl_tiered.policies.order.base import Location
from sgl_tiered.policies.order.queue import Outlook, QueueOrder
from sgl_tiered.policies.order.registry import make_order

rank, num_ranks, num_passes = (int(a) for a in sys.argv[1:4])
dist.init_process_group("gloo", init_method="file://" + sys.argv[4],
                        rank=rank, world_size=num_ranks)
group = dist.new_group(backend="gloo")
# Each rank has a clock of its own, and costs that it measured itself.
own = np.random.default_rng(rank)
clock = ManualClock(1000.0 * rank)
shared = SharedClock(clock, group_broadcast(group))

class Source:
    def num_prompt_tokens(self, key):
        return 100
    def kin(self, key):
        return key % 7
    def guess(self, key):
        return Outlook(Location.NOWHERE, 100, 1.0, False)
    def look(self, key):
        where = list(Location)[int(own.integers(len(Location)))]
        return Outlook(where, 10, float(own.uniform(0.01, 2.0)), True)

queue = QueueOrder(make_order(sys.argv[5]), Source())
common = np.random.default_rng(5)
keys, joined, told = [], 0, []
for number in range(num_passes):
    clock.advance(float(own.uniform(0.0, 0.2)))
    num_new = int(common.integers(0, 6))
    keys += range(joined, joined + num_new)
    joined += num_new
    order = shared.decide(len(keys), lambda now_s: queue.arrange(keys, now_s))
    told.append([order, shared.now()])
    keys = [keys[i] for i in order][int(common.integers(0, 4)):]
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.sglang
@pytest.mark.parametrize("order", ["cost", "relaxed-fpf"])
def test_two_ranks_with_skewed_clocks_arrange_alike(tmp_path: Path, order: str) -> None:
    """Clocks 1,000 s apart and costs of their own: every pass has the same order and
    the same time on both, and something was reordered."""
    arguments = [str(NUM_RANKS), str(NUM_PASSES), str(tmp_path / "meet"), order]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    told = [rank.communicate(timeout=300)[0].splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS
    assert told[0] == told[1]
    passes = json.loads(told[0])
    assert any(positions != sorted(positions) for positions, _ in passes)
    times = [time_s for _, time_s in passes]
    assert times == sorted(times)
    assert times[-1] < 1000.0, "rank 0's clock"


class Wire:
    """What rank 0 sends, kept for the other rank."""

    def __init__(self, is_source: bool, sent: list[np.ndarray]) -> None:
        self.is_source = is_source
        self._sent = sent

    def send(self, values: np.ndarray) -> None:
        if self.is_source:
            self._sent.append(values.copy())
        else:
            values[:] = self._sent.pop(0)


def test_only_rank_0_decides() -> None:
    """The other takes its numbers and its time, and does not decide."""
    sent: list[np.ndarray] = []
    first = SharedClock(ManualClock(5.0), Wire(True, sent))
    second = SharedClock(ManualClock(99.0), Wire(False, sent))

    def refuse(now_s: float) -> list[int]:
        raise AssertionError(f"asked at {now_s}")

    assert first.decide(3, lambda now_s: [int(now_s), 2, 1]) == [5, 2, 1]
    assert second.decide(3, refuse) == [5, 2, 1]
    assert first.now() == second.now() == 5.0


def test_the_time_stands_still_between_two_decisions() -> None:
    """Whoever asks in a pass gets the same time, until the next is agreed on."""
    sent: list[np.ndarray] = []
    clock = ManualClock(1.0)
    shared = SharedClock(clock, Wire(True, sent))
    assert shared.tick() == 1.0
    clock.advance(2.0)
    assert shared.now() == 1.0
    assert shared.tick() == 3.0


def test_a_single_rank_sends_nothing() -> None:
    """It reads its own clock and decides by itself."""
    clock = ManualClock(1.0)
    shared = SharedClock(clock)
    assert shared.decide(2, lambda now_s: [1, 0]) == [1, 0]
    clock.advance(1.0)
    assert shared.now() == 2.0
    assert shared.tick() == 2.0
