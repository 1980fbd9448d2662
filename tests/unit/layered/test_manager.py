"""The manager where things go wrong: what failed is named, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from sgl_tiered.layered.base import (
    LayerReadError,
    LayerRoomError,
    PassPlan,
    PassRequest,
)
from sgl_tiered.layered.outage import FIRST_PAUSE_S, LONGEST_PAUSE_S
from tests.unit.layered.layered_support import Pool

NOTHING = np.zeros(Pool.LAYERS, np.bool_)
EVERYTHING = ~NOTHING


@pytest.fixture
def make() -> Iterator[Callable[..., Pool]]:
    """Return what makes pools, and closes them."""
    made: list[Pool] = []

    def pool(*args: int, **settings: object) -> Pool:
        made.append(Pool(*args, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield pool
    for one in made:
        one.close()


def prompt(
    key: str, pages: range, retained: np.ndarray = NOTHING, *, is_lost: bool = False
) -> PassRequest:
    """Return a request that computes whole pages."""
    numbers = np.array(pages, np.int64)
    num_new = len(numbers) * Pool.TOKENS
    return PassRequest(key, numbers, 0, num_new, retained, is_lost)


def decoder(key: str, pages: range, *, is_lost: bool = False) -> PassRequest:
    """Return a request whose next token begins the last of its pages."""
    numbers = np.array(pages, np.int64)
    context = (len(numbers) - 1) * Pool.TOKENS
    return PassRequest(key, numbers, context, 1, is_lost=is_lost)


def sent_away(pool: Pool, *requests: PassRequest) -> None:
    """Compute prompts, and leave their layers on the host only."""
    pool.run(*requests)
    pool.settle()
    pool.manager._room.drop(pool.binding.num_physical)
    for one in requests:
        assert (pool.binding.device[:, one.pages] < 0).all()


def picture(pool: Pool) -> dict[str, object]:
    """Return all that the books say."""
    binding = pool.binding
    arrays = (
        binding.device,
        binding.on_host,
        binding.filled,
        binding.copying,
        binding.full,
        pool.manager._book.users,
        pool.manager._book.keep,
        pool.manager._room.in_forward,
    )
    return {
        "arrays": [array.tolist() for array in arrays],
        "room": pool.manager.room(),
        "keys": sorted(map(str, pool.manager._book._records)),
    }


def is_written(pool: Pool, pages: range) -> bool:
    """Say whether the host rows hold what the forwards have written."""
    rows = pool.copier.host[list(pages)]
    return all((rows[:, layer] == layer + 1).all() for layer in range(pool.LAYERS))


def test_a_unit_that_fails_names_who_reads_it(make: Callable[..., Pool]) -> None:
    """Not the others of its group; what the host has is unharmed, and read again."""
    pool = make(half_pages=6)
    sent_away(pool, prompt("a", range(2)), prompt("b", range(2, 4)))
    before = picture(pool)
    pool.copier.bad_rows = {3}
    batch = (
        PassRequest("a", np.array([0, 1, 10]), 4, 1),
        PassRequest("b", np.array([2, 3, 11]), 4, 1),
    )
    # Sub-units of one page, so that it is known which one was not copied.
    pool.mover._sub_unit_pages = 1
    with pytest.raises(LayerReadError, match="Layer 0 of 1 requests") as caught:
        pool.run(*batch)
    assert (caught.value.layer, caught.value.keys) == (0, ("b",))
    pool.manager.end_pass(ok=False)
    assert is_written(pool, range(4))
    assert pool.binding.on_host[:, :4].all()
    assert pool.manager.room().free == before["room"].free - 2 * 3  # type: ignore[attr-defined]
    pool.copier.bad_rows = set()
    pool.run(*batch)
    pool.manager.check()
    assert pool.manager.report("b").num_passes == 3


def test_a_late_failure_is_raised_by_the_end(make: Callable[..., Pool]) -> None:
    """A queued copy turns out to have failed: the forward ends as if broken off."""
    pool = make()
    sent_away(pool, prompt("a", range(2)))

    class Late:
        def order(self) -> None:
            pass

        def finish(self) -> None:
            raise RuntimeError("the device says no")

        def stall_s(self) -> float:
            return 0.0

    working = pool.copier.to_device
    pool.copier.to_device = lambda *args: Late()  # type: ignore[method-assign, assignment, return-value]
    request = decoder("a", range(3))
    with pytest.raises(LayerReadError, match="the device says no"):
        pool.run(request)
    assert pool.manager._forward is None
    assert not pool.binding.filled[:, 2].any()
    pool.copier.to_device = working  # type: ignore[method-assign]
    pool.run(request)
    assert pool.binding.filled[:, 2].all()


def test_no_room_for_a_layer_names_who_writes_it(make: Callable[..., Pool]) -> None:
    """Two layers of room for three, and copies to the host that fail."""
    pool = make(18)
    pool.copier.bad_rows = set(range(16))
    before = picture(pool)
    request = prompt("a", range(6))
    with pytest.raises(LayerRoomError) as caught:
        pool.run(request)
    assert (caught.value.layer, caught.value.keys) == (2, ("a",))
    assert caught.value.missing == 6
    pool.manager.end_pass(ok=False)
    pool.settle()
    assert not pool.binding.filled.any()
    # What the pages hold is void; the copies that failed are not tried again.
    pool.manager.finished("a")
    pool.manager.freed(request.pages)
    assert picture(pool) == before
    pool.copier.bad_rows = set()
    pool.run(request)
    pool.settle()
    assert is_written(pool, range(6))


@pytest.mark.parametrize("lazy", [False, True])
def test_what_the_host_has_leaves_at_once_or_when_needed(
    make: Callable[..., Pool], lazy: bool
) -> None:
    """As the paper has it, or later."""
    pool = make(lazy=lazy)
    pool.run(prompt("a", range(3)))
    pool.settle()
    room = pool.manager.room()
    assert (room.spare, room.free) == ((9, 25) if lazy else (0, 34))


def test_a_refused_forward_changes_nothing(make: Callable[..., Pool]) -> None:
    """Neither room nor books, and whom it refused is not known."""
    pool = make(26, 4)
    pool.run(prompt("a", range(4), EVERYTHING))
    before = picture(pool)
    batch = [decoder("a", range(5)), prompt("b", range(8, 13), EVERYTHING)]
    plan = pool.manager.begin_pass(batch)
    assert plan.refused == (1,)
    assert plan.groups == ()
    after = picture(pool)
    # The new page of the one that is known is noted, and takes nothing yet.
    pool.manager.finished("a")
    assert after["room"] == before["room"]
    assert after["keys"] == before["keys"]
    assert pool.manager.report("b").num_passes == 0
    pool.run(prompt("b", range(8, 9), EVERYTHING))
    pool.manager.check()


def test_what_is_longer_than_a_half_is_brought_back(make: Callable[..., Pool]) -> None:
    """Before the forward, which then stages nothing of it."""
    pool = make(40, 3)
    sent_away(pool, prompt("long", range(5)), prompt("short", range(5, 7)))
    plans: list[PassPlan] = []

    def read(layer: int, group: int, plan: PassPlan, table: np.ndarray) -> None:
        plans.append(plan)
        assert (pool.copier.device[table[:5]] == layer + 1).all()
        short = table[plan.indptr[1] :][:2]
        assert (pool.copier.device[short] == layer + 1).all()

    short = PassRequest("short", np.array([5, 6, 8]), 4, 1)
    long = PassRequest("long", np.array([0, 1, 2, 3, 4, 7]), 10, 1)
    pool.run(long, short, read=read)
    assert (pool.binding.device[:, :5] >= 0).all()
    # One unit for each layer of the short one.
    assert plans[0].num_units == 3
    assert pool.manager.report("long").bytes_pulled == 5 * 3 * 16
    assert pool.manager.report("long").bytes_streamed == 0


def test_without_room_to_bring_it_back_it_is_refused(
    make: Callable[..., Pool],
) -> None:
    """Others' kept layers stand in the way; nothing has begun, and it works later."""
    pool = make(36, 3)
    sent_away(pool, prompt("long", range(5)))
    pool.run(prompt("other", range(8, 14), EVERYTHING))
    assert pool.manager.begin_pass([decoder("long", range(6))]).refused == (0,)
    assert not pool.manager._room.in_forward.any()
    assert pool.manager._forward is None
    assert pool.binding.on_host[:, :5].all()
    pool.manager.finished("other")
    pool.run(decoder("long", range(6)))


def test_a_failed_copy_back_refuses_and_harms_nothing(
    make: Callable[..., Pool],
) -> None:
    """The host keeps what could not be brought back."""
    pool = make(40, 3)
    sent_away(pool, prompt("long", range(5)))
    pool.copier.bad_rows = {2}
    assert pool.manager.begin_pass([decoder("long", range(6))]).refused == (0,)
    assert pool.binding.on_host[:, :5].all()
    pool.manager.check()
    pool.copier.bad_rows = set()
    pool.run(decoder("long", range(6)))


@pytest.mark.parametrize("is_up", [False, True])
def test_a_page_freed_in_flight_is_waited_for_by_the_next(
    make: Callable[..., Pool], is_up: bool
) -> None:
    """The old copy neither speaks for the page nor writes over what is new."""
    pool = make()
    everybody = pool.manager.room().total
    if is_up:
        sent_away(pool, prompt("old", range(3)))
        pool.copier.step_by_step()
        pool.manager.hold("old", EVERYTHING)
        assert pool.manager.pull("old") == 9
    else:
        pool.copier.step_by_step()
        pool.run(prompt("old", range(3)))
    pool.copier.wait_begun(1)
    epochs = pool.binding.epoch[:3].copy()
    pool.manager.finished("old")
    pool.manager.freed(np.arange(3))
    assert (pool.binding.epoch[:3] == epochs + 1).all()
    assert pool.binding.num_adrift > 0
    assert pool.binding.copying[:, :3].any()
    pool.manager.check()
    pool.copier.let_all_go()
    pool.run(prompt("new", range(3)))
    pool.settle()
    assert is_written(pool, range(3))
    assert pool.binding.num_adrift == 0
    pool.manager.finished("new")
    pool.manager.freed(np.arange(3))
    assert pool.manager.room().free == everybody


def test_an_outage_is_probed_ever_less_often(make: Callable[..., Pool]) -> None:
    """One copy after each pause, by the clock; all of them once one has worked."""
    pool = make()
    pool.copier.bad_rows = set(range(16))
    pool.run(prompt("a", range(3)))
    pool.settle()
    begun = pool.copier.begun
    num_begun, pause_s = len(begun), FIRST_PAUSE_S
    for _ in range(10):
        for _ in range(3):
            pool.settle()
            pool.manager.poll()
        assert len(begun) == num_begun, "tried again during the pause"
        pool.clock.advance(1.01 * pause_s)
        pool.manager.poll()
        pool.settle()
        num_begun += 2
        assert len(begun) == num_begun, "not one copy, in two attempts"
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    # What is written meanwhile is put off as well, and promised to nobody.
    pool.run(prompt("b", range(4, 6)))
    pool.settle()
    assert len(begun) == num_begun
    assert pool.manager.room().cached == 0
    assert pool.manager.failures() == {
        "failed_to_host": num_begun,
        "failed_to_device": 0,
        "outages": 1,
    }
    pool.copier.bad_rows = set()
    pool.clock.advance(LONGEST_PAUSE_S)
    for _ in range(2):
        pool.manager.poll()
        pool.settle()
    assert is_written(pool, range(3))
    assert is_written(pool, range(4, 6))
    assert pool.binding.on_host[:, [0, 1, 2, 4, 5]].all()


def test_who_lacks_room_does_not_wait_for_the_pause(make: Callable[..., Pool]) -> None:
    """A forward tries at once what would make its room."""
    pool = make(18)
    pool.copier.bad_rows = set(range(16))
    pool.run(prompt("a", range(3)))
    pool.settle()
    pool.copier.bad_rows = set()
    assert pool.mover.to_host.holds_back
    pool.run(prompt("b", range(4, 9)))
    assert not pool.mover.to_host.lasts


@pytest.mark.parametrize("is_needed", [False, True])
def test_what_failed_in_a_forward_that_broke_off_is_not_sent_later(
    make: Callable[..., Pool], is_needed: bool
) -> None:
    """One of its pages is not full when it is run again: half of it would leave."""
    pool = make()
    manager, binding = pool.manager, pool.binding
    pool.copier.bad_rows = {0, 1}
    whole = prompt("a", range(2))
    manager.begin_pass([whole])
    manager.pages_for_write(0, whole.pages)
    manager.layer_written(0)
    while pool.mover.num_flights:
        pool.mover.wait()
        manager._room.collect()
    manager.end_pass(ok=False)
    assert pool.mover.to_host.holds_back
    pool.copier.bad_rows = set()
    pool.run(PassRequest("a", whole.pages, 0, 3, NOTHING))
    if is_needed:
        manager._room.retry(needed=True)
    else:
        for _ in range(3):
            pool.clock.advance(LONGEST_PAUSE_S)
            manager.poll()
            pool.settle()
    pool.settle()
    assert binding.on_host[:, 0].all()
    assert not binding.on_host[:, 1].any(), "a page that is not complete was sent"
    # Its last token makes it whole, and it leaves as one.
    pool.run(PassRequest("a", whole.pages, 3, 1, NOTHING))
    pool.settle()
    assert binding.on_host[:, 1].all()
    manager.check()


def test_lost_requests_stay_in_the_batch_and_touch_nothing(
    make: Callable[..., Pool],
) -> None:
    """They read and write where padding does; the others' groups are as they were."""
    pool = make(40, 2)
    sent_away(
        pool, *(prompt(key, range(2 * n, 2 * n + 2)) for n, key in enumerate("abc"))
    )
    free = pool.manager.room().free
    before = pool.copier.host[2:4].copy()
    pool.copier.bad_rows = {2, 3}
    batch = [
        PassRequest("a", np.array([0, 1, 8]), 4, 1),
        PassRequest("b", np.array([2, 3, 9]), 4, 1, is_lost=True),
        PassRequest("c", np.array([4, 5, 10]), 4, 1),
    ]
    reads: list[tuple[int, int]] = []

    def read(layer: int, group: int, plan: PassPlan, table: np.ndarray) -> None:
        assert plan.indptr.tolist() == [0, 3, 6, 9]
        assert plan.groups == ((0, 2), (2, 3))
        first, stop = plan.groups[group]
        for n in range(first, stop):
            mine = table[plan.indptr[n] : plan.indptr[n + 1]]
            if n == 1:
                assert (mine == 0).all()
            else:
                assert (pool.copier.device[mine[:2]] == layer + 1).all()
                reads.append((layer, n))

    pool.run(*batch, read=read)
    assert len(reads) == 6
    assert (pool.copier.host[2:4] == before).all()
    assert not pool.binding.filled[:, 9].any()
    assert pool.manager.room().free == free - 2 * 3
    assert pool.manager.report("b").num_passes == 1
    pool.manager.check()


def test_a_batch_of_lost_requests_runs(make: Callable[..., Pool]) -> None:
    """Without a page for any of them."""
    pool = make()
    free = pool.manager.room().free
    pool.run(prompt("a", range(3), is_lost=True))
    assert pool.manager.room().free == free
    assert pool.manager.report("a").num_passes == 0


def test_a_refusal_beside_a_lost_request_names_the_right_one(
    make: Callable[..., Pool],
) -> None:
    """Positions are those of the whole batch."""
    pool = make(26, 4)
    plan = pool.manager.begin_pass(
        [
            prompt("a", range(3), EVERYTHING, is_lost=True),
            prompt("b", range(4, 6), EVERYTHING),
            prompt("c", range(8, 14), EVERYTHING),
        ]
    )
    assert plan.refused == (2,)


def test_pages_that_a_waiting_request_lost_are_left_alone(
    make: Callable[..., Pool],
) -> None:
    """The tree gave it others for them, and a decoder writes to one of them by now."""
    pool = make()
    first, waiting = prompt("a", range(2)), prompt("b", range(4, 6), EVERYTHING)
    pool.run(first, waiting)
    pool.settle()
    pool.manager.freed(waiting.pages)
    begun = np.array([4], np.int64)
    pool.run(PassRequest("c", begun, 0, 1, NOTHING))
    pool.copier.step_by_step()
    manager = pool.manager
    assert manager.release("b", EVERYTHING) == 0
    assert manager.hold("b", EVERYTHING) == manager.missing("b") == 0
    assert manager.away(["b"]).tolist() == [0]
    assert manager.pull("b") == 0
    pool.run(PassRequest("c", begun, 1, 1))
    pool.copier.let_all_go()
    pool.settle()
    assert is_written(pool, range(4, 5))
    manager.check()


def test_close_during_a_forward_ends_it(make: Callable[..., Pool]) -> None:
    """As one that broke off: no copy is left, and no page of it has KV."""
    pool = make()
    sent_away(pool, prompt("a", range(2)))
    pool.copier.step_by_step()
    pool.manager.begin_pass([decoder("a", range(3))])
    pool.copier.wait_begun(4)
    pool.copier.let_all_go()
    pool.manager.close()
    assert pool.manager.is_idle
    assert not pool.binding.filled[:, 2].any()
    assert is_written(pool, range(2))
