"""Facts of ranks: nothing is seen before all have heard it; alone, all is at once."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_tiered.errors import RanksPartedError
from sgl_tiered.pool.facts import Facts


def meet(*ranks: Facts) -> None:
    """Let all tell, and all hear."""
    told = [rank.tell() for rank in ranks]
    for rank in ranks:
        rank.hear(told)


def test_who_is_alone_sees_at_once() -> None:
    """Without a meeting; and looks no more once it knows."""
    found: list[Any] = []
    facts = Facts()
    fact = facts.watch(lambda: found.pop() if found else None)
    assert fact.told == []
    assert not fact.is_common
    found.append("x")
    assert fact.told == ["x"]
    assert fact.is_common
    assert (facts.num_open, facts.tell()) == (0, {})


def test_ranks_see_what_was_told_at_a_meeting() -> None:
    """Neither their own finding before, nor more than all have heard."""
    known: list[Any] = [None, None, None]
    ranks = [Facts(3) for _ in known]
    facts = [
        rank.watch(lambda n=n: known[n])  # type: ignore[misc]
        for n, rank in enumerate(ranks)
    ]
    known[1] = ["failed", True]
    assert [fact.told for fact in facts] == [[]] * 3
    meet(*ranks)
    assert [fact.told for fact in facts] == [[["failed", True]]] * 3
    assert not any(fact.is_common for fact in facts)
    known[0] = known[2] = ["", False]
    meet(*ranks)
    wanted = [["", False], ["failed", True], ["", False]]
    assert [fact.told for fact in facts] == [wanted] * 3
    assert [rank.num_open for rank in ranks] == [0] * 3


def test_nothing_is_told_twice() -> None:
    """However often they meet before the last one knows."""
    late: list[bool] = []
    one, two = Facts(2), Facts(2)
    one.watch(lambda: 1)
    fact = two.watch(lambda: 2 if late else None)
    assert one.tell() == {"0": 1}
    assert one.tell() == {}
    one.hear([{"0": 1}, {}])
    two.hear([{"0": 1}, {}])
    assert fact.told == [1]
    late.append(True)
    meet(one, two)
    assert fact.told == [1, 2]
    assert (one.num_open, two.num_open) == (0, 0)


def test_ranks_that_watch_different_things_have_parted() -> None:
    """Whoever hears of a fact that it never asked for says so."""
    with pytest.raises(RanksPartedError, match="rank 1 of 2"):
        Facts(2).hear([None, {"7": 1}])
