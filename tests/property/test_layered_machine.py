"""Layer-wise KV under everything at once: every read returns what was written.

Chunked prefills, decodes, shared prefixes with different retention, aborts, cached
pages, loads from tiers, pressure, and copies that fail or hang, in tiny staging room.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sgl_tiered.testing.fake_layers import FakeLayerCopier
from tests.property.layered_driver import LAYERS, PAGES, TOKENS, Driver

MASKS = st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS).map(
    lambda bits: np.array(bits, np.bool_)
)
PICK = st.integers(0, 1_000)


class LayeredMachine(RuleBasedStateMachine):
    """Random operations on the engine in small."""

    @initialize(
        num_physical=st.sampled_from([24, 30, 45, 90]),
        half_pages=st.sampled_from([2, 3, 6]),
        lazy=st.booleans(),
        waiter_copies=st.booleans(),
    )
    def build(
        self, num_physical: int, half_pages: int, lazy: bool, waiter_copies: bool
    ) -> None:
        self.driver = Driver(num_physical, half_pages, lazy=lazy)
        self.driver.copier.waiter_copies = waiter_copies
        self.fail_rate = 0.0

    # No preconditions: what there is depends on the threads, what is drawn must not.

    def pick(self, number: int) -> int:
        """Return a request; begin one if there is none."""
        if not self.driver.requests:
            self.driver.start(1, 7, np.zeros(LAYERS, np.bool_), share=True)
        keys = sorted(self.driver.requests)
        return keys[number % len(keys)]

    @rule(
        story=st.integers(1, 2),
        goal=st.integers(1, 12),
        retained=MASKS,
        share=st.booleans(),
    )
    def start(self, story: int, goal: int, retained: np.ndarray, share: bool) -> None:
        if len(self.driver.requests) < 5:
            self.driver.start(story, goal, retained, share=share)

    @rule(
        who=st.lists(PICK, min_size=1, max_size=4),
        chunk=st.sampled_from([1, 2, 3, 4, 12]),
        times=st.integers(1, 4),
    )
    def forward(self, who: list[int], chunk: int, times: int) -> None:
        keys = sorted({self.pick(number) for number in who})
        for _ in range(times):
            self.driver.forward(keys, chunk)

    @rule(
        who=st.lists(PICK, min_size=1, max_size=4),
        chunk=st.sampled_from([1, 3, 12]),
        number=PICK,
        keep=st.booleans(),
    )
    def one_is_lost(self, who: list[int], chunk: int, number: int, keep: bool) -> None:
        """A request that ended with an error stays in its batch once more."""
        keys = sorted({self.pick(number) for number in who})
        lost = keys[number % len(keys)]
        assert lost not in self.driver.forward(keys, chunk, {lost})
        self.driver.end(lost, keep=keep)

    @rule(number=PICK)
    def one_alone_gets_on(self, number: int) -> None:
        """A request fits as soon as all the others are gone."""
        driver = self.driver
        key = self.pick(number)
        request = driver.requests[key]
        if self.fail_rate or driver.pinned.any() or request.num_tokens >= 2 * PAGES - 1:
            return
        for other in [other for other in driver.requests if other != key]:
            driver.end(other, keep=True)
        free = np.count_nonzero(driver.uses == 0)
        goal = max(request.goal, request.num_tokens + 1)
        num_pages = -(-goal // TOKENS)
        total = driver.manager.room().total - self.num_stuck(key)
        if num_pages * LAYERS <= total and free >= num_pages:
            assert driver.forward([key], goal) == [key]

    def num_stuck(self, key: int) -> int:
        """Return the layer-pages of others than this request that cannot leave."""
        del key
        return 0

    @rule(number=PICK, keep=st.booleans())
    def end(self, number: int, keep: bool) -> None:
        self.driver.end(self.pick(number), keep=keep)

    @rule(number=PICK)
    def merge(self, number: int) -> None:
        self.driver.merge(self.pick(number))

    @rule(number=PICK)
    def evict(self, number: int) -> None:
        if self.driver.cached:
            self.driver.evict(number % len(self.driver.cached))

    @rule(number=PICK, layers=MASKS)
    def release(self, number: int, layers: np.ndarray) -> None:
        key = self.pick(number)
        if self.driver.requests[key].pages and self._is_known(key):
            self.driver.manager.release(key, layers)
            self.driver.requests[key].retained = self.driver.manager.held(key)

    @rule(number=PICK, layers=MASKS, most=st.integers(0, 20))
    def hold_and_pull(self, number: int, layers: np.ndarray, most: int) -> None:
        key = self.pick(number)
        if self._is_known(key):
            manager = self.driver.manager
            away = int(manager.away([key])[0])
            manager.hold(key, layers)
            self.driver.requests[key].retained = manager.held(key)
            assert manager.pull(key, most) <= min(most, away)

    @rule(
        story=st.integers(1, 2), num=st.integers(1, 4), layers=MASKS, ok=st.booleans()
    )
    def load(self, story: int, num: int, layers: np.ndarray, ok: bool) -> None:
        self.driver.load(story, num, layers, ok=ok)

    @rule(number=PICK)
    def pin(self, number: int) -> None:
        if self.driver.cached:
            pages = self.driver.cached[number % len(self.driver.cached)][1]
            self.driver.manager.pin(np.array(pages))
            self.driver.pinned[pages] += 1

    @rule()
    def unpin(self) -> None:
        driver = self.driver
        driver.manager.unpin(np.repeat(np.arange(PAGES), driver.pinned))
        driver.pinned[:] = 0

    @rule(
        rate=st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0]),
        direction=st.sampled_from(["up", "down", ""]),
        seed=st.integers(0, 9),
    )
    def let_copies_fail(self, rate: float, direction: str, seed: int) -> None:
        chance = np.random.default_rng(seed)
        self.fail_rate = rate
        self.driver.copier.fails = lambda way: (
            direction in ("", way) and chance.random() < rate
        )

    @rule(story=st.integers(1, 2), goal=st.integers(4, 12), keep=st.booleans())
    def abort_during_copies(self, story: int, goal: int, keep: bool) -> None:
        """Pages are freed, and used again at once, while their copies hang."""
        driver = self.driver
        nothing = np.zeros(LAYERS, np.bool_)
        everything = ~nothing
        request = driver.start(story, goal, everything, share=False)
        if driver.forward([request.key], goal):
            driver.copier.gate.clear()
            driver.manager.release(request.key, everything)
            driver.end(request.key, keep=keep)
            other = driver.start(3 - story, goal, nothing, share=False)
            driver.copier.gate.set()
            driver.forward([other.key], goal)
            driver.forward([other.key], goal)

    @invariant()
    def all_is_as_written(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()

    def _is_known(self, key: int) -> bool:
        return self.driver.manager.report(key).num_passes > 0


TestLayeredMachine = LayeredMachine.TestCase
TestLayeredMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def crowd(driver: Driver) -> None:
    """Run three prompts that do not fit together, in turn and together."""
    nothing = np.zeros(LAYERS, np.bool_)
    half = np.array([True, False, True])
    keys = [driver.start(1, 8, nothing, share=False).key]
    driver.forward(keys, 8)
    keys.append(driver.start(1, 11, half, share=True).key)
    keys.append(driver.start(2, 8, nothing, share=False).key)
    for _ in range(12):
        driver.forward(keys, 3)
        driver.check()


@pytest.mark.parametrize("waiter_copies", [False, True])
def test_a_crowd_reads_what_it_wrote(waiter_copies: bool) -> None:
    """The scenario of the negative controls streams, and passes as it is."""
    driver = Driver(30, 6)
    driver.copier.waiter_copies = waiter_copies
    crowd(driver)
    streamed = [driver.manager.report(key).bytes_streamed for key in driver.requests]
    assert max(streamed) > 0
    driver.close()


class SkippingCopier(FakeLayerCopier):
    """Leaves out the last page of every copy to the device."""

    def to_device(
        self, layer: int, rows: np.ndarray, physical: np.ndarray, after: object
    ) -> None:
        super().to_device(layer, rows[:-1], physical[:-1], after)


class LateCopier(FakeLayerCopier):
    """Says that pages are on the host before they are."""

    def to_host(
        self, layer: int, physical: np.ndarray, rows: np.ndarray, after: object
    ) -> None:
        del layer, physical, rows, after


@pytest.mark.parametrize(
    ("broken", "found"),
    [(SkippingCopier, "read something else"), (LateCopier, "assert|read")],
)
def test_a_broken_copier_is_caught(broken: type[FakeLayerCopier], found: str) -> None:
    """The reference finds a page that was not staged, or never left."""
    driver = Driver(30, 6, copier_class=broken)
    with pytest.raises(AssertionError, match=found):
        crowd(driver)
    driver.manager.close()
