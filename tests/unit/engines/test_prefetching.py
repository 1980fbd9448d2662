"""SGLang's queue as the prefetcher sees it, with stand-ins for SGLang's objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.sglang.prefetching import QueuePrefetch, allowed_tokens


class FakePrefetcher:
    """Keeps what it was told."""

    window = 2

    def __init__(self):
        self.is_busy = False
        self.looks = []
        self.due_s = float("inf")

    def advance(self, waiting, **facts):
        self.looks.append((list(waiting), facts))
        return self.due_s


class State:
    """What is known of a request's load: its name."""

    def __init__(self, name):
        self.name = name


class Rig:
    """A scheduler with a queue of named requests."""

    def __init__(self, num_waiting=3):
        self.clock = ManualClock()
        self.prefetcher = FakePrefetcher()
        names = [f"r{n}" for n in range(num_waiting)]
        self.states = {name: State(name) for name in names}
        self.keys = {name: name for name in names}
        tree = SimpleNamespace(
            page_size=16,
            tree_core=SimpleNamespace(
                match_full_device_prefix=lambda key: (32, None, None)
            ),
        )
        self.scheduler = SimpleNamespace(
            waiting_queue=[SimpleNamespace(rid=name) for name in names],
            running_batch=SimpleNamespace(reqs=[], batch_is_full=False),
            tree_cache=tree,
        )
        coordinator = SimpleNamespace(state=self.states.get, pass_compute_s=0.5)
        self.queue = QueuePrefetch(
            self.scheduler, coordinator, self.prefetcher, self.clock
        )


def decoding(rid, num_tokens, most=100):
    return SimpleNamespace(
        rid=rid,
        output_ids=[0] * num_tokens,
        sampling_params=SimpleNamespace(max_new_tokens=most),
        finished=lambda: False,
    )


def test_a_pass_that_was_built_is_looked_past():
    """The head of what is left, with its pages on the device, waits for that pass."""
    rig = Rig()
    rig.prefetcher.is_busy = True
    rig.queue.pass_built(rig.keys)
    ((waiting, facts),) = rig.prefetcher.looks
    assert [(state.name, pages) for state, pages in waiting] == [("r0", 2), ("r1", 2)]
    assert [state.name for state in facts["others"]] == ["r2"]
    assert facts["busy_s"] == 0.5
    assert not facts["is_blocked"]


def test_nothing_is_started_before_a_pass_that_looks_at_the_queue():
    """But who has gone is seen, for reads that nobody waits for any more."""
    rig = Rig()
    rig.queue.between_passes(rig.keys)
    ((waiting, facts),) = rig.prefetcher.looks
    assert waiting == []
    assert len(facts["others"]) == 3


def test_between_decode_steps_of_a_full_batch_the_queue_is_read():
    """Answers under way are told by length and time; a first token is no time yet."""
    rig = Rig()
    rig.scheduler.running_batch.batch_is_full = True
    rig.scheduler.running_batch.reqs = [decoding("a", 5), decoding("b", 0)]
    rig.queue.between_passes(rig.keys)
    rig.clock.advance(1.0)
    rig.scheduler.running_batch.reqs = [decoding("a", 25), decoding("b", 1)]
    rig.queue.between_passes(rig.keys)
    _, facts = rig.prefetcher.looks[-1]
    assert facts["is_blocked"]
    assert facts["busy_s"] == 0.0
    assert facts["tpot_s"] == pytest.approx(0.05)
    # 95 tokens were to come when it was first seen, a second ago.
    assert [(d.num_tokens, d.past_s) for d in facts["decoding"]] == [(95, 1.0), (99, 0)]


def test_looks_are_apart_from_each_other():
    """SGLang's loop turns much faster; the end of a read makes a look due."""
    rig = Rig()
    for _ in range(5):
        rig.queue.between_passes(rig.keys)
    assert len(rig.prefetcher.looks) == 1
    rig.queue.changed()
    rig.queue.between_passes(rig.keys)
    assert len(rig.prefetcher.looks) == 2
    rig.clock.advance(1.0)
    rig.queue.between_passes(rig.keys)
    assert len(rig.prefetcher.looks) == 3


def test_an_empty_queue_costs_nothing():
    """Unless reads are under way that nobody waits for."""
    rig = Rig(num_waiting=0)
    rig.queue.between_passes(rig.keys)
    assert rig.prefetcher.looks == []
    rig.prefetcher.is_busy = True
    rig.queue.between_passes(rig.keys)
    assert len(rig.prefetcher.looks) == 1


def test_a_request_that_is_not_known_is_left_out():
    """Prompts that the tiers cannot serve have no state."""
    rig = Rig()
    del rig.states["r0"], rig.keys["r0"]
    rig.queue.pass_built(rig.keys)
    ((waiting, _),) = rig.prefetcher.looks
    assert [state.name for state, _ in waiting] == ["r1"]


def test_the_plainest_prediction_is_what_is_allowed():
    """A predictor may take its place."""
    assert allowed_tokens(decoding("a", 3, most=77)) == 77
    rig = Rig()
    rig.queue.predict = lambda req: 10
    rig.scheduler.running_batch.reqs = [decoding("a", 4)]
    rig.queue.pass_built(rig.keys)
    _, facts = rig.prefetcher.looks[-1]
    assert [d.num_tokens for d in facts["decoding"]] == [6]


@pytest.mark.parametrize(("is_built", "reserved"), [(False, 7), (True, 10)])
def test_what_goes_on_to_the_device_leaves_room_for_others(is_built, reserved):
    """Answers under way, the pass that was just built, and whole requests in turn."""
    rig = Rig()
    rig.queue._fetcher = fetcher = SimpleNamespace(keys={})
    rig.queue.predict = lambda req: 100
    for req in rig.scheduler.waiting_queue:
        req.origin_input_ids = [0] * 64
    rig.queue._coordinator.pass_tokens = 40
    rig.scheduler.running_batch.batch_is_full = True
    rig.scheduler.running_batch.reqs = [decoding("a", 4)]
    if is_built:
        rig.queue.pass_built(rig.keys)
    else:
        rig.queue.between_passes(rig.keys)
    ((_, facts),) = rig.prefetcher.looks
    # 96 tokens of an answer, and the page that it is in; 40 tokens of the pass.
    assert facts["reserved_pages"] == reserved
    assert facts["sizes"] == [-(-164 // 16)] * 2
    assert set(fetcher.keys.values()) == {"r0", "r1"}
