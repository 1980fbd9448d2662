"""Forwards whose pages are kept as activations: captures, kinds, failures, reports."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.layered.base import (
    ActPlan,
    LayerReadError,
    LayerRoomError,
    PassRequest,
)
from sgl_tiered.layered.binding import LayerBinding
from sgl_tiered.layered.manager import LayerManager
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.weights import PIECE_BYTES, WeightStream
from sgl_tiered.testing.fake_layers import FakeLayerCopier
from sgl_tiered.testing.throttled import Link, LinkPace
from tests.property.layered_driver import LAYERS, PAGES, TOKENS, Driver
from tests.unit.layered.act_support import (
    ACT_BYTES,
    KV_BYTES,
    ActDriver,
    alternate,
    only_acts,
)

NOTHING = np.zeros(LAYERS, np.bool_)
EVERYTHING = ~NOTHING
PATIENCE_S = 20.0


def prompt(driver: ActDriver, goal: int, retained: np.ndarray = NOTHING) -> int:
    """Compute a prompt; return its request."""
    key = driver.start(1, goal, retained, share=False).key
    assert driver.forward([key], goal) == [key]
    return key


def test_activations_leave_whatever_is_kept() -> None:
    """KV of a kept layer stays as well, and can go at once when it is released."""
    driver = ActDriver(choose=only_acts)
    key = prompt(driver, 4, EVERYTHING)
    driver.settle()
    pages = driver.requests[key].pages
    assert driver.binding.on_host[:, pages].all()
    assert (driver.binding.device[:, pages] >= 0).all()
    assert driver.manager.room().spare == 0
    report = driver.manager.report(key)
    assert report.bytes_offloaded == 2 * LAYERS * ACT_BYTES
    # Nothing of it would have gone as KV.
    assert report.bytes_saved == -report.bytes_offloaded
    driver.manager.release(key, EVERYTHING)
    driver.requests[key].retained = NOTHING
    assert driver.manager.room().spare == 2 * LAYERS
    driver.close()


def test_what_crosses_the_link_is_counted_in_its_own_bytes() -> None:
    """And so is the KV that did not have to."""
    driver = ActDriver()
    key = prompt(driver, 8)
    driver.sent_away()
    report = driver.manager.report(key)
    down = 2 * LAYERS * (KV_BYTES + ACT_BYTES)
    assert report.bytes_offloaded == down
    assert (report.num_act_pages, report.num_kv_pages) == (2, 2)
    request = PassRequest(key, np.array([*driver.requests[key].pages, 9]), 8, 1)
    kinds = driver.manager.staged_kinds([request])
    assert [counts.tolist() for counts in kinds] == [[2], [2]]
    assert driver.forward([key], 1) == [key]
    report = driver.manager.report(key)
    assert report.bytes_streamed == 2 * LAYERS * (KV_BYTES + ACT_BYTES)
    assert report.bytes_streamed == driver.manager.bytes_streamed
    assert report.bytes_saved == 2 * 2 * LAYERS * (KV_BYTES - ACT_BYTES)
    assert report.rebuild_s == driver.manager.rebuild_s > 0.0
    driver.close()


def test_activations_on_the_device_cross_no_link() -> None:
    """They are rebuilt where they are, for a forward and to stay."""
    driver = ActDriver(choose=only_acts)
    key = prompt(driver, 6)
    driver.settle()
    driver.manager._room.drop(driver.binding.num_physical)
    pages = driver.requests[key].pages
    assert (driver.binding.device[:, pages] < 0).all()
    assert (driver.binding.act[:, pages] >= 0).all()
    assert driver.forward([key], 1) == [key]
    driver.manager.hold(key, EVERYTHING)
    assert driver.manager.pull(key) == 3 * LAYERS
    driver.settle()
    driver.check()
    assert (driver.binding.device[:, pages] >= 0).all()
    assert driver.acts.num_rebuilt == 2 * 3 * LAYERS
    assert not [copy for copy in driver.copier.copies if copy[0] == "acts up"]
    report = driver.manager.report(key)
    assert (report.bytes_streamed, report.bytes_pulled) == (0, 0)
    assert report.bytes_saved == 3 * LAYERS * (3 * KV_BYTES - ACT_BYTES)
    driver.requests[key].retained = EVERYTHING
    driver.close()


def test_a_forward_that_fails_leaves_what_was_captured_before() -> None:
    """The tail's earlier tokens; its completion then sends all of them down."""
    driver = ActDriver(choose=only_acts)
    key = driver.start(1, 4, NOTHING, share=False).key
    assert driver.forward([key], 3) == [key]
    tail = driver.requests[key].pages[1]
    before = driver.binding.act[:, tail].copy()
    assert (before >= 0).all()
    driver.sent_away()
    driver.copier.fails = lambda way: way == "acts up"
    assert driver.forward([key], 1) == []
    assert driver.num_broken == 1
    assert (driver.binding.act[:, tail] == before).all()
    assert not driver.binding.on_host[:, tail].any()
    driver.copier.fails = lambda _way: False
    assert driver.forward([key], 1) == [key]
    driver.sent_away()
    assert driver.binding.on_host[:, tail].all()
    driver.check()
    driver.close()


def test_new_pages_of_a_failed_forward_have_no_kind_next_time() -> None:
    """Their rows and places are back; what they are is chosen anew."""
    driver = ActDriver(choose=only_acts)
    key = driver.start(1, 6, NOTHING, share=False).key
    kinds = driver.binding.kinds
    assert kinds is not None
    rows, places = kinds.num_free_rows, kinds.places.num_free
    pages = np.array([0, 1, 2])
    manager = driver.manager
    manager.begin_pass([PassRequest(key, pages, 0, 5, NOTHING)])
    manager.acts_for_write(0, pages)
    assert driver.binding.is_act[pages].all()
    manager.end_pass(ok=False)
    assert kinds.num_free_rows == rows
    assert kinds.places.num_free == places
    manager.check()
    manager.freed(pages)
    driver.close()


def test_lost_requests_capture_nothing() -> None:
    """Their pages have no place; the others' have."""
    driver = ActDriver(choose=only_acts)
    batch = [
        PassRequest("a", np.array([1, 2]), 0, 4, NOTHING),
        PassRequest("b", np.array([3, 4]), 0, 4, NOTHING, is_lost=True),
    ]
    driver.manager.begin_pass(batch)
    found = driver.manager.acts_for_write(0, np.array([[1, 2], [3, 4]]))
    assert (found[0] > 0).all()
    assert (found[1] == -1).all()
    assert not driver.binding.is_act[3:5].any()
    driver.manager.end_pass(ok=False)
    driver.close()


def test_what_lacks_room_in_the_act_area_is_kv() -> None:
    """Two layers of a forward's pages have to fit, tails in all layers."""
    driver = ActDriver(choose=only_acts, plan=ActPlan(12, 14, 4, 1, ACT_BYTES))
    key = prompt(driver, 9)
    # Five places: two full pages of four, and no tail.
    assert driver.binding.is_act[driver.requests[key].pages].tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
    driver.check()
    driver.close()


def test_a_request_has_no_more_activations_than_a_half() -> None:
    """Else they were brought back before each forward."""
    driver = ActDriver(choose=only_acts, plan=ActPlan(12, 40, 2, 1, ACT_BYTES))
    key = prompt(driver, 8)
    assert driver.binding.is_act[driver.requests[key].pages].sum() == 2
    driver.close()


@pytest.mark.parametrize("rows", [2, PAGES - 2])
def test_pages_take_the_other_kind_without_rows(rows: int) -> None:
    """Rows of both kinds are as many as pages."""
    is_short_of_acts = rows == 2
    driver = ActDriver(
        90,
        plan=ActPlan(rows, 60, 6, 1, ACT_BYTES),
        choose=only_acts if is_short_of_acts else _only_kv,
    )
    key = prompt(driver, 12)
    is_act = driver.binding.is_act[driver.requests[key].pages]
    assert is_act.sum() == (2 if is_short_of_acts else 4)
    driver.check()
    driver.close()


def _only_kv(_num_act: int, _num_kv: int, num_new: int) -> np.ndarray:
    return np.zeros(num_new, np.bool_)


def short(num_physical: int) -> ActDriver:
    """Return one with two rows of KV, and five places beside the act staging."""
    plan = ActPlan(PAGES - 2, 14, 4, 1, ACT_BYTES)
    return ActDriver(num_physical, plan=plan, choose=only_acts)


def test_without_rows_of_kv_and_places_pages_stay_on_the_device() -> None:
    """They take room in all layers at once, and are refused only where that lacks."""
    batch = [
        PassRequest("a", np.array([1, 2]), 0, 4, NOTHING),
        PassRequest("b", np.arange(3, 9), 0, 12, NOTHING),
    ]
    driver = short(42)
    total = driver.manager.room().total
    assert driver.manager.begin_pass(batch).refused == ()
    driver.manager.check()
    # Eight pages: two are activations, two have rows of KV.
    assert driver.binding.rowless[1:9].sum() == 4
    assert driver.manager.room().free == total - 4 * LAYERS
    driver.manager.end_pass(ok=False)
    assert not driver.binding.rowless.any()
    driver.manager.finished("a")
    driver.manager.finished("b")
    driver.manager.freed(np.arange(1, 9))
    driver.close()
    # Two layers of all pages would fit, and not four pages in all layers.
    driver = short(12 + 17)
    assert driver.manager.begin_pass(batch).refused == (1,)
    driver.manager.check()
    assert driver.manager.room().free == driver.manager.room().total
    assert (driver.binding.row < 0).all()
    assert not driver.binding.rowless.any()
    assert driver.manager.begin_pass(batch[:1]).refused == ()
    driver.manager.end_pass(ok=False)
    driver.close()


def test_pages_that_will_have_no_row_are_foreseen() -> None:
    """As many as the forward then keeps on the device."""
    driver = short(42)
    manager = driver.manager
    assert [manager.num_rowless(num) for num in (0, 2, 4, 5, 8)] == [0, 0, 0, 1, 4]
    batch = [PassRequest("a", np.arange(1, 9), 0, 16, NOTHING)]
    # A half does not hold them, and here nobody reads them.
    assert manager.begin_pass(batch).refused == ()
    assert driver.binding.rowless.sum() == 4
    manager.end_pass(ok=False)
    manager.finished("a")
    manager.freed(np.arange(1, 9))
    driver.close()


def test_where_pages_are_kv_only_each_has_a_row() -> None:
    """Nothing is foreseen that cannot be."""
    driver = Driver(20, 4)
    assert driver.manager.num_rowless(99) == 0
    driver.manager.close()


def test_a_decode_goes_on_where_rows_and_places_are_gone() -> None:
    """What has no row is read where it is, and never leaves before it is freed."""
    driver = short(90)
    keys = [prompt(driver, 4) for _ in range(4)]
    binding, manager = driver.binding, driver.manager
    kinds = binding.kinds
    assert kinds is not None
    for _ in range(5):
        assert driver.forward(keys, 1) == keys
        driver.check()
    assert driver.num_refused == 0
    assert kinds.num_free_rows[0] == 0
    rowless = binding.rowless.nonzero()[0]
    full = rowless[binding.full[rowless]]
    assert len(full) > 0
    # Nothing makes them leave: not kept, pushed, released, or needed by others.
    driver.sent_away()
    manager.push(99)
    driver.settle()
    assert (binding.device[:, rowless] >= 0).all()
    assert not binding.on_host[:, rowless].any()
    with pytest.raises(AssertionError, match="no row"):
        binding.depart(0, full, is_up=False)
    # A tier below reads their KV from the device.
    manager.pin(full)
    assert all((manager.where(n, full) >= 0).all() for n in range(LAYERS))
    manager.unpin(full)
    # A tier's page is not placed without a row.
    assert not manager.open_load(np.flatnonzero(driver.uses == 0)[:1], NOTHING)
    assert driver.forward(keys, 1) == keys
    driver.check()
    for key in keys:
        driver.end(key, keep=False)
    assert not binding.rowless.any()
    driver.close()


def test_what_cannot_leave_is_promised_to_nobody() -> None:
    """A release says what it frees, and cached pages without a row are no room."""
    driver = short(90)
    key = prompt(driver, 12, EVERYTHING)
    driver.settle()
    pages = np.array(driver.requests[key].pages)
    num = int(driver.binding.rowless[pages].sum())
    assert num == 2
    assert driver.manager.release(key, EVERYTHING) == (len(pages) - num) * LAYERS
    driver.requests[key].retained = NOTHING
    driver.settle()
    room = driver.manager.room()
    assert room.cached == room.landing == 0
    assert room.free + room.spare == room.total - num * LAYERS
    driver.close()


def test_captures_without_room_name_who_writes_them() -> None:
    """Copies to the host fail: the forward ends, and the next one takes fewer."""
    driver = ActDriver(90, choose=only_acts, plan=ActPlan(12, 17, 4, 1, ACT_BYTES))
    driver.copier.fails = lambda way: way == "acts down"
    pages = np.arange(4)
    manager = driver.manager
    manager.begin_pass([PassRequest("a", pages, 0, 8, EVERYTHING)])
    for layer in range(2):
        assert (manager.acts_for_write(layer, pages) > 0).all()
        manager.pages_for_write(layer, pages)
        manager.layer_written(layer)
    with pytest.raises(LayerRoomError) as caught:
        manager.acts_for_write(2, pages)
    assert (caught.value.layer, caught.value.keys) == (2, ("a",))
    assert caught.value.missing == 4
    manager.end_pass(ok=False)
    manager.finished("a")
    # While that lasts a page takes a place for each layer: two of eight.
    prompt(driver, 8, EVERYTHING)
    assert driver.binding.is_act.sum() == 2
    driver.copier.fails = lambda _way: False
    driver.manager._room.retry(needed=True)
    driver.settle()
    driver.check()
    assert driver.binding.on_host[:, driver.binding.is_act].all()
    driver.close()


def test_rebuilding_that_fails_names_who_reads_it() -> None:
    """As a copy that fails; activations on the host are unharmed."""
    driver = ActDriver()
    keys = [prompt(driver, 4), prompt(driver, 4)]
    driver.sent_away()
    driver.copier.fails = lambda way: way == "rebuild"
    requests = [
        PassRequest(key, np.array([*driver.requests[key].pages, 20 + n]), 4, 1)
        for n, key in enumerate(keys)
    ]
    driver.manager.begin_pass(requests)
    with pytest.raises(LayerReadError, match="KV was not computed") as caught:
        driver.manager.wait_unit(0, 0)
    assert set(caught.value.keys) <= set(keys)
    driver.manager.end_pass(ok=False)
    driver.copier.fails = lambda _way: False
    assert driver.forward(keys, 1) == keys
    driver.check()
    driver.manager.freed(np.array([20, 21]))
    driver.close()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_rebuild_is_tried_twice(num_failures: int) -> None:
    """In a unit, and for what returns to stay; then it has failed."""
    left = [0]

    def fails(way: str) -> bool:
        left[0] -= way == "rebuild"
        return way == "rebuild" and left[0] >= 0

    driver = ActDriver(choose=only_acts)
    key = prompt(driver, 4)
    driver.sent_away()
    driver.copier.fails = fails
    left[0] = num_failures
    works = num_failures == 1
    assert driver.forward([key], 1) == ([key] if works else [])
    assert driver.num_broken == (not works)
    left[0] = num_failures
    driver.manager.hold(key, EVERYTHING)
    driver.manager.pull(key)
    driver.settle()
    away = int(driver.manager.away([key])[0])
    # One sub-unit of two pages.
    assert away == (0 if works else 2)
    driver.copier.fails = lambda _way: False
    driver.requests[key].retained = EVERYTHING
    assert driver.forward([key], 1) == [key]
    driver.check()
    driver.close()


def test_a_tier_brings_pages_of_both_kinds() -> None:
    """They are read as what they are; what is retained comes with a pull."""
    driver = ActDriver()
    assert driver.load_kinds(1, np.array([True, False, True, False]))
    driver.check()
    key = driver.start(1, 9, EVERYTHING, share=True).key
    assert driver.requests[key].num_tokens == 4 * TOKENS
    assert driver.forward([key], 1) == [key]
    assert driver.manager.report(key).num_act_pages >= 2
    driver.manager.pull(key)
    driver.settle()
    assert driver.manager.missing(key) == 0
    driver.check()
    driver.close()


def test_a_tier_s_page_needs_a_row_of_its_kind() -> None:
    """It cannot become another one."""
    driver = ActDriver(plan=ActPlan(2, 40, 4, 2, ACT_BYTES))
    assert not driver.load_kinds(1, np.array([True] * 3))
    assert (driver.binding.row < 0).all()
    assert driver.load_kinds(1, np.array([True] * 2 + [False]))
    driver.close()


def test_rebuilding_beside_loads_is_not_exposed() -> None:
    """By the clock: of the first unit one sub-unit while others are loaded."""
    clock = ManualClock()
    driver = ActDriver(clock=clock, choose=alternate)
    key = prompt(driver, 8)
    driver.sent_away()
    work, loads = driver.acts.rebuild, driver.copier.to_device
    has_rebuilt = threading.Event()

    def rebuild(*args: object) -> None:
        clock.advance(1.0)
        work(*args)  # type: ignore[arg-type]
        has_rebuilt.set()

    def load(*args: object) -> None:
        # KV loads follow the activations, and here the rebuild of these.
        assert has_rebuilt.wait(PATIENCE_S)
        has_rebuilt.clear()
        loads(*args)  # type: ignore[arg-type]

    driver.acts.rebuild = rebuild  # type: ignore[assignment, method-assign]
    driver.copier.to_device = load  # type: ignore[assignment, method-assign]
    assert driver.forward([key], 1) == [key]
    assert driver.manager.rebuild_s == LAYERS
    assert driver.manager.rebuild_exposed_s == 0.0
    driver.copier.to_device = loads  # type: ignore[method-assign]
    driver.close()


def test_rebuilding_without_loads_is_exposed() -> None:
    """What is on the device needs no link, and nothing hides its rebuilding."""
    clock = ManualClock()
    driver = ActDriver(clock=clock, choose=only_acts)
    key = prompt(driver, 4)
    driver.settle()
    driver.manager._room.drop(driver.binding.num_physical)
    driver.acts.held.clear()
    work = driver.acts.rebuild

    def rebuild(*args: object) -> None:
        work(*args)  # type: ignore[arg-type]
        clock.advance(1.0)

    driver.acts.rebuild = rebuild  # type: ignore[assignment, method-assign]
    threading.Timer(0.05, driver.acts.held.set).start()
    assert driver.forward([key], 1) == [key]
    assert driver.manager.rebuild_s == driver.manager.rebuild_exposed_s == LAYERS
    assert driver.manager.report(key).rebuild_exposed_s == LAYERS
    driver.close()


def slept(rate: float) -> tuple[ManualClock, LinkPace]:
    """Return a clock, and a link on which it moves."""
    clock = ManualClock()
    return clock, LinkPace(Link(rate), 0.0, clock, clock.advance)


def test_weights_take_the_link_one_layer_ahead() -> None:
    """The forward waits for each layer's, and they are counted as a stall."""
    clock, pace = slept(float(PIECE_BYTES))
    driver = ActDriver(
        clock=clock, pace=pace, weight_bytes=3 * PIECE_BYTES // 2, choose=_only_kv
    )
    weights = driver.mover.weights
    assert weights is not None
    manager = driver.manager
    assert manager.begin_pass([PassRequest("a", np.array([1]), 0, 2)]).refused == ()
    for layer in range(LAYERS):
        manager.wait_weights(layer)
        assert weights.num_here > layer
        assert weights.num_started == layer + 2
    manager.end_pass(ok=False)
    assert clock.now() >= LAYERS * 1.5
    manager.finished("a")
    manager.freed(np.array([1]))
    driver.close()


def test_weights_of_a_forward_that_ended_are_passed_over() -> None:
    """Who waits for them is not left waiting, and a new one begins with its first."""
    held = threading.Event()
    clock = ManualClock()
    pace = LinkPace(Link(1.0), 0.0, clock, lambda _s: held.wait(PATIENCE_S))
    stream = WeightStream(pace, 10)
    stream.begin(2)
    stream.end()
    stream.wait(0)
    held.set()
    stream.begin(2)
    stream.wait(0)
    stream.wait(1)
    assert stream.num_here >= 2
    stream.close(PATIENCE_S)
    stream.wait(0)


def test_the_next_forwards_first_weights_come_under_the_last_layer() -> None:
    """They are not brought again, but for a forward that broke off before."""
    clock, pace = slept(1.0)
    stream = WeightStream(pace, 10)
    for num_forwards in (1, 2):
        stream.begin(3)
        for layer in range(3):
            stream.wait(layer)
        stream.end()
        stream._worker.drain(PATIENCE_S)
        assert stream.num_here == stream.num_started == 1
        assert clock.now() == pytest.approx(10.0 * (3 * num_forwards + 1))
    stream.begin(3)
    stream.wait(0)
    stream.end()
    stream._worker.drain(PATIENCE_S)
    assert stream.num_here == stream.num_started == 0
    stream.close(PATIENCE_S)


def test_weights_need_an_emulated_link() -> None:
    """Nothing is copied, so nothing else could take the time."""
    with pytest.raises(ValueError, match="need an emulated link"):
        LayerMover(FakeLayerCopier(1, 1, 1, 1), 8, weight_bytes=1)
    with pytest.raises(ValueError, match="activations of 8 B"):
        LayerMover(FakeLayerCopier(1, 1, 1, 1), 8, act_page_bytes=8)


def test_binding_and_mover_agree_on_activations() -> None:
    """Else flights of activations had nobody to copy them."""
    binding = LayerBinding(1, 4, 12, acts=ActPlan(2, 9, 2, 1, 8))
    mover = LayerMover(FakeLayerCopier(1, 4, 12, 1), 8)
    with pytest.raises(ValueError, match="activations of 8 B, moved as 0 B"):
        LayerManager(binding, mover, 1, 2)
    mover.close()


def test_without_a_plan_nothing_is_captured() -> None:
    """The calls are there, and answer at once."""
    driver = Driver()
    manager = driver.manager
    manager.begin_pass([PassRequest("a", np.array([1]), 0, 2)])
    assert manager.acts_for_write(0, np.array([1])).tolist() == [-1]
    assert manager.wait_weights(0) == 0.0
    manager.end_pass(ok=False)
    assert manager.report("a").bytes_saved == 0
    manager.close()
