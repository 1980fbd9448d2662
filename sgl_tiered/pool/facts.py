"""What the ranks of one instance find out each in its own time, told to all of them.

Each rank of a tensor-parallel server has a ``MemPool`` of its own, over a cache that is
the same as every other rank's, and moves its own part of each page. Ranks that acted on
their own findings would part. They do not, for this reason. A pool is a function of

1. the calls that its owner makes, which all ranks make in the same order, as their
   schedulers do the same;
2. its clock, which is rank 0's at the last meeting, alike for all;
3. messages, views and the lease, which rank 0 alone hears of, and hands to all at a
   meeting (`crew.py`);
4. how this rank's own bytes fare: whether its pushes have ended, and how; whether the
   transport may still touch blocks; what pages sum to.

The fourth are ``Fact`` objects. A pool asks for one (``watch``) at a point to which all
ranks come in the same order, so it has the same number on all. At every meeting each
rank tells which of its facts it knows by now, and all hear the same. Nothing of a fact
is seen before that. So all that a pool acts on is the same on all ranks, whenever and
however each one's bytes move; by induction over the meetings they stay the same.

A rank that is alone sees its own facts at once, as if there were no meetings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_tiered.errors import RanksPartedError

__all__ = ["Fact", "Facts"]


class Fact:
    """Something that each rank finds out, once.

    Args:
        num_ranks: of the instance.
        look: returns what this rank knows, as JSON can write it; None for nothing yet.
    """

    __slots__ = ("_is_shared", "_known", "_look", "_told")

    def __init__(self, num_ranks: int, look: Callable[[], Any]) -> None:
        self._look = look
        self._known: Any = None
        self._told: list[Any] = [None] * num_ranks
        self._is_shared = num_ranks > 1

    @property
    def told(self) -> list[Any]:
        """What has been told so far, in the order of the ranks."""
        if not self._is_shared:
            self._told[0] = self.known()
        return [one for one in self._told if one is not None]

    @property
    def is_common(self) -> bool:
        """Whether every rank has told."""
        return len(self.told) == len(self._told)

    def known(self) -> Any:
        """Return what this rank knows, told or not: for who tells, not to act on."""
        if self._known is None:
            self._known = self._look()
        return self._known

    def hear(self, rank: int, value: Any) -> None:
        """Take what a rank tells."""
        self._told[rank] = value


class Facts:
    """The open facts of one rank. One thread calls it.

    Args:
        num_ranks: of the instance.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._num_watched = 0
        self._open: dict[int, Fact] = {}
        # Of the open ones, those that this rank has told already.
        self._told: set[int] = set()

    @property
    def num_ranks(self) -> int:
        """Of the instance."""
        return self._num_ranks

    @property
    def num_open(self) -> int:
        """Facts that some rank has not told; of a rank that is alone, none."""
        return len(self._open)

    def watch(self, look: Callable[[], Any]) -> Fact:
        """Ask for a fact; all ranks ask for the same ones, in the same order.

        Args:
            look: returns what this rank knows, as JSON can write it; None for nothing
                yet. It is asked until it knows, also if nobody waits for it any more.
        """
        fact = Fact(self._num_ranks, look)
        if self._num_ranks > 1:
            self._open[self._num_watched] = fact
            self._num_watched += 1
        return fact

    def tell(self) -> dict[str, Any]:
        """Return what this rank has found out since it was asked last, by number."""
        found = {}
        for number, fact in self._open.items():
            if number not in self._told and fact.known() is not None:
                self._told.add(number)
                found[str(number)] = fact.known()
        return found

    def hear(self, told: Sequence[Mapping[str, Any] | None]) -> None:
        """Take what the ranks have told at a meeting, by rank.

        Raises:
            RanksPartedError: one has told a fact that is not open here.
        """
        for rank, found in enumerate(told):
            for number, value in (found or {}).items():
                fact = self._open.get(int(number))
                if fact is None:
                    raise RanksPartedError(rank, len(told))
                fact.hear(rank, value)
        for over in [n for n in self._told if self._open[n].is_common]:
            del self._open[over]
            self._told.remove(over)
