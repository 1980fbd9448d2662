"""The mover's threads, step by step: order, failures, what is called off, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.layered.binding import Flight
from sgl_tiered.layered.mover import LayerMover
from sgl_tiered.layered.units import Unit
from sgl_tiered.pipelines.shares import Share
from sgl_tiered.testing.throttled import Link, LinkPace
from tests.unit.layered.layered_support import PATIENCE_S, SteppedCopier

LAYER_PAGE_BYTES = 100
HALVES = (np.array([1, 2], np.int32), np.array([3, 4], np.int32))


@pytest.fixture
def copier() -> SteppedCopier:
    """Return a copier of 6 layers, 8 pages and 12 layer-pages."""
    return SteppedCopier(6, 8, 12)


@pytest.fixture
def make(copier: SteppedCopier) -> Iterator[Callable[..., LayerMover]]:
    """Return what makes movers with sub-units of one page, and closes them."""
    made: list[LayerMover] = []

    def mover(**settings: object) -> LayerMover:
        settings = {"sub_unit_pages": 1, **settings}
        clock = settings.pop("clock", ManualClock())
        made.append(LayerMover(copier, LAYER_PAGE_BYTES, clock, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield mover
    copier.let_all_go()
    for one in made:
        one.close()


def units(count: int, rows: int = 1) -> list[Unit]:
    """Return units of neighbouring layers, in the two halves in turn."""
    some = np.arange(rows, dtype=np.int64)
    return [Unit(n, 0, some, HALVES[n % 2][:rows]) for n in range(count)]


def flight(*pages: int, layer: int = 0, is_up: bool = False) -> Flight:
    """Return a flight of pages to or from the layer-pages 5, 6, ..."""
    physical = np.arange(5, 5 + len(pages), dtype=np.int32)
    epochs = np.zeros(len(pages), np.uint32)
    return Flight(layer, np.array(pages, np.int64), physical, epochs, is_up)


def collected(mover: LayerMover, count: int) -> list[object]:
    """Wait for so many landings."""
    landings: list[object] = []
    while len(landings) < count:
        assert mover.wait(), "no landing is to come"
        landings += mover.collect()
    return landings


def layers_begun(copier: SteppedCopier) -> list[int]:
    """Return the layers of the attempts so far."""
    return [layer for _, layer, _ in copier.begun]


def test_one_unit_is_copied_ahead_and_no_more(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Unit 1 while 0 is read; 2, which takes the half of 0, when 0 was read."""
    copier.step_by_step()
    mover = make()
    stream = mover.stream(units(5))
    copier.step(10)
    stream.wait(0)
    mover._stream.drain(PATIENCE_S)
    assert layers_begun(copier) == [0, 1]
    stream.done(0)
    mover._stream.drain(PATIENCE_S)
    assert layers_begun(copier) == [0, 1, 2]
    # Who waits for the next has read the one before, whether told so or not.
    stream.wait(1)
    stream.wait(2)
    mover._stream.drain(PATIENCE_S)
    assert layers_begun(copier) == [0, 1, 2, 3]
    stream.done(2)
    stream.wait(3)
    stream.wait(4)
    assert layers_begun(copier) == [0, 1, 2, 3, 4]
    assert stream.end() == 0.0


def test_the_model_goes_on_while_the_next_unit_is_copied(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """A wait is for one unit, not for those behind it; the end is for all begun."""
    copier.step_by_step()
    stream = make().stream(units(2))
    copier.step()
    stream.wait(0)
    copier.wait_begun(2)
    ended = threading.Thread(target=stream.end)
    ended.start()
    ended.join(0.05)
    assert ended.is_alive(), "the end did not wait for the copy into a half"
    copier.step()
    ended.join(PATIENCE_S)
    assert not ended.is_alive()


def test_what_was_not_begun_at_the_end_is_not_copied(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """A forward that broke off leaves no copies behind."""
    copier.step_by_step()
    stream = make().stream(units(4))
    copier.wait_begun(1)
    ending = threading.Thread(target=stream.end)
    ending.start()
    while not stream._ended:
        pass
    copier.step()
    ending.join(PATIENCE_S)
    stream.done(0)
    assert layers_begun(copier) == [0]


def test_a_copy_that_fails_once_is_tried_again(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Nobody learns of it but the count."""
    copier.num_to_fail = 1
    mover = make()
    stream = mover.stream(units(1))
    stream.wait(0)
    assert layers_begun(copier) == [0, 0]
    assert (mover.to_device.num_failed, mover.to_device.num_outages) == (1, 0)
    assert not mover.to_device.lasts


def test_a_unit_that_fails_tells_which_rows(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Only the sub-unit's; the other units are not harmed."""
    copier.bad_rows = {1}
    mover = make()
    stream = mover.stream([units(1, rows=2)[0], units(2)[1]])
    with pytest.raises(RuntimeError, match="OSError: as asked for"):
        stream.wait(0)
    assert stream.failed_rows(0).tolist() == [1]
    stream.done(0)
    stream.wait(1)
    assert list(stream.failed) == [0]
    assert mover.to_device.num_outages == 1


def test_a_queued_copy_that_fails_late_is_found_at_the_end(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """The model has queued its reads by then; which rows it was is not known."""

    class Late:
        def order(self) -> None:
            pass

        def finish(self) -> None:
            raise RuntimeError("the device says no")

        def stall_s(self) -> float:
            return 0.25

    copier.to_device = lambda *args: Late()  # type: ignore[method-assign, assignment, return-value]
    stream = make(sub_unit_pages=8).stream(units(1, rows=2))
    stream.wait(0)
    assert stream.failed == {}
    assert stream.end() == 0.25
    assert stream.failed == {0: "the device says no"}
    assert stream.failed_rows(0).tolist() == [0, 1]


@pytest.mark.parametrize("is_paced", [False, True])
def test_who_waits_copies_only_without_a_link(
    make: Callable[..., LayerMover], copier: SteppedCopier, is_paced: bool
) -> None:
    """An emulated link is waited for by the stream's thread, beside the model."""
    copier.waiter_copies = True
    threads: list[str] = []
    copier.fails = lambda way: threads.append(threading.current_thread().name) or False  # type: ignore[func-returns-value]
    pace = LinkPace(Link(1e9), clock=ManualClock(), sleep=lambda s: None)
    stream = make(pace=pace if is_paced else None).stream(units(1))
    stream.wait(0)
    mine = threading.current_thread().name
    assert (threads == [mine]) is not is_paced


def test_a_unit_of_the_waiter_that_fails_is_told_alike(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Where the model's thread copies, the same error and the same rows."""
    copier.waiter_copies = True
    copier.bad_rows = {1}
    stream = make().stream(units(1, rows=2))
    with pytest.raises(RuntimeError, match="as asked for"):
        stream.wait(0)
    assert stream.failed_rows(0).tolist() == [1]
    assert stream.end() == 0.0


def test_what_is_called_off_ends_with_its_sub_unit(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """What was copied by then is told."""
    copier.step_by_step()
    mover = make()
    wanted, unwanted = flight(0, 1), flight(2, 3, 4, layer=1)
    mover.start(unwanted)
    mover.start(wanted)
    copier.wait_begun(1)
    mover.call_off(lambda one: one is unwanted)
    copier.step(10)
    first, second = collected(mover, 2)
    assert first.flight is unwanted  # type: ignore[attr-defined]
    assert first.ok.tolist() == [True, False, False]  # type: ignore[attr-defined]
    assert first.error == "called off"  # type: ignore[attr-defined]
    assert second.ok.all()  # type: ignore[attr-defined]
    assert mover.num_flights == 0
    assert not mover.wait()


def test_a_sub_unit_that_fails_leaves_the_others_alone(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Two attempts for the bad page, one for each of the others."""
    copier.bad_rows = {1}
    mover = make()
    mover.start(flight(0, 1, 2))
    (landing,) = collected(mover, 1)
    assert landing.ok.tolist() == [True, False, True]  # type: ignore[attr-defined]
    assert "as asked for" in landing.error  # type: ignore[attr-defined]
    assert [rows for _, _, rows in copier.begun] == [[0], [1], [1], [2]]
    assert mover.to_host.num_failed == 2


def test_close_fails_what_waits(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """What runs ends its sub-unit; nothing begins any more."""
    copier.step_by_step()
    mover = make()
    mover.start(flight(0, 1))
    mover.start(flight(2, layer=1))
    copier.wait_begun(1)
    mover.close(timeout_s=0.01)
    mover.start(flight(3, layer=2))
    late = collected(mover, 2)
    assert [one.flight.layer for one in late] == [1, 2]  # type: ignore[attr-defined]
    assert not any(one.ok.any() for one in late)  # type: ignore[attr-defined]
    copier.step()
    (first,) = collected(mover, 1)
    assert first.ok.tolist() == [True, False]  # type: ignore[attr-defined]
    assert len(copier.begun) == 1


def test_close_during_a_forward_does_not_hang_its_end(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """The unit behind the one that runs fails first, and both are waited for."""
    copier.step_by_step()
    mover = make()
    stream = mover.stream(units(2))
    copier.wait_begun(1)
    mover.close(timeout_s=0.01)
    ending = threading.Thread(target=stream.end, daemon=True)
    ending.start()
    copier.step()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert list(stream.failed) == [1]


def test_a_refused_guard_ends_copies(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """It refuses where the mover closes; nothing is copied then."""

    class Refusing:
        def wait(self, stop: threading.Event) -> bool:
            return False

    mover = make(guard=Refusing())
    stream = mover.stream(units(1))
    with pytest.raises(RuntimeError, match="the mover is closed"):
        stream.wait(0)
    mover.start(flight(0, 1))
    (landing,) = collected(mover, 1)
    assert not landing.ok.any()  # type: ignore[attr-defined]
    assert "the mover is closed" in landing.error  # type: ignore[attr-defined]
    assert copier.begun == []


def test_every_sub_unit_asks_the_guard(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Of units as of flights."""
    asked: list[str] = []

    class Counting:
        def wait(self, stop: threading.Event) -> bool:
            asked.append(threading.current_thread().name)
            return True

    mover = make(guard=Counting())
    stream = mover.stream(units(1, rows=2))
    stream.wait(0)
    mover.start(flight(0, 1, 2))
    mover.start(flight(4, is_up=True))
    collected(mover, 2)
    counts = {name.split("-")[1]: asked.count(name) for name in asked}
    assert counts == {"stream": 2, "down": 3, "up": 1}


def test_each_attempt_takes_the_link(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Bytes, directions and times of copies over an emulated link."""
    clock = ManualClock()
    reserved: list[tuple[int, bool]] = []

    class Counting(LinkPace):
        def reserve(self, num_bytes: int, *, is_store: bool) -> float:
            reserved.append((num_bytes, is_store))
            return super().reserve(num_bytes, is_store=is_store)

    pace = Counting(Link(100.0), clock=clock, sleep=clock.advance)
    mover = make(pace=pace, clock=clock, sub_unit_pages=2)
    mover.start(flight(0, 1, 2))
    collected(mover, 1)
    assert reserved == [(200, True), (100, True)]
    assert clock.now() == pytest.approx(3.0)
    copier.num_to_fail = 1
    stream = mover.stream(units(1))
    stream.wait(0)
    # The attempt that failed has used the link as well.
    assert reserved[2:] == [(100, False)] * 2
    assert clock.now() == pytest.approx(5.0)


class ShareBook:
    """Shares that let everything go and note who asked."""

    def __init__(self) -> None:
        self.asked: list[Share] = []
        self.used_by: list[Share] = []
        self.is_load_active: Callable[[], bool] = lambda: False
        self.until: Callable[[], bool] = lambda: True

    def watch(self, share: Share, is_active: Callable[[], bool]) -> None:
        assert share is Share.LOAD
        self.is_load_active = is_active

    def wait(self, share: Share, stop: threading.Event) -> bool:
        self.asked.append(share)
        while not self.until() and not stop.wait(0.001):
            pass
        return not stop.is_set()

    def used(self, share: Share, seconds: float) -> None:
        self.used_by.append(share)


def test_what_leaves_and_returns_gives_way_and_streams_do_not(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Before each sub-unit, as promotions and as demotions; streams are loads."""
    book = ShareBook()
    mover = make(shares=book)
    mover.start(flight(0, 1))
    mover._down.drain(PATIENCE_S)
    assert book.asked == book.used_by == [Share.DEMOTE] * 2
    mover.start(flight(2, is_up=True))
    mover._up.drain(PATIENCE_S)
    assert book.asked[2:] == book.used_by[2:] == [Share.PROMOTE]
    copier.step_by_step()
    stream = mover.stream(units(1))
    copier.wait_begun(4)
    assert book.is_load_active()
    copier.step()
    stream.wait(0)
    assert len(book.asked) == 3


def test_nothing_gives_way_while_somebody_waits_for_it(
    make: Callable[..., LayerMover], copier: SteppedCopier
) -> None:
    """Who waits for room does not wait for shares as well."""
    book = ShareBook()
    mover = make(shares=book)
    book.until = mover._hurry.is_set
    mover.start(flight(0, 1, 2))
    collected(mover, 1)
    # The first sub-unit had asked before anybody waited.
    assert len(book.asked) <= 1
    assert len(copier.begun) == 3


def test_sizes_that_make_no_sense_are_refused(copier: SteppedCopier) -> None:
    """Sub-units of nothing would never end."""
    with pytest.raises(ValueError, match="sub-units of 0"):
        LayerMover(copier, 100, sub_unit_pages=0)
