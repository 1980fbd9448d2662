"""A forward that broke off for its layers' sake: repeated, then for the others only."""

from types import SimpleNamespace

import pytest

from sgl_tiered.engines.sglang.layered import recovery
from sgl_tiered.engines.sglang.layered.driver import NoRoomError
from sgl_tiered.engines.sglang.layered.recovery import PAUSES_S, RepeatedForward
from sgl_tiered.layered.base import LayerReadError, LayerRoomError


class FakeDriver:
    """Notes what it is told."""

    def __init__(self):
        self.lost = set()
        self.num_broken_off = self.num_repeated = 0

    def broke_off(self):
        self.num_broken_off += 1

    def repeats(self):
        self.num_repeated += 1

    def lose(self, rids):
        self.lost.update(rids)

    def is_lost(self, rid):
        return rid in self.lost


@pytest.fixture
def aborted(monkeypatch):
    """Whom SGLang is told to end, with the sentence."""
    told = {}

    def abort(req, error, *, is_prefill):
        told[req.rid] = (str(error), is_prefill)

    monkeypatch.setattr(recovery, "_abort", abort)
    return told


def batch(*rids, is_prefill=False):
    mode = SimpleNamespace(is_extend=lambda: is_prefill)
    reqs = [SimpleNamespace(rid=rid) for rid in rids]
    return SimpleNamespace(reqs=reqs, forward_mode=mode)


def repeated(forward, driver, **settings):
    slept = []
    run = RepeatedForward(
        lambda batch: forward(driver), driver, sleep=slept.append, **settings
    )
    return run, slept


def failing(error, until=lambda driver, calls: False):
    """Return a forward that fails until something holds."""
    calls = []

    def forward(driver):
        calls.append(None)
        if not until(driver, len(calls)):
            raise error
        return "done"

    return forward


def test_a_forward_that_works_is_run_once(aborted):
    driver = FakeDriver()
    run, slept = repeated(lambda driver: "done", driver)
    assert run(batch("a")) == "done"
    assert (driver.num_broken_off, driver.num_repeated, slept) == (0, 0, [])


def test_a_passing_failure_ends_nobody(aborted):
    """It is ended in the manager before anything else, and run again."""
    driver = FakeDriver()
    error = LayerReadError(2, ("b",), "no")
    run, slept = repeated(failing(error, lambda driver, n: n > 2), driver)
    assert run(batch("a", "b")) == "done"
    assert (driver.num_broken_off, driver.num_repeated) == (2, 2)
    assert slept == list(PAUSES_S[:2])
    assert not aborted


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (LayerReadError(2, ("b", "c"), "no"), {"b", "c"}),
        (LayerRoomError(2, 5, ("b", "c")), {"c"}),
        (NoRoomError(["b"], 3, "none"), {"b"}),
    ],
)
def test_whom_it_names_ends_and_the_others_are_computed(aborted, error, ended):
    """After a few repetitions; of those that lack room the last one first."""
    driver = FakeDriver()
    run, slept = repeated(failing(error, lambda d, n: ended <= d.lost), driver)
    assert run(batch("a", "b", "c", is_prefill=True)) == "done"
    assert driver.lost == set(aborted) == ended
    assert all(told == (str(error), True) for told in aborted.values())
    assert slept == list(PAUSES_S)
    assert driver.num_repeated == len(PAUSES_S) + 1


def test_what_fails_without_anybody_to_blame_is_raised(aborted):
    """It never runs for ever: each repetition has ended somebody."""
    driver = FakeDriver()
    run, _ = repeated(failing(LayerReadError(0, ("a",), "no")), driver)
    with pytest.raises(LayerReadError):
        run(batch("a", "b"))
    assert driver.lost == {"a"}


@pytest.mark.parametrize(
    "error", [LayerReadError(0, ("a",), "no"), ValueError("the model")], ids=repr
)
def test_one_of_several_ranks_does_not_run_alone(aborted, error):
    """Nor clean up: the others would wait for it in a collective, or it for them."""
    driver = FakeDriver()
    run, _ = repeated(failing(error), driver, is_alone=False)
    with pytest.raises(type(error)):
        run(batch("a"))
    assert (driver.num_broken_off, driver.num_repeated) == (0, 0)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (LayerRoomError(2, 5, ("b", "c")), {"c"}),
        (NoRoomError(["b"], 3, "none"), {"b"}),
    ],
)
def test_what_all_ranks_lack_room_for_ends_the_server_on_none(aborted, error, ended):
    """All find it at the same layer, and end the same requests."""
    driver = FakeDriver()
    forward = failing(error, lambda driver, calls: ended <= driver.lost)
    run, _ = repeated(forward, driver, is_alone=False)
    assert run(batch("a", "b", "c")) == "done"
    assert set(aborted) == driver.lost == ended


def test_whatever_else_goes_wrong_is_raised_at_once(aborted):
    """After the manager was told that the forward does not reach its end."""
    driver = FakeDriver()
    run, _ = repeated(failing(ValueError("the model")), driver)
    with pytest.raises(ValueError, match="the model"):
        run(batch("a"))
    assert (driver.num_broken_off, driver.num_repeated) == (1, 0)
