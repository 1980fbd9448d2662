"""Pages of two kinds under everything at once: every read returns what was written.

The machine of layer-wise KV, with copies of activations and rebuilding that fail or
hang as well. The negative controls break one thing each, and are caught.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from sgl_tiered.layered.base import ActPlan
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.rebuilding import Rebuilder, RebuildJob
from sgl_tiered.layered.units import ActSource
from sgl_tiered.testing.fake_acts import FakeActCopier
from tests.property.layered_driver import LAYERS
from tests.property.test_layered_machine import LayeredMachine
from tests.unit.layered.act_support import (
    ACT_BYTES,
    ActDriver,
    alternate,
    only_acts,
)

NOTHING = np.zeros(LAYERS, np.bool_)


class ActMachine(LayeredMachine):
    """Random operations on an engine whose pages have two kinds."""

    @initialize(
        num_physical=st.sampled_from([24, 30, 45, 90]),
        half_pages=st.sampled_from([2, 3, 6]),
        sizes=st.sampled_from(
            [(12, 40, 4, 2), (18, 60, 6, 1), (20, 24, 2, 3), (22, 9, 2, 1)]
        ),
        lazy=st.booleans(),
        every=st.booleans(),
        waiter_copies=st.booleans(),
    )
    def build(
        self,
        num_physical: int,
        half_pages: int,
        sizes: tuple[int, int, int, int],
        lazy: bool,
        every: bool,
        waiter_copies: bool,
    ) -> None:
        self.driver = ActDriver(
            num_physical,
            half_pages,
            plan=ActPlan(*sizes, ACT_BYTES),
            choose=only_acts if every else alternate,
            lazy=lazy,
        )
        self.driver.copier.waiter_copies = waiter_copies
        self.fail_rate = 0.0

    @rule(
        rate=st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0]),
        what=st.sampled_from(["up", "down", "acts up", "acts down", "rebuild", ""]),
        seed=st.integers(0, 9),
    )
    def let_copies_fail(self, rate: float, what: str, seed: int) -> None:
        chance = np.random.default_rng(seed)
        self.fail_rate = rate
        self.driver.copier.fails = lambda way: (
            what in ("", way) and chance.random() < rate
        )

    def num_stuck(self, key: int) -> int:
        """Cached pages without a row stay on the device; this request's are its own."""
        rowless = self.driver.binding.rowless.copy()
        rowless[self.driver.requests[key].pages] = False
        return LAYERS * int(rowless.sum())

    @rule(
        story=st.integers(1, 2), kinds=st.lists(st.booleans(), min_size=1, max_size=4)
    )
    def load_kinds(self, story: int, kinds: list[bool]) -> None:
        """A tier brings pages of both kinds."""
        self.driver.load_kinds(story, np.array(kinds))  # type: ignore[attr-defined]

    @rule()
    def all_goes_away(self) -> None:
        """Everything that can leaves the device, and is staged when it is read."""
        if not self.fail_rate and not self.driver.pinned.any():
            self.driver.sent_away()  # type: ignore[attr-defined]

    @rule(number=st.integers(0, 1_000))
    def end_while_kv_is_computed(self, number: int) -> None:
        """Pages are freed, and used again, while what returns to stay is rebuilt."""
        driver, key = self.driver, self.pick(number)
        if not self._is_known(key):
            return
        held = driver.acts.held  # type: ignore[attr-defined]
        held.clear()
        driver.manager.hold(key, ~NOTHING)
        driver.manager.pull(key)
        driver.end(key, keep=False)
        other = driver.start(1 + number % 2, 7, NOTHING, share=False)
        held.set()
        driver.forward([other.key], 7)


TestActMachine = ActMachine.TestCase
TestActMachine.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def crowd(driver: ActDriver) -> None:
    """Run prompts and decode steps whose pages leave and are read from the host."""
    keys = [driver.start(1, 9, NOTHING, share=False).key]
    driver.forward(keys, 9)
    driver.sent_away()
    keys.append(driver.start(2, 5, NOTHING, share=False).key)
    for _ in range(4):
        driver.forward(keys, 3)
        driver.check()
        driver.sent_away()
    driver.manager.hold(keys[0], ~NOTHING)
    driver.manager.pull(keys[0])
    driver.settle()
    driver.check()


def test_a_crowd_reads_what_it_wrote() -> None:
    """The scenario of the controls stages, rebuilds and pulls, and passes as it is."""
    driver = ActDriver()
    crowd(driver)
    assert driver.acts.num_rebuilt > 10
    assert driver.manager.report(1).bytes_pulled > 0
    driver.close()


class NoPositions(FakeActCopier):
    """Rebuilds all pages as if they were the first of their request."""

    def rebuild(self, layer, acts, physical, positions, after) -> None:  # type: ignore[no-untyped-def]
        super().rebuild(layer, acts, physical, np.zeros_like(positions), after)


class OtherRows(FakeActCopier):
    """Loads the row beside."""

    def acts_to_device(self, layer, rows, acts, after) -> None:  # type: ignore[no-untyped-def]
        super().acts_to_device(layer, (rows + 1) % len(self.host), acts, after)


class OtherPlaces(FakeActCopier):
    """Rebuilds from the place beside."""

    def rebuild(self, layer, acts, physical, positions, after) -> None:  # type: ignore[no-untyped-def]
        super().rebuild(layer, acts - 1, physical, positions, after)


class OtherLayer(FakeActCopier):
    """Rebuilds with another layer's projection."""

    def rebuild(self, layer, acts, physical, positions, after) -> None:  # type: ignore[no-untyped-def]
        super().rebuild((layer + 1) % LAYERS, acts, physical, positions, after)


class NeverSent(FakeActCopier):
    """Says that activations are on the host, where they are not."""

    def acts_to_host(self, layer, acts, rows, after) -> None:  # type: ignore[no-untyped-def]
        del layer, acts, rows, after


@pytest.mark.parametrize(
    "broken", [NoPositions, OtherRows, OtherPlaces, OtherLayer, NeverSent]
)
def test_a_broken_copier_is_caught(broken: type[FakeActCopier]) -> None:
    """By the reads, or by the comparison of what is kept."""
    driver = ActDriver(act_class=broken)
    with pytest.raises(AssertionError):
        crowd(driver)
    driver.manager.close()


def test_not_waiting_for_the_rebuild_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that settles when its loads have ended is read too early."""
    late: list[RebuildJob] = []

    def put(self: Rebuilder, job: RebuildJob) -> None:
        late.append(job)
        job.ended("", 0.0, 0.0, None)

    monkeypatch.setattr(Rebuilder, "put", put)
    driver = ActDriver()
    with pytest.raises(AssertionError, match="read something else"):
        crowd(driver)
    assert late
    driver.manager.close()


def test_a_wrong_kind_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged as KV: the row's number is one of another region."""
    monkeypatch.setattr(
        ActSource,
        "crosses",
        lambda self, staged, pages: np.zeros_like(staged),
    )
    whole = ActSource.unit

    def unit(self, layer, group, pages, turn, to):  # type: ignore[no-untyped-def]
        blind = ActSource(
            np.zeros_like(self.is_act), self.row, self.act, self.position, self.halves
        )
        return whole(blind, layer, group, pages, turn, to)

    monkeypatch.setattr(ActSource, "unit", unit)
    driver = ActDriver()
    with pytest.raises(AssertionError, match="read something else"):
        crowd(driver)
    driver.manager.close()


def test_kinds_do_not_mix_in_a_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not cut them is told."""
    monkeypatch.setattr(LayerBinding, "by_kind", lambda self, pages: [pages])
    driver = ActDriver()
    with pytest.raises(AssertionError, match="two kinds"):
        crowd(driver)
    driver.manager.close()


def test_the_link_goes_on_while_a_unit_is_rebuilt() -> None:
    """The next unit's loads have ended before the first unit's KV is computed."""
    driver = ActDriver()
    key = driver.start(1, 8, NOTHING, share=False).key
    driver.forward([key], 8)
    driver.sent_away()
    driver.acts.held.clear()
    seen = threading.Event()
    original = driver.acts.acts_to_device

    def loads(layer, rows, acts, after):  # type: ignore[no-untyped-def]
        original(layer, rows, acts, after)
        if layer == 1:
            seen.set()

    driver.acts.acts_to_device = loads  # type: ignore[method-assign]
    went_on: list[bool] = []

    def open_later() -> None:
        went_on.append(seen.wait(20.0))
        driver.acts.held.set()

    opener = threading.Thread(target=open_later, daemon=True)
    opener.start()
    assert driver.forward([key], 1) == [key]
    opener.join()
    assert went_on == [True]
    driver.close()
