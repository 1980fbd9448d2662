"""The queue's memory: who came when, and how often anybody is looked up."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_tiered.policies.order.base import Location, WaitingFacts
from sgl_tiered.policies.order.fpf import FPFOrder
from sgl_tiered.policies.order.queue import Outlook, QueueOrder


class Source:
    """Requests are words; the first letter is what they share."""

    def __init__(self) -> None:
        self.on_device: set[str] = set()
        self.looked: list[str] = []

    def num_prompt_tokens(self, key: str) -> int:
        return len(key)

    def kin(self, key: str) -> str:
        return key[0]

    def guess(self, key: str) -> Outlook:
        return Outlook(Location.NOWHERE, len(key), 1.0, has_history=False)

    def look(self, key: str) -> Outlook:
        self.looked.append(key)
        if key[0] in self.on_device:
            return Outlook(Location.DEVICE, 1, 0.1, has_history=True)
        return self.guess(key)


class Recorder:
    """First come first served, and remembers what it saw."""

    name = "recorder"
    needs_facts = True

    def __init__(self) -> None:
        self.seen: list[WaitingFacts] = []

    def arrange(
        self, waiting: Sequence[WaitingFacts], now_s: float, pass_number: int
    ) -> list[int]:
        self.seen = list(waiting)
        return list(range(len(waiting)))


def test_arrival_is_the_first_pass_that_sees_a_request() -> None:
    """However its queue is arranged afterwards."""
    order = Recorder()
    queue: QueueOrder[str] = QueueOrder(order, Source())
    queue.arrange(["a1", "b1"], 1.0)
    assert queue.arrange(["b1", "c1", "a1"], 2.0) == [2, 0, 1]
    assert [(f.index, f.arrival_s) for f in order.seen] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
    ]


def test_who_left_and_comes_again_is_new() -> None:
    """A request that was retracted goes to the end."""
    queue: QueueOrder[str] = QueueOrder(Recorder(), Source())
    queue.arrange(["a1", "b1"], 1.0)
    queue.arrange(["b1"], 2.0)
    assert queue.arrange(["a1", "b1"], 3.0) == [1, 0]
    assert queue.facts("a1") is not None
    queue.arrange([], 4.0)
    assert queue.facts("a1") is None


def test_looks_per_pass_are_bounded() -> None:
    """Of 100 that join at once all are known in the end, a few at a time."""
    source = Source()
    queue: QueueOrder[str] = QueueOrder(Recorder(), source, num_looks=4)
    keys = [f"x{n}" for n in range(100)]
    for _ in range(120):
        before = len(source.looked)
        queue.arrange(keys, 0.0)
        assert len(source.looked) - before <= 4
    assert set(source.looked) == set(keys)


def test_a_burst_is_taken_in_a_few_at_a_time() -> None:
    """The others stand behind, by arrival, and came when they were first seen."""
    order = Recorder()
    queue: QueueOrder[str] = QueueOrder(order, Source(), num_joins=3)
    keys = [f"x{n}" for n in range(8)]
    assert queue.arrange(keys, 1.0) == list(range(8))
    assert [f.index for f in order.seen] == [0, 1, 2]
    # A newcomer at the front of the list is still the last to have come.
    assert queue.arrange(["y0", *keys], 2.0) == [*range(1, 9), 0]
    assert len(order.seen) == 6
    queue.arrange(["y0", *keys], 3.0)
    assert [f.arrival_s for f in order.seen] == [1.0] * 8 + [2.0]


def test_who_leaves_before_it_is_taken_in_is_forgotten() -> None:
    """An abort in a burst: it takes no number, and comes again as new."""
    order = Recorder()
    queue: QueueOrder[str] = QueueOrder(order, Source(), num_joins=1)
    queue.arrange(["a1", "b1", "c1"], 1.0)
    assert queue.facts("b1") is None
    assert queue.arrange(["a1", "c1"], 2.0) == [0, 1]
    assert queue.arrange(["b1", "c1", "a1"], 3.0) == [2, 1, 0]
    assert [f.arrival_s for f in order.seen] == [1.0, 1.0, 3.0]


def test_everybody_is_looked_at_again_and_again() -> None:
    """Facts change while a request waits; no request keeps its first ones for ever."""
    source = Source()
    queue: QueueOrder[str] = QueueOrder(FPFOrder(), source, num_looks=4)
    keys = [f"{chr(ord('a') + n)}" for n in range(26)]
    for _ in range(60):
        queue.arrange(keys, 0.0)
    source.on_device = {"z"}
    for _ in range(26):
        arranged = queue.arrange(keys, 0.0)
    assert keys[arranged[0]] == "z"


def test_the_kin_of_who_was_served_are_looked_at_next() -> None:
    """Its pages are on the device now: those that share them should know at once."""
    source = Source()
    queue: QueueOrder[str] = QueueOrder(FPFOrder(), source, num_looks=6)
    keys = [f"{letter}{n}" for n in range(3) for letter in "abcdefgh"]
    for _ in range(20):
        queue.arrange(keys, 0.0)
    source.on_device = {"g"}
    keys.remove("g0")
    source.looked.clear()
    arranged = queue.arrange(keys, 1.0)
    assert {"g1", "g2"} <= set(source.looked)
    assert [keys[i] for i in arranged[:2]] == ["g1", "g2"]


def test_an_order_without_facts_looks_nobody_up() -> None:
    """First come first served costs no lookup."""

    class Plain(Recorder):
        needs_facts = False

    source = Source()
    queue: QueueOrder[str] = QueueOrder(Plain(), source)
    assert queue.arrange(["a1", "b1"], 1.0) == [0, 1]
    assert source.looked == []
