"""Parameters are typed, bounded and all of them used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.params import Params, WorkloadError


def test_values_and_defaults_are_given_by_type() -> None:
    """Whole numbers serve as numbers; absent parameters take their default."""
    params = Params("w", {"n": 3, "x": 2, "on": True, "name": "b", "of": [1, 2]})
    assert params.integer("n") == 3
    assert params.integer("m", 5) == 5
    assert params.number("x") == 2.0
    assert params.number("y", 0.5) == 0.5
    assert params.flag("on", False) is True
    assert params.choice("name", ("a", "b"), "a") == "b"
    assert params.integers("of", [9]) == [1, 2]
    assert params.integers("off", [9]) == [9]
    assert params.has("n")
    assert not params.has("z")
    assert params.table("t", {"k": 1}).integer("k") == 1
    assert Params("w", {"p": "a/b"}).path("p") == Path("a/b")


ASKS: list[tuple[Any, Callable[[Params], Any], str]] = [
    (0, lambda p: p.integer("a"), "a must be a whole number of at least 1, not 0"),
    (True, lambda p: p.integer("a"), "not True"),
    (1.5, lambda p: p.integer("a"), "not 1.5"),
    ("2", lambda p: p.integer("a"), "not '2'"),
    (0.0, lambda p: p.number("a", above=True), "a number above 0, not 0.0"),
    (float("nan"), lambda p: p.number("a"), "not nan"),
    (float("inf"), lambda p: p.number("a"), "a finite number, not inf"),
    (False, lambda p: p.number("a"), "not False"),
    (1, lambda p: p.flag("a", False), "true or false, not 1"),
    ("c", lambda p: p.choice("a", ("x", "y"), "x"), "one of x, y, not 'c'"),
    ([], lambda p: p.integers("a", [1]), "a list of whole numbers"),
    ([1, "b"], lambda p: p.integers("a", [1]), "a list of whole numbers"),
    (3, lambda p: p.path("a"), "the path of a file"),
    (3, lambda p: p.table("a", {}), "a table"),
]


@pytest.mark.parametrize(("value", "ask", "message"), ASKS)
def test_a_wrong_value_is_named_in_one_sentence(
    value: Any, ask: Callable[[Params], Any], message: str
) -> None:
    """The sentence has the workload, the parameter, what it must be, what it is."""
    with pytest.raises(WorkloadError, match=message) as caught:
        ask(Params("chat", {"a": value}))
    assert str(caught.value).startswith("chat: a must be ")


def test_a_missing_parameter_is_named() -> None:
    """What has no default must be given."""
    with pytest.raises(WorkloadError, match="chat needs the parameter size"):
        Params("chat", {}).integer("size")


def test_a_parameter_that_nobody_asked_for_is_refused() -> None:
    """A slip of the pen names its neighbour and all that there is."""
    params = Params("chat", {"num_sesions": 3})
    params.integer("num_sessions", 1)
    params.integer("size", 1)
    with pytest.raises(
        WorkloadError,
        match="no parameter num_sesions; did you mean num_sessions; "
        "it takes num_sessions, size",
    ):
        params.finish()
