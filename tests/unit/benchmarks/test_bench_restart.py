"""What the restart benchmark takes for time in which pages were adopted."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

LONG_S, SHORT_S, LOOK_S = 60.0, 0.02, 0.001


@pytest.fixture
def bench(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return load_script("disk/bench_restart.py")


class Adoption:
    """States one after the other; what comes last stays."""

    def __init__(self, *states: tuple[str, int]) -> None:
        self._states = list(states)

    def __call__(self) -> dict[str, Any]:
        name, adopted = self._states[0]
        if len(self._states) > 1:
            del self._states[0]
        return {"state": name, "adopted": adopted}


def served(begin_s: float, end_s: float) -> float:
    """Serve one token a second."""
    assert end_s > begin_s
    return 1.0


def test_a_window_ends_with_its_state(bench: ModuleType) -> None:
    """What is served after the last page was adopted is not served while adopting."""
    look = Adoption(("adopting", 10), ("adopting", 30), ("adopting", 70), ("done", 90))
    found = bench.window(look, served, "adopting", LONG_S, LOOK_S)
    assert found.adopted == 60
    assert not found.is_whole
    assert 0 < found.seconds < LONG_S


def test_a_whole_window_saw_its_state_to_the_end(bench: ModuleType) -> None:
    """Then it is as long as was asked for, and tells the pages of its own time."""
    look = Adoption(("adopting", 1000), ("adopting", 1007))
    found = bench.window(look, served, "adopting", SHORT_S, LOOK_S)
    assert (found.adopted, found.tokens_per_s) == (7, 1.0)
    assert found.is_whole
    assert found.seconds >= SHORT_S


@pytest.mark.parametrize("name", ["scanning", "done"])
def test_no_window_begins_in_another_state(bench: ModuleType, name: str) -> None:
    """A scan that goes on is not adoption, nor is what comes after it."""
    found = bench.window(Adoption((name, 5)), served, "adopting", SHORT_S, LOOK_S)
    assert found == bench.Window(0.0, 0.0, 0, False)


class Server:
    """Answers at once; its adoption takes a step with each look."""

    def __init__(self, *states: tuple[str, int]) -> None:
        self._look = Adoption(*states)

    def get(self, path: str, timeout_s: float) -> list[dict[str, Any]]:
        del path, timeout_s
        return [{"adoption": {**self._look(), "longest_slice_s": 0.0}}]

    def post(self, path: str, body: dict[str, Any]) -> None:
        del path, body


@pytest.mark.parametrize(
    ("states", "goes_on"),
    [
        ([("scanning", 0), *(("adopting", num) for num in range(100))], True),
        ([("scanning", 0), ("adopting", 1)], False),
        ([("scanning", 0), ("done", 9)], False),
        ([("scanning", 0)] * 40 + [("done", 9)], False),
    ],
)
def test_adoption_has_to_go_on_through_its_window(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    states: list[tuple[str, int]],
    goes_on: bool,
) -> None:
    """A window that adopted nothing, or in which all was adopted before, says so."""
    monkeypatch.setattr(bench, "BEGIN_S", 0.01)
    monkeypatch.setattr(bench, "LOOK_S", LOOK_S)
    monkeypatch.setattr(bench, "wait_adopted", lambda server: {"longest_slice_s": 0.0})
    windows = iter(["scanning", "adopting", "done"])
    look_again = bench.window

    def window(look: Any, rate: Any, name: str, seconds: float) -> Any:
        assert name == next(windows)
        if name == "done":
            return bench.Window(seconds, 10.0, 0, True)
        return look_again(look, rate, name, seconds, LOOK_S)

    monkeypatch.setattr(bench, "window", window)
    told = bench.throughput(Server(*states), LOOK_S)
    assert told["is_adopting_throughout"] is goes_on
    # Too short to say anything of it.
    assert told["ratio_scanning"] is None
